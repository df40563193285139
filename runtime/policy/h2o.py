"""h2o: heavy hitters by accumulated attention, as many in every head, beside the recent window (2306.14048).

Weights are summed over all rows since a token came and averaged over the query heads that share its KV head; sums are
kept in fp16, so that a heavy hitter stops growing once a row's share is under 2^-11 of its sum. The torch form of
attention runs for it, since the others record the largest weight only.
"""

from runtime.policy.base import Policy

POLICY = Policy(
    name="h2o",
    score="sum",
    share="head",
    budget_ratio=0.35,
    floor_entries=0,
    absorb_gate=None,
    block_format="k8v4",
)
