"""Hugging Face `config.json` of the Llama, Mistral, Qwen2 and Qwen3 families as a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.weights.checkpoint import check_shape_rules
from runtime.config import Family, ModelSpec, RopeSpec
from runtime.errors import CheckpointError

FAMILIES: dict[str, Family] = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
# What transformers assumes when a Mistral configuration does not say.
_MISTRAL_WINDOW = 4096


def parse_config(config: Mapping[str, Any], path: Path, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """The spec; CheckpointError for anything that the model definition does not cover."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{path}: model_type {config.get('model_type')!r}, expected one of {', '.join(FAMILIES)}; "
            f"choose a model of one of these families"
        )
    _refuse_variants(config, family, path)
    heads, hidden = _whole(config, "num_attention_heads", path), _whole(config, "hidden_size", path)
    spec = ModelSpec(
        family=family,
        num_layers=_whole(config, "num_hidden_layers", path),
        hidden_size=hidden,
        ffn_size=_whole(config, "intermediate_size", path),
        num_q_heads=heads,
        num_kv_heads=_whole(config, "num_key_value_heads", path, heads),
        head_dim=_whole(config, "head_dim", path, 128 if family == "qwen3" else hidden // heads),
        vocab_size=_whole(config, "vocab_size", path),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, path),
        max_positions=context_length(config, path, family),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        bos_token_id=config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
        eos_token_ids=eos_token_ids,
        name=path.parent.resolve().name,
    )
    check_shape_rules(spec, path)
    return spec


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that attention reaches back, or None for all."""
    if config.get("model_type") == "mistral":
        window = config.get("sliding_window", _MISTRAL_WINDOW)
    else:
        window = config.get("sliding_window", _MISTRAL_WINDOW) if config.get("use_sliding_window") else None
    return None if window is None else int(window)


def token_ids(value: Any) -> tuple[int, ...]:
    """Hugging Face writes one id, a list of them, or null."""
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, int))


def context_length(config: Mapping[str, Any], path: Path, family: str) -> int:
    """Positions the model was made for, those of yarn scaling included."""
    context = _whole(config, "max_position_embeddings", path, _DEFAULT_CONTEXT[family])
    rope = _rope_fields(config)
    if _rope_kind(rope) == "yarn":
        original = int(rope.get("original_max_position_embeddings") or context)
        context = max(context, int(original * float(rope.get("factor") or 1.0)))
    return context


def parse_rope(config: Mapping[str, Any], path: Path) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before) as a `RopeSpec`."""
    rope = _rope_fields(config)
    kind = _rope_kind(rope)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(
            f"{path}: partial_rotary_factor is not 1, expected rotation of all channels; not supported"
        )
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(f"{path}: rope type {kind!r}, expected default, linear, llama3 or yarn; not supported")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = int(original or config.get("max_position_embeddings") or 0)
    factor = float(rope.get("factor") or 0.0)
    if factor < 1.0 or (kind != "linear" and original < 1):
        raise CheckpointError(
            f"{path}: rope scaling {kind} with factor {rope.get('factor')!r} and original context {original}, expected "
            f"a factor of at least 1 and the original context; the configuration is damaged"
        )
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        return _llama3(rope, theta, original, path)
    if rope.get("truncate") is False:
        raise CheckpointError(f"{path}: yarn with truncate: false, expected true; not supported")
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _llama3(rope: Mapping[str, Any], theta: float, original: int, path: Path) -> RopeSpec:
    low, high = float(rope.get("low_freq_factor") or 0.0), float(rope.get("high_freq_factor") or 0.0)
    if not 0 < low < high:
        raise CheckpointError(
            f"{path}: llama3 rope with low_freq_factor {low} and high_freq_factor {high}, expected 0 < low < high; "
            f"the configuration is damaged"
        )
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=float(rope["factor"]),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN, section 3.4: 0.1 ln(factor) + 1 unless the configuration says otherwise."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(float(rope["mscale"])) / scale(float(rope["mscale_all_dim"]))
    return scale(1.0)


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, dict) else {"rope_type": repr(rope)}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _refuse_variants(config: Mapping[str, Any], family: str, path: Path) -> None:
    rules = (
        ("hidden_act", config.get("hidden_act", "silu") in ("silu", "swish"), "silu"),
        ("attention_bias", family == "qwen2" or not config.get("attention_bias"), "false"),
        ("mlp_bias", not config.get("mlp_bias"), "false"),
        ("quantization_config", not config.get("quantization_config"), "an unquantized model"),
    )
    for name, good, expected in rules:
        if not good:
            raise CheckpointError(
                f"{path}: {name} is {str(config.get(name))[:80]}, expected {expected}; this variant is not supported"
            )


def _whole(config: Mapping[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"{path}: {name} is {value!r}, expected a whole number of at least 1; fetch the file again"
        )
    return value
