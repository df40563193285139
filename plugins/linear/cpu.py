"""Torch form of `linear`.

On a CPU in bf16, weights are reordered once into oneDNN's own layout: on a two-core Sapphire Rapids machine all
linears of SmolLM2-135M then take 13 ms for 1 to 8 rows and 35 ms for 256, against 18 and 46 ms with plain weights and
17 (1 row), 35 (8 rows) and 180 ms (256 rows) in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from plugins.linear.params import Product


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively; without that fp32 is the faster engine dtype."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class TorchLinear:
    """`plugins.linear.params.LinearForm` with torch's operations, on any device."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_fast_bf16():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return lambda x: F.linear(x, weight, bias)

    def logits(self, table: torch.Tensor) -> Product:
        def product(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                return torch.mv(table, x[0]).unsqueeze(0).float()
            return F.linear(x, table).float()

        return product
