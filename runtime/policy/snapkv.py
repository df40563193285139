"""snapkv: what the last rows of each prompt look at, smoothed over neighbours, as much in every head (2404.14469).

The paper sums weights over the window and compresses a prompt once. Here the largest weight counts, each turn's prompt
is a window of its own, and what stayed competes again by what later windows look at.
"""

from runtime.policy.base import Policy

POLICY = Policy(
    name="snapkv",
    score="window",
    window_rows=32,
    smooth=7,
    share="head",
    budget_ratio=0.35,
    floor_entries=0,
    absorb_gate=None,
    block_format="k8v4",
)
