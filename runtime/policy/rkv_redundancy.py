"""rkv-redundancy: importance minus redundancy of keys, as many entries in every head (R-KV, 2505.24133).

lambda 0.1 is the paper's. How importance and redundancy are measured here: `plugins.commit.redundancy`.
"""

from runtime.policy.base import Policy

POLICY = Policy(
    name="rkv-redundancy",
    score="seen",
    redundancy=0.1,
    share="head",
    budget_ratio=0.35,
    floor_entries=0,
    absorb_gate=None,
    block_format="k8v4",
)
