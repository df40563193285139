"""What every policy owes: its budget, protected tokens, the same outcome twice, and a conversation that goes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from crafted_cache import HANDLE, LIMITS, ROWS, SPEC, CraftedCache, small
from safetensors.torch import save_file

import runtime.policy.registry as registry
from runtime import gates
from runtime.config import RuntimeConfig
from runtime.errors import UnsupportedPolicyError
from runtime.lifecycle import State
from runtime.policy.base import Gate, Policy
from runtime.policy.registry import ALL_POLICIES
from runtime.request import ErrorEvent, FinishEvent, Request, SamplingParams
from runtime.wiring import load_engine

COMPRESSING = [name for name, policy in ALL_POLICIES.items() if policy.compresses]


@pytest.fixture(autouse=True)
def tiny_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer for the crafted model, whose p depends on the key's first channel alone."""
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    weight = torch.zeros(ROWS, 2 * SPEC.head_dim + 1)
    weight[:, 0] = 2.0
    save_file({"weight": weight, "bias": torch.zeros(ROWS)}, tmp_path / "tiny.safetensors")


def policy_of(name: str) -> Policy:
    policy = small(ALL_POLICIES[name])
    if policy.gate is not None:
        model = (SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, SPEC.name)
        policy = small(policy, gate=Gate(model, "tiny.safetensors"))
    return policy


def lived(policy: Policy) -> CraftedCache:
    """Three turns, a commit after each; positions 30..33 are protected."""
    cache = CraftedCache(policy)
    cache.kv.protect(30, 34)
    for _ in range(3):
        cache.add(72)
        cache.commit()
    return cache


@pytest.mark.parametrize("name", COMPRESSING)
def test_protected_tokens_stay_in_pages_and_nothing_is_lost(name: str) -> None:
    cache = lived(policy_of(name))
    assert {*range(4), *range(30, 34)} <= cache.in_pages()
    assert set(range(cache.kv.num_tokens - 16, cache.kv.num_tokens)) <= cache.in_pages(), "the recent window"
    for row in range(ROWS):
        positions = cache.positions(row)
        assert not cache.in_pages() & {p for p in positions if p == int(p) and cache.policy.tiers == ()}
        entries = cache.entries(row)
        assert all(e.key.isfinite().all() and math.isfinite(e.bias) and e.bias >= -1e-3 for e in entries)
    assert cache.kv.ledger[State.STAGED] == 0


@pytest.mark.parametrize("name", COMPRESSING)
def test_budget_is_respected(name: str) -> None:
    cache = lived(policy_of(name))
    policy, committed = cache.policy, cache.kv.committed_tokens
    alive = cache.kv.ledger[State.COMMITTED]
    if policy.thresholds is not None:
        return  # its budget is what the scorer lets through; see test_rkv_gated.py
    if policy.alternate is not None:
        most = committed * ROWS  # every other commit keeps its own span's share; see test_alternating.py
    elif policy.tiers:
        # A group at the end of each commit and tier may be smaller than its size.
        most = (policy.expected_entries(committed) + 3 * len(policy.tiers) * 3) * ROWS
    else:
        most = max(math.ceil(policy.budget_ratio * committed * ROWS) + ROWS, policy.floor_entries * ROWS)
    assert 0 < alive <= most
    if policy.budget_ratio < 1:
        full = cache.kv.num_tokens * SPEC.kv_token_bytes("fp32")
        assert cache.manager.kv_bytes(HANDLE) < full
        assert cache.manager.stats(HANDLE).evicted > 0


@pytest.mark.parametrize("name", COMPRESSING)
def test_the_same_conversation_gives_the_same_bytes(name: str) -> None:
    first, second = lived(policy_of(name)), lived(policy_of(name))
    assert first.raw() == second.raw() and list(first.kv.blocks.ids) == list(second.kv.blocks.ids)


@pytest.mark.parametrize("name", list(ALL_POLICIES))
def test_a_conversation_goes_on(name: str, tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real engine with a random model, named per request as a client would."""
    policy = ALL_POLICIES[name]
    monkeypatch.setitem(registry.ALL_POLICIES, name, small(policy) if policy.compresses else policy)
    engine = load_engine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=16 << 20, num_threads=1))
    texts = []
    for i, words in enumerate((12, 12, 12, 3)):  # the last is short: much text at once is kept whole at first
        request = Request(f"r{i}", f"turn {i} " * words, SamplingParams(max_tokens=6), "c", policy=name)
        if policy.gate is not None:
            with pytest.raises(UnsupportedPolicyError, match=r"trained on SmolLM2.*2 layers.*train_gate"):
                engine.submit(request)
            assert not engine.has_turns() and engine.stats().conversations == 0
            return
        engine.submit(request)
        worked = True
        while worked:
            events, worked = engine.step()
            assert not any(isinstance(e, ErrorEvent) for e in events), events
            texts += [e for e in events if isinstance(e, FinishEvent)]
    assert [e.stats.generated_tokens for e in texts] == [6, 6, 6, 6]
    stats = engine.kv_stats("c")
    assert (stats.committed > 0) == policy.compresses
    assert (stats.evicted > 0) == (policy.compresses and not name.startswith("quantize"))
    assert LIMITS.policy == "commitkv"
