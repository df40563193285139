"""The torch lowering: runs the model definition eagerly on CPU or a CUDA device, one step at a time.

Attention and its storage are the caller's (`KvStep`), so the same decoder serves paged storage, a contiguous cache
in tests, and probes that keep nothing. Products and row operations come in the forms of `plugins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from builder.model import EMBEDDING, HEAD, DecoderModel, weight_recipes
from builder.recorded_step import MAX_ROWS, Parts, RecordedStep
from builder.rope import inverse_frequencies, rotary_tables
from plugins.linear.cpu import TorchLinear
from plugins.linear.params import Int8Weight, LinearForm, Product, Weight
from plugins.pointwise.cpu import TorchPointwise
from plugins.pointwise.params import Pointwise
from runtime.config import ModelSpec
from runtime.errors import ManifestError

TORCH_DTYPE: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SCALE_SUFFIX = ".scale"  # of the scales of a matrix stored as INT8

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


class ReadsHidden(KvStep, Protocol):
    """A `KvStep` that also wants the states behind the last layer."""

    def hidden(self, x: torch.Tensor) -> None:
        """x [rows, hidden] in the engine's dtype: residual stream of every row, before the last norm."""
        ...


@dataclass(frozen=True)
class DecoderForms:
    """Which form of each operation a decoder runs."""

    linear: LinearForm
    pointwise: Pointwise


TORCH_DECODER_FORMS = DecoderForms(TorchLinear(), TorchPointwise())


@dataclass(frozen=True, eq=False)
class _Weights:
    """dtype: of activations.   tables: embedding and head.   products: everything that is multiplied."""

    dtype: torch.dtype
    norms: dict[str, torch.Tensor]
    tables: dict[str, Weight]
    products: dict[str, Product]


class TorchDecoder:
    """A model ready to run steps. Weights are named and shaped as in `builder.model.weight_recipes`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        dtype: str,
        device: str = "cpu",
        forms: DecoderForms = TORCH_DECODER_FORMS,
    ) -> None:
        """Takes weights one by one, so that a lazy mapping never has to hold all of them."""
        self.spec = spec
        self.dtype = TORCH_DTYPE[dtype]
        self.device = torch.device(device)
        self.frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(self.device)
        self.model = DecoderModel(spec)
        self._pointwise = forms.pointwise
        self._weights = loaded = self._load(weights, forms.linear)
        self._parts = Parts(self.model, loaded.products, loaded.norms, forms.pointwise, self.dtype)
        self._records = self.device.type == "cpu" and self._parts.can_be_recorded
        self._recorded: dict[int, RecordedStep] = {}  # by the number of rows

    def _load(self, weights: Mapping[str, torch.Tensor], form: LinearForm) -> _Weights:
        loaded = _Weights(self.dtype, {}, {}, {})
        biases = {names.qkv: names.qkv_bias for names in self.model.layers if names.qkv_bias}
        for recipe in weight_recipes(self.spec):
            name = recipe.name
            if name in biases.values():
                continue
            if recipe.is_norm:
                loaded.norms[name] = self._owned(weights[name].to(self.device, torch.float32))
                continue
            data = self._read_matrix(weights, name)
            shape = (data.codes if isinstance(data, Int8Weight) else data).shape
            assert tuple(shape) == recipe.shape, f"{name}: {tuple(shape)} is not {recipe.shape}"
            if name in (EMBEDDING, HEAD):
                loaded.tables[name] = data
                if name == self.model.head:
                    loaded.products[name] = form.logits(data)
            else:
                bias = biases.get(name)
                wide = None if bias is None else weights[bias].to(self.device, self.dtype)
                loaded.products[name] = form.linear(data, wide)
        return loaded

    def _read_matrix(self, weights: Mapping[str, torch.Tensor], name: str) -> Weight:
        is_table = name in (EMBEDDING, HEAD)
        data = weights[name]
        if data.dtype == torch.int8:
            codes = data.to(self.device)
            scale = weights[name + SCALE_SUFFIX].to(self.device).clone()
            return Int8Weight(codes.clone() if is_table else codes, scale)
        data = data.to(self.device, self.dtype)
        return self._owned(data) if is_table else data

    def _owned(self, data: torch.Tensor) -> torch.Tensor:
        """A copy in bf16: other matrices are repacked, so the mapped file can go if nothing else holds it."""
        return data.clone() if self.device.type == "cpu" and self.dtype == torch.bfloat16 else data

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

        token_ids, positions: [rows] int64. `interrupted` is asked before each product and each attention, which take
        milliseconds.
        """
        rotary = rotary_tables(self.frequencies, positions, self.spec.rope.attention_factor)
        step = _StepInput(token_ids, rotary, logit_rows)
        if interrupted is None:
            ops = _TorchOps(self.spec, self._weights, kv, self._pointwise, step)
            hidden = self._run_recorded(ops, kv, step)
            return self.model.run(ops) if hidden is None else self.model.logits(ops, hidden)
        try:
            return self.model.run(_GivingWay(self.spec, self._weights, kv, self._pointwise, step, interrupted))
        except _Interrupted:
            return None

    def _run_recorded(self, ops: _TorchOps, kv: KvStep, step: _StepInput) -> torch.Tensor | None:
        """[rows, hidden] of the last layer; None where the step is not one that can be recorded."""
        num_rows = step.token_ids.shape[0]
        if not self._records or not 0 < num_rows <= MAX_ROWS:
            return None
        if num_rows not in self._recorded:
            self._recorded[num_rows] = RecordedStep(self._parts, num_rows)
        return self._recorded[num_rows].run(ops.embed(EMBEDDING), step.rotary, kv)


@dataclass(frozen=True, eq=False)
class _StepInput:
    token_ids: torch.Tensor
    rotary: Rotary
    logit_rows: torch.Tensor


class _TorchOps:
    """`builder.model.Ops` over tensors, for one step."""

    def __init__(self, spec: ModelSpec, weights: _Weights, kv: KvStep, pointwise: Pointwise, step: _StepInput) -> None:
        self._spec = spec
        self._weights, self._products = weights, weights.products
        self._kv = kv
        self._pointwise = pointwise
        self._step = step
        self._head_split = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads]

    def embed(self, weight: str) -> torch.Tensor:
        table, ids = self._weights.tables[weight], self._step.token_ids
        return table.rows(ids, self._weights.dtype) if isinstance(table, Int8Weight) else F.embedding(ids, table)

    def linear(self, x: torch.Tensor, weight: str, bias: str | None) -> torch.Tensor:
        return self._products[weight](x)

    def rms_norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return self._pointwise.rms_norm(x, self._weights.norms[weight], self._spec.rms_eps)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pointwise.add_norm(x, delta, self._weights.norms[weight], self._spec.rms_eps)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._pointwise.gated_silu(gate_up)

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.view(qkv.shape[0], -1, self._spec.head_dim)
        q, k, v = heads.split_with_sizes(self._head_split, 1)  # half the time of torch.split, 30 times a step
        return q, k, v

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._kv.append(layer, q, k, v, self._step.rotary)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._kv.attend(layer, q).reshape(q.shape[0], -1)

    def take_rows(self, x: torch.Tensor) -> torch.Tensor:
        hidden = getattr(self._kv, "hidden", None)  # of a `ReadsHidden`; asked in every step, so not by isinstance
        if hidden is not None:
            hidden(x)
        return x.index_select(0, self._step.logit_rows)

    def logits(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return self._products[weight](x)


class _Interrupted(Exception):
    """A pass gave way."""


class _GivingWay(_TorchOps):
    """Asks `interrupted` before whatever takes long, and raises `_Interrupted` once it says so."""

    def __init__(
        self, spec: ModelSpec, weights: _Weights, kv: KvStep, pointwise: Pointwise, step: _StepInput,
        interrupted: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, kv, pointwise, step)
        self._interrupted = interrupted

    def linear(self, x: torch.Tensor, weight: str, bias: str | None) -> torch.Tensor:
        self._ask()
        return super().linear(x, weight, bias)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        self._ask()
        return super().attend(layer, q)

    def _ask(self) -> None:
        if self._interrupted():
            raise _Interrupted


class _FileWeights(Mapping[str, torch.Tensor]):
    """Tensors of one safetensors file, mapped, read when asked for."""

    def __init__(self, path: Path) -> None:
        from builder.weights.safetensors_files import open_file  # a bare machine with a GPU has torch only

        self._file = open_file(path)
        self._names: tuple[str, ...] = tuple(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int] | None:
        """None where the file has no such tensor."""
        return list(self._file.get_slice(name).get_shape()) if name in self._names else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_decoder(
    weights_file: Path, spec: ModelSpec, dtype: str, device: str = "cpu", forms: DecoderForms = TORCH_DECODER_FORMS
) -> TorchDecoder:
    """The decoder of an engine directory's `weights.safetensors`, whose manifest was checked before.

    Raises ManifestError where `spec` and the weights do not belong together.
    """
    weights = _FileWeights(weights_file)
    for recipe in weight_recipes(spec):
        shape = weights.shape(recipe.name)
        if shape != list(recipe.shape):
            raise ManifestError(
                f"engine: {weights_file} holds {recipe.name} with shape {shape}, the manifest expects "
                f"{list(recipe.shape)}: one of them was changed; build the engine again with builder/build.py"
            )
        scale = weights.shape(recipe.name + SCALE_SUFFIX)
        if scale is not None and scale != [recipe.shape[0]]:
            raise ManifestError(
                f"engine: {weights_file} holds {recipe.name}{SCALE_SUFFIX} with shape {scale}, expected "
                f"{[recipe.shape[0]]}; build the engine again with builder/build.py"
            )
    return TorchDecoder(spec, weights, dtype, device, forms)
