"""commitkv: max(seen, probe), one line over all layers and heads, near-duplicates absorbed, K8V4 blocks.

Design and measurements behind the defaults: README, "What keeps quality".
"""

from runtime.policy.base import Policy

POLICY = Policy(name="commitkv", budget_ratio=0.35, block_format="k8v4", score="both", absorb_gate=0.35)
