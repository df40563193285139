"""commitkv: what re-reading says, one line over all layers and heads, near-duplicates absorbed, K8V4 blocks.

Design and measurements behind the defaults: README, "What keeps quality".
"""

from runtime.policy.base import Policy, Schedule

POLICY = Policy(
    name="commitkv",
    budget_ratio=0.3,
    block_format="k8v4",
    score="norm",
    absorb_gate=0.35,
    schedule=Schedule(recent_tokens=32, reread_growth=1.3, renew=True),
)
