"""The torch lowering: runs the model definition eagerly on CPU or a CUDA device, one step at a time.

Attention and its storage are the caller's (`KvStep`), so the same decoder serves paged storage, a contiguous cache
in tests, and probes that keep nothing.

On a CPU in bf16, weights are reordered once into oneDNN's own layout: on a two-core Sapphire Rapids machine all
linears of SmolLM2-135M then take 13 ms for 1 to 8 rows and 35 ms for 256, against 18 and 46 ms with plain weights and
17 (1 row), 35 (8 rows) and 180 ms (256 rows) in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from builder.model import EMBEDDING, HEAD, DecoderModel, weight_recipes
from builder.rope import inverse_frequencies, rotary_tables
from builder.weights.safetensors_files import open_file
from plugins.pointwise.cpu import TorchPointwise
from plugins.pointwise.params import Pointwise
from runtime.config import ModelSpec

TORCH_DTYPE: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Rotary = tuple[torch.Tensor, torch.Tensor]


class KvStep(Protocol):
    """Storage and attention of the rows of one step; called in layer order, `append` before `attend`."""

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate q and k, store k and v. q [rows, q_heads, D], k and v [rows, kv_heads, D] in the engine's dtype,
        strided views of one tensor; rotary: cos, sin [rows, D/2] fp32. Returns the rotated q, contiguous.

        Channel i pairs with i + D/2: (a, b) becomes (a cos - b sin, b cos + a sin). The tables are computed once
        per step and are the same tensors for every layer.
        """
        ...

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q as `append` returned it; gives [rows, q_heads, D] in q's dtype."""
        ...


@dataclass(frozen=True, eq=False)
class _Weight:
    """`packed`: `data` is in oneDNN's layout and only its linear can read it."""

    data: torch.Tensor
    packed: bool = False


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively; without that fp32 is the faster engine dtype."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class TorchDecoder:
    """A model ready to run steps. Weights are named and shaped as in `builder.model.weight_recipes`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        dtype: str,
        device: str = "cpu",
        pointwise: Pointwise | None = None,
    ) -> None:
        """Takes weights one by one, so that a lazy mapping never has to hold all of them.

        pointwise: form of the row operations, None for torch's.
        """
        self.spec = spec
        self._pointwise = pointwise or TorchPointwise()
        self.dtype = TORCH_DTYPE[dtype]
        self.device = torch.device(device)
        self.frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(self.device)
        self.model = DecoderModel(spec)
        pack = self.device.type == "cpu" and self.dtype == torch.bfloat16 and has_fast_bf16()
        self._weights: dict[str, _Weight] = {}
        for recipe in weight_recipes(spec):
            data = weights[recipe.name]
            assert tuple(data.shape) == recipe.shape, f"{recipe.name}: {tuple(data.shape)} is not {recipe.shape}"
            data = data.to(self.device, torch.float32 if recipe.is_norm else self.dtype)
            if pack and len(recipe.shape) == 2 and recipe.name not in (EMBEDDING, HEAD):
                packed = torch.ops.mkldnn._reorder_linear_weight(data, None)
                self._weights[recipe.name] = _Weight(packed, packed=True)
            else:
                # A copy lets go of the mapped file, whose pages would stay resident beside the packed form.
                self._weights[recipe.name] = _Weight(data.clone() if pack else data)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvStep,
        logit_rows: torch.Tensor,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor | None:
        """Logits [n, vocab] fp32 of rows `logit_rows` [n] int64 (n may be 0), or None when interrupted.

        token_ids, positions: [rows] int64. `interrupted` is asked before each layer.
        """
        rotary = rotary_tables(self.frequencies, positions, self.spec.rope.attention_factor)
        ops = _TorchOps(self.spec, self._weights, kv, self._pointwise, _StepInput(token_ids, rotary, logit_rows))
        return self.model.run(ops, interrupted)


@dataclass(frozen=True, eq=False)
class _StepInput:
    token_ids: torch.Tensor
    rotary: Rotary
    logit_rows: torch.Tensor


class _TorchOps:
    """`builder.model.Ops` over tensors, for one step."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, _Weight], kv: KvStep, pointwise: Pointwise, step: _StepInput
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kv = kv
        self._pointwise = pointwise
        self._step = step
        self._head_split = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads]

    def embed(self, weight: str) -> torch.Tensor:
        return F.embedding(self._step.token_ids, self._weights[weight].data)

    def linear(self, x: torch.Tensor, weight: str, bias: str | None) -> torch.Tensor:
        w = self._weights[weight]
        b = None if bias is None else self._weights[bias].data
        if w.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, w.data, b, "none", [], "")
        else:
            out = F.linear(x, w.data, b)
        return out

    def rms_norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return self._pointwise.rms_norm(x, self._weights[weight].data, self._spec.rms_eps)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pointwise.add_norm(x, delta, self._weights[weight].data, self._spec.rms_eps)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._pointwise.gated_silu(gate_up)

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self._spec.head_dim), self._head_split, dim=1)
        return q, k, v

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._kv.append(layer, q, k, v, self._step.rotary)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._kv.attend(layer, q).reshape(q.shape[0], -1)

    def take_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._step.logit_rows)

    def logits(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        table = self._weights[weight].data
        if x.shape[0] == 1:
            return torch.mv(table, x[0]).unsqueeze(0).float()
        return F.linear(x, table).float()


class _FileWeights(Mapping[str, torch.Tensor]):
    """Tensors of one safetensors file, mapped, read when asked for."""

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        self._names: tuple[str, ...] = tuple(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_decoder(
    weights_file: Path, spec: ModelSpec, dtype: str, device: str = "cpu", pointwise: Pointwise | None = None
) -> TorchDecoder:
    """The decoder of an engine directory's `weights.safetensors`, whose manifest was checked before."""
    return TorchDecoder(spec, _FileWeights(weights_file), dtype, device, pointwise)
