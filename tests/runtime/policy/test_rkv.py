"""Redundancy R-KV, gated R-KV and the alternating policy on crafted keys."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from crafted_cache import HANDLE, LIMITS, ROWS, SPEC, CraftedCache, random_key, small
from safetensors.torch import load_file, save_file

from plugins.commit.choices import Tier
from plugins.commit.redundancy import redundancy
from runtime import gates
from runtime.config import RuntimeConfig
from runtime.errors import ConfigError, UnsupportedPolicyError
from runtime.lifecycle import Event
from runtime.policy import alternating, rkv_gated, rkv_redundancy
from runtime.policy.base import Gate
from runtime.policy.check import check_model
from runtime.policy.registry import policies_for
from runtime.protection import protected_ranges
from runtime.wiring import load_engine

TWINS = range(10, 40)


def twin_key(row: int, position: int) -> torch.Tensor:
    """Positions of TWINS share one key; all others are orthogonal to it."""
    key = random_key(row, position)
    return torch.full_like(key, 2.0) if position in TWINS else key - key.mean()


def test_redundancy_of_a_group_spares_its_newest() -> None:
    keys = torch.stack([twin_key(0, p) for p in range(60)])
    share = redundancy(keys)
    assert share.sum().item() == pytest.approx(1.0, abs=1e-5)
    twins = share[list(TWINS)]
    assert twins[-1] < twins[:-1].min(), "the newest twin counts as new"
    assert twins[:-1].min() > share[[p for p in range(60) if p not in TWINS]].max()


def test_twins_go_first_and_important_ones_stay() -> None:
    def seen(row: int, position: int) -> float:
        return 0.9 if position == 15 else 0.01

    policy = small(rkv_redundancy.POLICY, block_format="kv", budget_ratio=0.6)
    cache = CraftedCache(policy, keys=twin_key, seen=seen)
    cache.add(4 + 60 + 16)
    cache.commit()
    for row in range(ROWS):
        kept = set(cache.positions(row))
        assert 15 in kept, "important although a twin"
        assert 39 in kept, "the newest twin"
        assert set(range(4, 4 + cache.kv.committed_tokens)) - set(TWINS) <= kept, "all that are like no other"
        assert len(kept & set(TWINS)) < 0.4 * len(TWINS)


def test_old_entries_compete_again_with_the_new_ones_that_resemble_them() -> None:
    policy = small(rkv_redundancy.POLICY, block_format="kv", budget_ratio=0.5, redundancy=0.0)
    cache = CraftedCache(policy, keys=lambda row, p: twin_key(row, 10 if p >= 60 or p == 20 else p + 100))
    for _ in range(2):
        cache.add(60)
        cache.commit()
    table, alive = cache.kv.blocks, cache.kv.ledger
    assert sum(table.lens) > 0 and alive is not None
    late = [p for p in cache.positions(0) if p >= 60]
    assert len(late) < 0.35 * len(cache.positions(0)), "many alike need few places"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """p = sigmoid(2 * first channel of the key + value's first channel * 0 + pos * 0)."""
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    weight = torch.zeros(ROWS, 2 * SPEC.head_dim + 1)
    weight[:, 0] = 2.0
    save_file({"weight": weight, "bias": torch.zeros(ROWS)}, tmp_path / "gate.safetensors")
    return Gate((SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, SPEC.name), "gate.safetensors")


def passing(row: int, positions: range, threshold: float) -> list[float]:
    return [float(p) for p in positions if torch.sigmoid(2.0 * random_key(row, p)[0]) > threshold]


def test_the_gate_lets_through_what_scores_above_the_threshold(gate: Gate) -> None:
    cache = CraftedCache(small(rkv_gated.POLICY, gate=gate, floor_entries=0, block_format="kv"))
    cache.add(4 + 96 + 16)
    cache.commit()
    assert cache.manager.pressure < 0.8
    committed = range(4, 4 + cache.kv.committed_tokens)
    for row in range(ROWS):
        assert cache.positions(row) == passing(row, committed, 0.4)


def test_the_threshold_rises_under_pressure(gate: Gate) -> None:
    cache = CraftedCache(small(rkv_gated.POLICY, gate=gate, floor_entries=0, block_format="kv"), kv_mib=1)
    cache.add(4 + 96 + 16)
    cache.manager.stage(HANDLE, Event.TURN_ENDED)
    calm = cache.manager.plan_commit(HANDLE)
    assert calm is not None and calm.rules.choices.threshold == 0.4
    cache.manager.open(1, small(rkv_redundancy.POLICY))
    while cache.manager.pressure <= 0.8:
        cache.manager.settle_rows(cache.manager.reserve_rows(1, LIMITS.page_tokens))
    pressed = cache.manager.plan_commit(HANDLE)
    assert pressed is not None and pressed.rules.choices.threshold == 0.7
    cache.commit()
    committed = range(4, 4 + cache.kv.committed_tokens)
    for row in range(ROWS):
        assert cache.positions(row) == passing(row, committed, 0.7)


def test_names_and_numbers_are_protected() -> None:
    text = "the meeting with Alice Novak is at 14:30 in room 7, code ZX9"
    found = [text[a:b] for a, b in protected_ranges(text, rkv_gated.POLICY.protection)]
    assert "Alice Novak" in found and "14:30" in " ".join(found) and any("ZX" in f for f in found)


def test_a_scorer_serves_the_model_it_was_trained_on_only() -> None:
    layers, heads, head_dim, name = rkv_gated.POLICY.gate.model  # type: ignore[union-attr]
    right = dataclasses.replace(SPEC, num_layers=layers, num_kv_heads=heads, num_q_heads=9, head_dim=head_dim)
    for good in (name, f"{name}.Q4_1", f"{name}-F16"):
        check_model(rkv_gated.POLICY, dataclasses.replace(right, name=good))
    for wrong in (dataclasses.replace(right, name="SmolLM2-360M-Instruct"), right, SPEC,
                  dataclasses.replace(right, name=name, head_dim=32)):  # fmt: skip
        with pytest.raises(UnsupportedPolicyError, match="train_gate"):
            check_model(rkv_gated.POLICY, wrong)


def test_an_engine_of_another_model_does_not_start_with_it(tiny_engine_dir: Path, tmp_path: Path) -> None:
    engine_dir = tmp_path / "engine"
    shutil.copytree(tiny_engine_dir, engine_dir)
    manifest = json.loads((engine_dir / "manifest.json").read_text(encoding="utf-8"))
    manifest["limits"]["policy"] = rkv_gated.POLICY.name
    (engine_dir / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UnsupportedPolicyError, match="trained on SmolLM2"):
        load_engine(engine_dir, RuntimeConfig(kv_memory_bytes=16 << 20, num_threads=1))
    assert rkv_gated.POLICY not in policies_for(SPEC) and rkv_redundancy.POLICY in policies_for(SPEC)


def test_the_shipped_scorer_has_the_shape_it_says() -> None:
    layers, heads, head_dim, _ = rkv_gated.POLICY.gate.model  # type: ignore[union-attr]
    tensors = load_file(gates.GATES_DIR / rkv_gated.POLICY.gate.file)  # type: ignore[union-attr]
    assert tensors["weight"].shape == (layers * heads, 2 * head_dim + 1) and tensors["bias"].shape == (layers * heads,)
    assert all(t.isfinite().all() for t in tensors.values()) and tensors["weight"].abs().sum() > 0


def test_a_missing_scorer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    with pytest.raises(ConfigError, match=r"absent\.safetensors"):
        gates.load_gate("absent.safetensors", torch.device("cpu"))


def test_commits_pool_and_drop_in_turn() -> None:
    tiers = (Tier(0, 1), Tier(16, 2, "mean"), Tier(1024, 4, "max"))
    dropping = dataclasses.replace(alternating.POLICY.alternate, block_format="kv")  # type: ignore[type-var]
    cache = CraftedCache(small(alternating.POLICY, block_format="kv", tiers=tiers, alternate=dropping), keys=twin_key)
    cache.add(60)
    cache.commit()
    assert cache.dropped == 0 and cache.absorbed > 0
    first = cache.kv.committed_tokens
    assert sum(round(math.exp(e.bias)) for e in cache.entries(0)) == first, "everything is in some super token"
    before = cache.positions(0)
    cache.add(60)
    cache.commit()
    new = cache.kv.committed_tokens - first
    assert cache.dropped > 0
    kept = [p for p in cache.positions(0) if p not in before]
    assert len(kept) == pytest.approx(0.35 * new, abs=1), "the span's own share, in every head"
    assert all(p == int(p) for p in kept), "kept as they are"
    cache.add(60)
    cache.commit()
    assert sum(round(math.exp(e.bias)) for e in cache.entries(0)) == cache.kv.committed_tokens - (new - len(kept))
