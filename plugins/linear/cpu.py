"""Torch form of `linear`.

On a CPU in bf16, weights are reordered once into oneDNN's own layout: on a two-core Sapphire Rapids machine all
linears of SmolLM2-135M then take 13 ms for 1 to 8 rows and 35 ms for 256, against 18 and 46 ms with plain weights and
17 (1 row), 35 (8 rows) and 180 ms (256 rows) in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from plugins.linear.params import Int8Weight, Product, Weight


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively; without that fp32 is the faster engine dtype."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class TorchLinear:
    """`plugins.linear.params.LinearForm` with torch's operations, on any device.

    INT8 weights are brought to the dtype of the first x and kept so: right, but no smaller. Native forms read codes.
    """

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Product:
        if isinstance(weight, Int8Weight):
            return _at_first_use(weight, lambda dense: self.linear(dense, bias))
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_fast_bf16():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return lambda x: F.linear(x, weight, bias)

    def logits(self, table: Weight) -> Product:
        if isinstance(table, Int8Weight):
            return _at_first_use(table, self.logits)

        def product(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                return torch.mv(table, x[0]).unsqueeze(0).float()
            return F.linear(x, table).float()

        return product


def _at_first_use(weight: Int8Weight, make: Callable[[torch.Tensor], Product]) -> Product:
    """The product of the dequantized weight, in the dtype of the x that comes first."""
    made: list[Product] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(make(weight.dequantized(x.dtype)))
        return made[0](x)

    return product
