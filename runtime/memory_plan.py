"""How many bytes weights and conversations take: arithmetic only, used by the builder's plan and the runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plugins.layout import BlockLayout, PageLayout
from runtime.config import DTYPE_BYTES, EngineLimits, ModelSpec
from runtime.policy.base import Policy

TABLE_ENTRY_BYTES = 4


def page_layout(model: ModelSpec, limits: EngineLimits) -> PageLayout:
    """Geometry of one page of this engine."""
    return PageLayout(
        num_layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_tokens=limits.page_tokens,
        element_bytes=DTYPE_BYTES[limits.kv_dtype],
    )


def block_layout(model: ModelSpec, limits: EngineLimits, block_format: str) -> BlockLayout:
    """Geometry of one committed block; format "kv" means the engine's KV dtype."""
    stored = limits.kv_dtype if block_format == "kv" else block_format
    return BlockLayout(stored, limits.block_entries, model.head_dim)  # type: ignore[arg-type]


def weight_bytes(model: ModelSpec, dtype: str, weight_dtype: str | None = None) -> int:
    """Bytes of an engine's weights: norms in fp32, biases in `dtype`, matrices in `weight_dtype` (None: `dtype`).

    INT8 matrices have one fp32 scale per output.
    """
    q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, ffn = model.hidden_size, model.ffn_size
    tables = 1 if model.tied_embeddings else 2
    outputs = model.num_layers * (q_size + 2 * kv_size + hidden + 2 * ffn + hidden) + tables * model.vocab_size
    per_layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * ffn
    elements = model.num_layers * per_layer + tables * model.vocab_size * hidden
    biases = model.num_layers * (q_size + 2 * kv_size) if model.qkv_bias else 0
    norms = model.num_layers * (2 * hidden + (2 * model.head_dim if model.qk_norm else 0)) + hidden
    matrices = elements + 4 * outputs if weight_dtype == "int8" else elements * DTYPE_BYTES[dtype]
    return matrices + biases * DTYPE_BYTES[dtype] + norms * 4


@dataclass(frozen=True)
class ConversationMemory:
    """What one conversation of `num_tokens` tokens holds at rest, after a commit.

    Protected spans besides the sinks are not foreseen, nor tokens staged since the last commit.
    """

    num_tokens: int
    active_tokens: int
    entries_per_row: int
    page_bytes: int
    block_bytes: int
    table_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.page_bytes + self.block_bytes + self.table_bytes


def conversation_memory(model: ModelSpec, limits: EngineLimits, policy: Policy, num_tokens: int) -> ConversationMemory:
    """Bytes of one conversation at rest under `policy`; (layer, KV head) rows share the budget evenly."""
    active = num_tokens
    entries = 0
    if policy.compresses and num_tokens >= policy.schedule.min_tokens:
        active = min(num_tokens, policy.schedule.recent_tokens + policy.protection.sink_tokens)
        committed = num_tokens - active
        entries = policy.expected_entries(committed)
    num_pages = -(-active // limits.page_tokens) + (_exact_pages(policy, limits) if entries else 0)
    num_blocks = model.num_kv_rows * -(-entries // limits.block_entries)
    table_words = 2 * num_pages + 2 * num_blocks + (model.num_kv_rows + 1 if num_blocks else 0)
    return ConversationMemory(
        num_tokens=num_tokens,
        active_tokens=active,
        entries_per_row=entries,
        page_bytes=num_pages * page_layout(model, limits).page_bytes,
        block_bytes=num_blocks * block_layout(model, limits, policy.block_format).stored_bytes,
        table_bytes=table_words * TABLE_ENTRY_BYTES,
    )


def peak_memory(model: ModelSpec, limits: EngineLimits, policy: Policy, num_tokens: int, active_tokens: int) -> int:
    """Bytes of pages and blocks that a conversation holds at most under a policy that compresses under pressure.

    active_tokens: protected ones, and those that arrived since the last commit, besides the recent window. Blocks are
    counted as full as `repack_ratio` lets them be at worst, and the budget as the warm-up has it at this length.
    """
    layout = page_layout(model, limits)
    if num_tokens < policy.schedule.min_tokens:
        return -(-num_tokens // limits.page_tokens) * layout.page_bytes
    active = min(num_tokens, policy.schedule.recent_tokens + policy.protection.sink_tokens + active_tokens)
    committed = num_tokens - active
    given_up = policy.schedule.strength(num_tokens) * (committed - policy.expected_entries(committed))
    entries = min(committed, math.ceil((committed - given_up) / policy.repack_ratio))
    num_blocks = model.num_kv_rows * -(-entries // limits.block_entries)
    # One page more: tokens that stay need not fill the pages that they are moved to.
    num_pages = -(-active // limits.page_tokens) + 1 + _exact_pages(policy, limits)
    block_bytes = block_layout(model, limits, policy.block_format).stored_bytes
    return num_pages * layout.page_bytes + num_blocks * block_bytes


def _exact_pages(policy: Policy, limits: EngineLimits) -> int:
    return -(-policy.exact_entries // limits.page_tokens)


def committed_token_bytes(model: ModelSpec, limits: EngineLimits, policy: Policy) -> float:
    """Bytes that one more old token costs under `policy`, over all layers and heads."""
    if not policy.compresses:
        return page_layout(model, limits).page_bytes / limits.page_tokens
    layout = block_layout(model, limits, policy.block_format)
    many = limits.max_seq_len
    per_token = (policy.expected_entries(2 * many) - policy.expected_entries(many)) / many
    return per_token * model.num_kv_rows * layout.stored_bytes / limits.block_entries
