"""streaming-llm: the first tokens and the newest ones, nothing between (Xiao et al., 2309.17453).

The paper keeps a window of fixed length; here the window is `budget_ratio` of the conversation, so that policies can be
compared at equal bytes. Position ids stay logical: the paper renumbers them within the window.
"""

from runtime.policy.base import Policy

POLICY = Policy(
    name="streaming-llm",
    score="recency",
    share="head",
    budget_ratio=0.35,
    floor_entries=0,
    absorb_gate=None,
    block_format="k8v4",
)
