"""What a model looks like and what an engine may use. Pure records; checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.errors import ConfigError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
DType = Literal["fp32", "bf16", "fp16"]
WeightDType = Literal["same", "int8"]

MAX_THREADS = 1024
DEVICES = ("cpu", "cuda")
_ZERO_IS_NONE = (
    "max_tenant_conversations", "max_conversation_bytes", "max_idle_s", "max_tenant_waiting", "max_tenant_running",
    "max_step_ms", "checkpoint_wait_s",
)  # fmt: skip
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding; fields besides `theta` follow Hugging Face's `rope_scaling` names.

    `attention_factor` is already resolved by the reader (yarn's default, 0.1 ln(factor) + 1, included).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only transformer of the Llama, Mistral, Qwen2 or Qwen3 family."""

    family: Family
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope: RopeSpec
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_kv_rows(self) -> int:
        """Independent lists of entries one conversation has: layers x KV heads."""
        return self.num_layers * self.num_kv_heads

    def kv_token_bytes(self, kv_dtype: str = "fp16") -> int:
        """Bytes one token holds in a full cache of `kv_dtype`."""
        return self.num_kv_rows * 2 * self.head_dim * DTYPE_BYTES[kv_dtype]


@dataclass(frozen=True)
class EngineLimits:
    """What the builder fixed for one engine; the runtime must match every field.

    dtype: activations.   weight_dtype: matrices, "same" as the activations or "int8", one scale per output.
    rotate_values: V is kept rotated, which four bits round better (`builder.rotation`).
    """

    dtype: DType = "bf16"
    kv_dtype: DType = "bf16"
    max_batch_size: int = 16
    max_seq_len: int = 8192
    page_tokens: int = 16
    block_entries: int = 64
    policy: str = "commitkv"
    weight_dtype: WeightDType = "same"
    rotate_values: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_batch_size", 1, 1024),
            ("max_seq_len", 16, 1 << 20),
            ("page_tokens", 8, 256),
            ("block_entries", 16, 256),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(
                    f"{name}: got {value!r}, expected a whole number from {low} to {high}; pass a value in that range"
                )
        for name in ("page_tokens", "block_entries"):
            if getattr(self, name) % 8:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)}, expected a multiple of 8 so that rows stay 16-byte aligned"
                )
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(DTYPE_BYTES)}")
        if self.weight_dtype not in get_args(WeightDType):
            raise ConfigError(
                f"weight_dtype: got {self.weight_dtype!r}, expected same (as the activations) or int8; choose one"
            )


@dataclass(frozen=True)
class RuntimeConfig:
    """What the operator chooses at start; nothing here changes the engine files.

    kv_memory_bytes: bound on pages and blocks together.
    tokens_per_step: token budget of one step over all conversations.
    probe_tokens_per_step: tokens of a span that one probe re-reads.
    watermark: share of the KV memory above which commits are forced.
    max_conversations: conversations held at once; an idle one of low priority is ended to make room.
    max_tenant_conversations: the same for the conversations of one tenant; 0: no bound of its own.
    max_conversation_bytes: KV memory that one conversation may come to hold; 0: all there is.
    max_idle_s: a conversation is ended after so long without a turn; 0: never.
    max_waiting: turns that may wait for a place in the batch.
    max_tenant_waiting: the same for the turns of one tenant; 0: no bound of its own.
    max_tenant_running: places in the batch that one tenant may take while others run; 0: all.
    max_step_ms: a step with decode rows takes in no more of a prompt than lets it end in about this time, so that the
        next token is not long in coming; 0: `tokens_per_step` alone bounds it.
    id_salt_file: secret of at least 16 bytes that signs conversation ids, see `runtime.serving.identity`; "": none.
    num_threads: threads of the CPU executor; 0: one per core.
    device: "cpu", or "cuda" for the first GPU that the process sees.
    background_commits: the CPU executor's commits are drawn and written by a thread of low priority while steps of
        others run; False: between steps.
    trace_file: a new file for a record of every commit, see `runtime.trace`; "": none.
    checkpoint_url: folder or fsspec URL that keeps conversations between turns, see `runtime.checkpoints`; "": none.
    checkpoint_wait_s: a turn's last event waits so long, at most, until the turn is written, so that no crash loses
        what a client was told; 0: not at all.
    checkpoint_queue_bytes: of conversations copied out and not yet written.
    checkpoint_max_count, checkpoint_max_age_s: of conversations in the store; the oldest go.
    """

    kv_memory_bytes: int = 1 << 30
    tokens_per_step: int = 256
    probe_tokens_per_step: int = 128
    watermark: float = 0.85
    max_conversations: int = 1024
    max_tenant_conversations: int = 0
    max_conversation_bytes: int = 0
    max_idle_s: float = 0.0
    max_waiting: int = 256
    max_tenant_waiting: int = 0
    max_tenant_running: int = 0
    max_step_ms: float = 0.0
    id_salt_file: str = ""
    num_threads: int = 0
    device: str = "cpu"
    background_commits: bool = True
    trace_file: str = ""
    checkpoint_url: str = ""
    checkpoint_wait_s: float = 0.0
    checkpoint_queue_bytes: int = 256 << 20
    checkpoint_max_count: int = 10_000
    checkpoint_max_age_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in (
            "kv_memory_bytes", "tokens_per_step", "probe_tokens_per_step", "max_conversations", "max_waiting",
            "checkpoint_queue_bytes", "checkpoint_max_count", "checkpoint_max_age_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: got {value}, expected at least 1; raise it")
        for name in _ZERO_IS_NONE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: got {value}, expected 0 (no such bound) or more; correct it")
        if not 0 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(
                f"num_threads: got {self.num_threads}, expected 0 (one per core) to {MAX_THREADS}; correct it"
            )
        if self.device not in DEVICES:
            raise ConfigError(f"device: got {self.device!r}, expected one of {', '.join(DEVICES)}; correct it")
        if not 0.0 < self.watermark <= 1.0:
            raise ConfigError(
                f"watermark: got {self.watermark}, expected a share of the KV memory in (0, 1]; correct it"
            )
