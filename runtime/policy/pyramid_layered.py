"""pyramidkv-layered: SnapKV's scores with budgets that fall from layer to layer (2406.02069).

Layer l of L gets a share that falls linearly from 2 - 1/beta to 1/beta of the mean; beta 20 is the paper's. Within a
layer every head keeps as much.
"""

from dataclasses import replace

from runtime.policy import snapkv

POLICY = replace(snapkv.POLICY, name="pyramidkv-layered", layer_beta=20.0)
