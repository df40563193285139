"""pyramidkv-pooled: tiers by age. The recent window is full, the middle 2:1 by mean, the old 4:1 by maximum.

This is the form of PyramidKV that was proposed with CommitKV; the published one is pyramidkv-layered. Pairs that grow
old are merged again in pairs. Tiers end at 128 and 1024 tokens for a chat. Code asks for much of the recent text and
stories for their gist, so there the tiers take shares of the stored entries: 70 % in the base for code, 50 % in the
top for stories. What is committed is INT8; a conversation has one block format, so the middle is INT8 like the top.
"""

from dataclasses import replace

from plugins.commit.choices import Tier
from runtime.policy.base import Policy
from runtime.policy.task_type import TaskType

TIERS = (Tier(0, 1), Tier(128, 2, "mean"), Tier(1024, 4, "max"))
SHARES: dict[TaskType, tuple[float, ...]] = {"code": (0.7, 0.2, 0.1), "story": (0.2, 0.3, 0.5)}

CHAT = Policy(
    name="pyramidkv-pooled-chat",
    score="recency",
    redraw=False,
    budget_ratio=0.35,
    floor_entries=0,
    absorb_gate=None,
    tiers=TIERS,
    block_format="int8",
)
CODE = replace(CHAT, name="pyramidkv-pooled-code", tier_shares=SHARES["code"])
STORY = replace(CHAT, name="pyramidkv-pooled-story", tier_shares=SHARES["story"])
POLICY = replace(CHAT, name="pyramidkv-pooled", by_task=(("code", CODE), ("story", STORY), ("chat", CHAT)))
