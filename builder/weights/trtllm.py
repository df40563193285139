"""Read a TensorRT-LLM checkpoint directory (up to 1.2): config.json and rank*.safetensors, unquantized.

Names differ from Hugging Face's: `mlp.fc` is gate_proj, `mlp.gate` is up_proj, `mlp.proj` is down_proj; q, k and v
are one tensor. Tensor-parallel ranks are merged; pipeline-parallel ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from builder.weights.checkpoint import Checkpoint, TokenizerFiles, check_shape_rules, read_json
from builder.weights.hf_config import context_length, parse_rope
from builder.weights.huggingface import read_tokenizer
from builder.weights.safetensors_files import SafetensorsSource, open_file
from runtime.config import Family, ModelSpec
from runtime.errors import CheckpointError

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "QWenForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_QWEN_TYPES = ("qwen2", "qwen3")

# Hugging Face name -> (name here, dimension that tensor parallelism splits, None: whole on every rank).
_TOP: dict[str, tuple[str, int | None]] = {
    "model.norm.weight": ("transformer.ln_f.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
}
_LAYER: dict[str, tuple[str, int | None]] = {
    "input_layernorm": ("input_layernorm", None),
    "self_attn.o_proj": ("attention.dense", 1),
    "self_attn.q_norm": ("attention.q_layernorm", None),
    "self_attn.k_norm": ("attention.k_layernorm", None),
    "post_attention_layernorm": ("post_layernorm", None),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}
_EMBEDDING = "transformer.vocab_embedding.weight"


class TrtllmTensors:
    """`TensorSource` that splits qkv and joins ranks."""

    def __init__(self, ranks: tuple[SafetensorsSource, ...], spec: ModelSpec, embedding_dim: int | None) -> None:
        self._ranks = ranks
        self._spec = spec
        self._embedding_dim = embedding_dim

    def shape(self, name: str) -> tuple[int, ...] | None:
        source, dim = self._locate(name)
        shapes = [rank.shape(source) for rank in self._ranks]
        if shapes[0] is None or any(shape is None for shape in shapes):
            return None
        part = _qkv_part(name)
        if part is not None:
            sizes = self._rank_sizes()
            good = all(shape[0] == sum(sizes.values()) for shape in shapes if shape)
            return (sizes[part] * len(self._qkv_ranks(part)) if good else shapes[0][0], *shapes[0][1:])
        if dim is None:
            return shapes[0]
        joined = list(shapes[0])
        joined[dim] = sum(shape[dim] for shape in shapes if shape)
        return tuple(self._without_padding(name, joined))

    def read(self, name: str) -> torch.Tensor:
        source, dim = self._locate(name)
        part = _qkv_part(name)
        if part is not None:
            tensors = [self._ranks[rank].read(source) for rank in self._qkv_ranks(part)]
            sizes = self._rank_sizes()
            start = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}[part]
            return torch.cat([tensor[start : start + sizes[part]] for tensor in tensors])
        if dim is None:
            return self._ranks[0].read(source)
        joined = torch.cat([rank.read(source) for rank in self._ranks], dim=dim)
        return joined[: self._spec.vocab_size] if self._is_table(name) else joined

    def _locate(self, name: str) -> tuple[str, int | None]:
        if name == "model.embed_tokens.weight":
            return _EMBEDDING, self._embedding_dim
        if name in _TOP:
            return _TOP[name]
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        if _qkv_part(name) is not None:
            return f"transformer.layers.{layer}.attention.qkv.{kind}", 0
        target, dim = _LAYER[part]
        return f"transformer.layers.{layer}.{target}.{kind}", dim

    def _rank_sizes(self) -> dict[str, int]:
        """Rows of q, k and v in one rank's fused tensor; each rank has at least one KV head."""
        spec, count = self._spec, len(self._ranks)
        kv_size = max(1, spec.num_kv_heads // count) * spec.head_dim
        return {"q": spec.num_q_heads // count * spec.head_dim, "k": kv_size, "v": kv_size}

    def _qkv_ranks(self, part: str) -> range:
        """Ranks whose rows together make `part` once: KV heads are repeated when there are fewer than ranks."""
        count = len(self._ranks)
        return range(count) if part == "q" else range(0, count, max(1, count // self._spec.num_kv_heads))

    def _is_table(self, name: str) -> bool:
        return name in ("lm_head.weight", "model.embed_tokens.weight")

    def _without_padding(self, name: str, shape: list[int]) -> list[int]:
        """Tables are padded so that every rank has equally many rows."""
        if self._is_table(name) and shape[0] > self._spec.vocab_size:
            shape[0] = self._spec.vocab_size
        return shape


def read_trtllm(directory: Path, tokenizer: TokenizerFiles | None = None) -> Checkpoint:
    """A checkpoint from `directory`; raises CheckpointError."""
    path = directory / "config.json"
    config = read_json(path)
    family = _family(config, path)
    _refuse_variants(config, path)
    num_ranks = int(config.get("mapping", {}).get("tp_size", 1))
    files = [directory / f"rank{rank}.safetensors" for rank in range(num_ranks)]
    ranks = tuple(SafetensorsSource({file: data}, dict.fromkeys(data.keys(), file)) for file, data in
                  ((file, open_file(file)) for file in files))  # fmt: skip
    if tokenizer is None and not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory}: holds no tokenizer.json, which TensorRT-LLM checkpoints leave out; "
            f"pass the original model's directory with --tokenizer DIR"
        )
    spec = _spec(config, path, family, ranks[0])
    if spec.num_q_heads % num_ranks or max(spec.num_kv_heads, num_ranks) % min(spec.num_kv_heads, num_ranks):
        raise CheckpointError(f"{path}: {spec.num_q_heads} heads do not divide over {num_ranks} ranks; it is damaged")
    parallel_embedding = num_ranks > 1 and config.get("use_parallel_embedding")
    embedding_dim = int(config.get("embedding_sharding_dim", 0)) if parallel_embedding else None
    return Checkpoint(
        spec=spec,
        kind="tensorrt_llm",
        tensors=TrtllmTensors(ranks, spec, embedding_dim),
        tokenizer=tokenizer or read_tokenizer(directory),
        files=(path, *files),
    )


def _qkv_part(name: str) -> str | None:
    for part in ("q", "k", "v"):
        if f".self_attn.{part}_proj." in name:
            return part
    return None


def _family(config: Mapping[str, Any], path: Path) -> Family:
    architecture = config.get("architecture")
    family = FAMILIES.get(str(architecture))
    if architecture == "QWenForCausalLM" and config.get("qwen_type") not in _QWEN_TYPES:
        family = None
    if family is None:
        raise CheckpointError(
            f"{path}: architecture {architecture!r}, expected one of {', '.join(FAMILIES)}; choose a supported family"
        )
    return "qwen3" if config.get("qwen_type") == "qwen3" else family


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    mapping, quantization = config.get("mapping", {}), config.get("quantization") or {}
    algorithm = quantization.get("quant_algo")
    rules = (
        ("quantization.quant_algo", algorithm in (None, "", "NO_QUANT"), algorithm, "an unquantized checkpoint"),
        ("mapping.pp_size", mapping.get("pp_size", 1) == 1, mapping.get("pp_size"), "1; convert it with --pp_size 1"),
        ("mapping.cp_size", mapping.get("cp_size", 1) == 1, mapping.get("cp_size"), "1; convert it with --cp_size 1"),
        ("hidden_act", config.get("hidden_act", "silu") in ("silu", "swiglu"), config.get("hidden_act"), "silu"),
        ("mlp_bias", not config.get("mlp_bias"), config.get("mlp_bias"), "false"),
        ("moe.num_experts", not (config.get("moe") or {}).get("num_experts"), config.get("moe"), "a dense model"),
    )
    for name, good, got, expected in rules:
        if not good:
            raise CheckpointError(f"{path}: {name} is {got!r}, expected {expected}; this checkpoint is not supported")


def _spec(config: Mapping[str, Any], path: Path, family: Family, rank: SafetensorsSource) -> ModelSpec:
    def need(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number of at least 1; it is damaged")
        return value

    if rank.shape("transformer.layers.0.attention.dense.bias") is not None:
        raise CheckpointError(f"{path}: attention output has a bias, expected none; this variant is not supported")
    heads, hidden = need("num_attention_heads"), need("hidden_size")
    scaling = config.get("rotary_scaling") or {}
    renamed = {
        "rope_theta": config.get("rotary_base", 10000.0),
        "rope_scaling": scaling,
        "partial_rotary_factor": config.get("rotary_pct", 1.0),
        "max_position_embeddings": need("max_position_embeddings"),
    }
    spec = ModelSpec(
        family=family,
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=need("intermediate_size"),
        num_q_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_size") or hidden // heads),
        vocab_size=need("vocab_size"),
        rms_eps=float(config.get("norm_epsilon", 1e-5)),
        rope=parse_rope(renamed, path),
        max_positions=context_length(renamed, path, family),
        tied_embeddings=rank.shape("lm_head.weight") is None,
        qkv_bias=rank.shape("transformer.layers.0.attention.qkv.bias") is not None,
        qk_norm=rank.shape("transformer.layers.0.attention.q_layernorm.weight") is not None,
        name=path.parent.resolve().name,
    )
    check_shape_rules(spec, path)
    return spec
