"""pyramidkv-rkv-alternating: commits pool by age and drop by redundancy in turn.

The first commit, the third and so on are pyramidkv-pooled's, the others rkv-redundancy's on the span that they commit.
What R-KV kept as it was becomes part of super tokens when a later pooling finds it old enough.
"""

from dataclasses import replace

from runtime.policy import pyramid_pooled
from runtime.policy.base import Policy

_REDUNDANCY = replace(
    pyramid_pooled.CHAT, name="rkv-redundancy of the span", tiers=(), redundancy=0.1, share="head", budget_ratio=0.35
)
POLICY: Policy = replace(pyramid_pooled.CHAT, name="pyramidkv-rkv-alternating", alternate=_REDUNDANCY)
