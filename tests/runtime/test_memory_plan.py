"""The plan's arithmetic, against counts by hand."""

from __future__ import annotations

import dataclasses

from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.memory_plan import (
    block_layout,
    committed_token_bytes,
    conversation_memory,
    page_layout,
    peak_memory,
    weight_bytes,
)
from runtime.policy.registry import ALL_POLICIES

SMOLLM2 = ModelSpec(
    family="llama", num_layers=30, hidden_size=576, ffn_size=1536, num_q_heads=9, num_kv_heads=3, head_dim=64,
    vocab_size=49152, rms_eps=1e-5, rope=RopeSpec(100000.0), max_positions=8192, tied_embeddings=True,
)  # fmt: skip
LIMITS = EngineLimits()


def test_weights() -> None:
    assert SMOLLM2.kv_token_bytes("bf16") == 23040
    matrices = 49152 * 576 + 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536)
    assert weight_bytes(SMOLLM2, "bf16") == 2 * matrices + 4 * 61 * 576


def test_full_keeps_every_token_in_pages() -> None:
    held = conversation_memory(SMOLLM2, LIMITS, ALL_POLICIES["full"], 1601)
    assert held.active_tokens == 1601 and held.block_bytes == 0
    assert held.page_bytes == 101 * page_layout(SMOLLM2, LIMITS).page_bytes
    # 16 tokens a page: their K and V, and one fp16 score per KV head and layer.
    assert page_layout(SMOLLM2, LIMITS).page_bytes == 16 * (23040 + 90 * 2)


def test_short_conversations_are_left_alone() -> None:
    policy = ALL_POLICIES["commitkv"]
    held = conversation_memory(SMOLLM2, LIMITS, policy, policy.schedule.min_tokens - 1)
    assert held.block_bytes == 0 and held.active_tokens == policy.schedule.min_tokens - 1


def test_commitkv_is_smaller_than_int4_is_smaller_than_full() -> None:
    sizes = [
        conversation_memory(SMOLLM2, LIMITS, ALL_POLICIES[name], 8192).total_bytes
        for name in ("commitkv", "quantize-int4", "quantize-int8", "full")
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.25 * sizes[3]


def test_one_more_old_token() -> None:
    """The slope between long conversations is the price of one more old token."""
    for policy in ALL_POLICIES.values():
        short, long = (conversation_memory(SMOLLM2, LIMITS, policy, n) for n in (100_000, 200_000))
        slope = (long.page_bytes + long.block_bytes - short.page_bytes - short.block_bytes) / 100_000
        assert abs(slope / committed_token_bytes(SMOLLM2, LIMITS, policy) - 1) < 0.01


def test_int8_weights_take_a_byte_each_and_a_scale_per_output() -> None:
    halves, bytes_ = weight_bytes(SMOLLM2, "bf16"), weight_bytes(SMOLLM2, "bf16", "int8")
    norms = 4 * 61 * 576
    outputs = 30 * (576 + 2 * 192 + 576 + 2 * 1536 + 576) + 49152
    assert bytes_ - norms == (halves - norms) // 2 + 4 * outputs


def test_the_peak_of_a_turn_counts_fresh_tokens_in_pages_and_blocks_as_empty_as_they_get() -> None:
    policy = ALL_POLICIES["commitkv"]
    page = page_layout(SMOLLM2, LIMITS).page_bytes
    block = block_layout(SMOLLM2, LIMITS, policy.block_format).stored_bytes
    assert peak_memory(SMOLLM2, LIMITS, policy, 999, 300) == 63 * page, "under min_tokens nothing is compressed"
    active = policy.schedule.recent_tokens + policy.protection.sink_tokens + 300
    committed = 8000 - active
    entries = policy.budget_ratio * committed / policy.repack_ratio
    got = peak_memory(SMOLLM2, LIMITS, policy, 8000, 300)
    exact = active / 16 * page + 90 * entries / 64 * block
    assert exact <= got <= exact + 2 * page + 90 * block
    assert got > conversation_memory(SMOLLM2, LIMITS, policy, 8000).total_bytes


def test_the_peak_during_warm_up_keeps_what_the_warm_up_keeps() -> None:
    policy = ALL_POLICIES["commitkv"]
    schedule = dataclasses.replace(policy.schedule, warmup_tokens=4000, warmup_every=500)
    warming = dataclasses.replace(policy, schedule=schedule)
    sizes = [peak_memory(SMOLLM2, LIMITS, p, n, 0) for p in (policy, warming) for n in (3900, 12000)]
    assert sizes[2] > 1.5 * sizes[0] and sizes[3] == sizes[1]
