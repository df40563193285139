"""What a `CommitKVCache` needs to know of its transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from plugins.layout import QUANTIZED
from runtime.chat_format import ChatFormat
from runtime.config import DType, EngineLimits, Family, ModelSpec, RopeSpec
from runtime.errors import ConfigError
from runtime.hf_attention import PREFIX, attention
from runtime.memory_plan import block_layout, page_layout
from runtime.policy.base import Policy
from runtime.wiring import PROBE_REQUEST

BASES = ("sdpa", "eager")
FAMILIES: dict[str, Family] = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
DTYPES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class CacheOptions:
    """Sizes as in `EngineLimits` and `RuntimeConfig`.

    max_seq_len: tokens of the conversation; None: the model's context.
    kv_memory_bytes: bound on pages and blocks; None: room for `max_seq_len` tokens that nothing compresses. Memory is
        taken as it is written, so a generous bound costs nothing.
    record_piece_tokens: a prompt is scored as if it had come in pieces of so many tokens, as the engine's do.
    auto_commit: a prompt that follows an answer commits what the turns before it left.
    """

    max_seq_len: int | None = None
    kv_memory_bytes: int | None = None
    page_tokens: int = 16
    block_entries: int = 64
    probe_tokens: int = 128
    record_piece_tokens: int = 256
    watermark: float = 0.85
    auto_commit: bool = True


def prepare_model(model: PreTrainedModel) -> None:
    """Routes the model's attention through `attention`; what it had serves all other caches. Raises ConfigError."""
    name = str(model.config._attn_implementation)
    if name.startswith(PREFIX):
        return
    if name not in BASES:
        raise ConfigError(
            f"attn_implementation: got {name!r}, expected one of {', '.join(BASES)}; call model.set_attn_implementation"
        )
    AttentionInterface.register(PREFIX + name, attention)
    AttentionMaskInterface.register(PREFIX + name, AttentionMaskInterface()[name])  # type: ignore[no-untyped-call]
    model.set_attn_implementation(PREFIX + name)


def model_spec(model: PreTrainedModel) -> ModelSpec:
    """Shape of a transformers model as our storage needs it. Raises ConfigError for models it cannot serve.

    Rotary embedding stays transformers' own; the spec's `rope` is not read.
    """
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"model: got model_type {config.model_type!r}, expected one of {', '.join(FAMILIES)}; use another cache"
        )
    if model.device.type != "cpu":
        raise ConfigError(f"model: is on {model.device}, expected cpu; CommitKVCache has no other kernels yet")
    if model.dtype not in DTYPES:
        raise ConfigError(f"model: got dtype {model.dtype}, expected one of {', '.join(map(str, DTYPES))}; convert it")
    if "dynamic" in str((config.rope_parameters or {}).get("rope_type", "")):
        raise ConfigError("model: got dynamic rope, which turns old keys again as text grows; use another cache")
    heads = config.num_attention_heads
    return ModelSpec(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_q_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_eps=config.rms_norm_eps,
        rope=RopeSpec(theta=1.0),
        max_positions=config.max_position_embeddings,
        tied_embeddings=bool(config.tie_word_embeddings),
        name=Path(config.name_or_path or config.model_type).name,
    )


def cache_limits(model: PreTrainedModel, options: CacheOptions) -> EngineLimits:
    """The limits of an engine of this model; its own policy is never asked for. Raises ConfigError."""
    window = getattr(model.config, "sliding_window", None) if _slides(model) else None
    longest = int(model.config.max_position_embeddings)
    max_seq_len = options.max_seq_len or min(longest, window or longest)
    if not 1 <= max_seq_len <= longest:
        raise ConfigError(f"max_seq_len: got {max_seq_len}, expected 1 to the model's context of {longest}; correct it")
    if window is not None and max_seq_len > window:
        raise ConfigError(
            f"model: attention slides over {window} tokens, expected no window shorter than max_seq_len {max_seq_len}; "
            f"pass CacheOptions(max_seq_len={window}) or less, up to which the answers are exact"
        )
    if min(options.record_piece_tokens, options.probe_tokens) < 1:
        raise ConfigError("record_piece_tokens, probe_tokens: expected at least 1 each; raise them")
    dtype = DTYPES[model.dtype]
    return EngineLimits(
        dtype=dtype, kv_dtype=dtype, max_batch_size=1, max_seq_len=max_seq_len, page_tokens=options.page_tokens,
        block_entries=options.block_entries, policy="full",
    )  # fmt: skip


def _slides(model: PreTrainedModel) -> bool:
    """Whether any layer of the model has a sliding window."""
    config = model.config
    if config.model_type == "mistral":
        return config.sliding_window is not None
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


def full_cache_bytes(model: PreTrainedModel, limits: EngineLimits) -> int:
    """Bytes for a full cache, a probe beside it and the room of a commit."""
    spec = model_spec(model)
    pages = -(-limits.max_seq_len // limits.page_tokens) + 64
    block_bytes = max(block_layout(spec, limits, name).stored_bytes for name in QUANTIZED)
    needed = pages * page_layout(spec, limits).page_bytes + 4 * spec.num_kv_rows * block_bytes
    return int(needed / 0.8)  # so that a full cache stays under the watermark


def chat_format_of(tokenizer: Any, policy: Policy) -> ChatFormat | None:
    """How the model writes turns; None without a tokenizer. Raises ConfigError where the policy needs one."""
    if tokenizer is None and policy.probe:
        raise ConfigError(
            f"tokenizer: got None, but policy {policy.name} re-reads what it commits, expected the model's tokenizer; "
            f"pass it, or a policy that does not probe"
        )
    if tokenizer is None:
        return None
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
    return ChatFormat(tokenizer.chat_template, bos_token=bos, eos_token=eos)


def probe_tokens_of(tokenizer: Any, chat_format: ChatFormat | None) -> tuple[int, ...]:
    """The tokens that ask the model to repeat a text, as the engine's; none without a tokenizer."""
    if chat_format is None:
        return ()
    text = chat_format.next_turn(PROBE_REQUEST, False).text
    return tuple(tokenizer.encode(text, add_special_tokens=False))
