"""Read a GGUF file: sizes and tokenizer from its metadata, weights dequantized to fp32.

llama.cpp stores q and k of the `llama` architecture with the rows of each head permuted, channels (i, i + D/2) side
by side, because it rotates neighbouring pairs; `_unpermute` undoes it. Other architectures are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from builder.rope import inverse_frequencies
from builder.weights.checkpoint import Checkpoint, TokenizerFiles, check_shape_rules
from builder.weights.gguf_tokenizer import rebuild_tokenizer
from runtime.config import Family, ModelSpec, RopeSpec
from runtime.errors import CheckpointError

FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Parameters that every published Llama 3.x model uses; only `factor` differs.
_LLAMA3 = RopeSpec(theta=0.0, kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


class _BoundedReader(GGUFReader):
    """Refuses to read past the end, where the plain reader returns empty arrays and can loop without end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"needs byte {end}, the file has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)


class GgufTensors:
    """`TensorSource` over a GGUF file."""

    def __init__(self, reader: GGUFReader, path: Path, spec: ModelSpec) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._path = path
        self._spec = spec

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(_gguf_name(name))
        return None if tensor is None else tuple(int(size) for size in reversed(tensor.shape))

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[_gguf_name(name)]
        try:
            data = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: tensor {tensor.name}, {tensor.tensor_type.name}, cannot be dequantized ({error}); "
                f"use a GGUF file in F32, F16, BF16, Q8_0, Q4 to Q6 or their K forms"
            ) from error
        weight = torch.from_numpy(np.array(data, dtype=np.float32))
        if self._spec.family == "llama":
            if ".q_proj." in name:
                return _unpermute(weight, self._spec.num_q_heads)
            if ".k_proj." in name:
                return _unpermute(weight, self._spec.num_kv_heads)
        return weight


def read_gguf(path: Path, tokenizer: TokenizerFiles | None = None) -> Checkpoint:
    """A checkpoint from one GGUF file; `tokenizer` replaces the one described in it. Raises CheckpointError."""
    try:
        reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever the damage leads to
        raise CheckpointError(
            f"{path}: not a complete GGUF file ({error}); fetch it again, and check that it is not split"
        ) from error
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: one part of {metadata['split.count']}, expected a single file; merge the parts")
    spec = _spec(metadata, reader, path)
    check_shape_rules(spec, path)
    return Checkpoint(
        spec=spec,
        kind="gguf",
        tensors=GgufTensors(reader, path, spec),
        tokenizer=tokenizer or rebuild_tokenizer(metadata, path),
        files=(path,),
        sliding_window=metadata.get(f"{metadata['general.architecture']}.attention.sliding_window") or None,
    )


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rest = weight.shape[1:]
    return weight.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _spec(metadata: Mapping[str, Any], reader: GGUFReader, path: Path) -> ModelSpec:
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r}, expected one of {', '.join(FAMILIES)} (Mistral files say llama); "
            f"choose a model of one of these families"
        )

    def need(key: str) -> Any:
        value = metadata.get(f"{architecture}.{key}")
        if value is None or isinstance(value, list):
            raise CheckpointError(
                f"{path}: {architecture}.{key} is {value!r}, expected one number; fetch the file again"
            )
        return value

    tensors = {tensor.name for tensor in reader.tensors}
    if any("_exps" in name or "_inp" in name for name in tensors):
        raise CheckpointError(f"{path}: a mixture-of-experts model, expected a dense one; choose a dense model")
    if "blk.0.attn_output.bias" in tensors:
        raise CheckpointError(f"{path}: attention output has a bias, which no supported family uses; choose another")
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(metadata.get(f"{architecture}.attention.key_length", hidden // max(heads, 1)))
    vocab = next((int(t.shape[-1]) for t in reader.tensors if t.name == "token_embd.weight"), 0)
    if not vocab:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing; fetch the file again")
    rotated = int(metadata.get(f"{architecture}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise CheckpointError(f"{path}: rotates {rotated} of {head_dim} channels, expected all; not supported")
    eos = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    max_positions = int(need("context_length"))
    return ModelSpec(
        family=FAMILIES[architecture],
        num_layers=int(need("block_count")),
        hidden_size=hidden,
        ffn_size=int(need("feed_forward_length")),
        num_q_heads=heads,
        num_kv_heads=int(metadata.get(f"{architecture}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=vocab,
        rms_eps=float(need("attention.layer_norm_rms_epsilon")),
        rope=_rope(metadata, reader, path, (architecture, head_dim, max_positions)),
        max_positions=max_positions,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        name=path.stem,
    )


def _rope(metadata: Mapping[str, Any], reader: GGUFReader, path: Path, shape: tuple[str, int, int]) -> RopeSpec:
    architecture, head_dim, max_positions = shape

    def value(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.rope.{key}", default)

    rope = RopeSpec(theta=float(value("freq_base", 10000.0)))
    factors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        return _llama3_rope(rope, np.array(dequantize(factors.data, factors.tensor_type)).ravel(), path, head_dim)
    kind = value("scaling.type", "linear" if value("scale_linear", None) else "none")
    factor = float(value("scaling.factor", value("scale_linear", 1.0)) or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=factor)
    if kind == "yarn":
        original = int(value("scaling.original_context_length", max_positions))
        attention = float(value("scaling.attn_factor", 1.0)) * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        return replace(
            rope,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=attention,
            beta_fast=float(value("scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(value("scaling.yarn_beta_slow", 1.0)),
        )
    raise CheckpointError(f"{path}: rope scaling {kind!r}, expected none, linear, llama3 or yarn; not supported")


def _llama3_rope(rope: RopeSpec, factors: np.ndarray[Any, Any], path: Path, head_dim: int) -> RopeSpec:
    """GGUF keeps only the resulting divisor of each frequency; find Llama 3's parameters again and compare."""
    candidate = replace(_LLAMA3, theta=rope.theta, factor=float(factors.max(initial=1.0)))
    plain, scaled = inverse_frequencies(rope, head_dim), inverse_frequencies(candidate, head_dim)
    if len(factors) != head_dim // 2 or not np.allclose((plain / scaled).numpy(), factors, rtol=1e-3):
        raise CheckpointError(
            f"{path}: rope_freqs.weight is not Llama 3's scaling with its published parameters "
            f"(low_freq_factor 1, high_freq_factor 4, original context 8192); "
            f"build from the Hugging Face directory instead"
        )
    return candidate
