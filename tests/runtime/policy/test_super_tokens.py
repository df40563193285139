"""CommitKV's own choices: super tokens beside exact ones, their bias, lines that are not redrawn, warm-up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crafted_cache import ROWS, SPEC, CraftedCache, random_key, random_seen, small
from safetensors.torch import save_file

from plugins.commit.choices import Tier
from runtime import gates
from runtime.errors import ConfigError, UnsupportedPolicyError
from runtime.lifecycle import State
from runtime.policy.base import Gate, Policy, Schedule
from runtime.policy.registry import ALL_POLICIES
from runtime.policy.variants import with_changes

COMMITKV = small(ALL_POLICIES["commitkv"], block_format="kv", floor_entries=0)


def commitkv(**changes: object) -> Policy:
    return with_changes(COMMITKV, changes)


@pytest.mark.parametrize("size", [5, 10, 20, 50])
def test_what_falls_below_becomes_super_tokens(size: int) -> None:
    cache = CraftedCache(commitkv(absorb_gate=None, tiers=[[0, size, "weighted"]], budget_ratio=0.2))
    cache.add(4 + 120 + 16)
    cache.commit()
    committed, exact_entries, pooled_entries = cache.kv.committed_tokens, 0, 0
    for row in range(ROWS):
        entries = cache.entries(row)
        exact = [e for e in entries if abs(e.bias) < 1e-6 and e.position == int(e.position)]
        pooled = len(entries) - len(exact)
        below = committed - len(exact)
        assert pooled in (math.ceil(below / size), math.ceil(below / size) - 1)  # a last one of one token looks exact
        exact_entries, pooled_entries = exact_entries + len(exact), pooled_entries + pooled
        weights = {p: random_seen(row, p) for p in range(4, 4 + committed)}
        kept = sorted(weights, key=lambda p: -weights[p])[: len(exact) - 1]
        assert set(kept) <= {e.position for e in exact}
    assert exact_entries == pytest.approx(0.2 * committed * ROWS, abs=ROWS)
    assert cache.dropped == 0 and cache.absorbed > 0 and pooled_entries > 0


def test_weights_are_the_scores() -> None:
    cache = CraftedCache(commitkv(absorb_gate=None, tiers=[[0, 4, "weighted"]], budget_ratio=1e-6))
    cache.add(4 + 20 + 16)
    cache.commit()
    checked = 0
    for row in range(ROWS):
        group = [p for p in range(4, 4 + cache.kv.committed_tokens) if p not in cache.positions(row)][:4]
        weights = torch.tensor([random_seen(row, p) for p in group]).half().float()
        shares = (weights / weights.sum()).clamp(min=1e-7)
        entry = min(cache.entries(row), key=lambda e: e.position)
        if len(group) == 4 and group[-1] - group[0] == 3 and not entry.position.is_integer():
            assert entry.bias == pytest.approx(float(-(shares * shares.log()).sum()), abs=5e-3)
            expected = sum(s * random_key(row, p) for s, p in zip(shares, group, strict=True))
            torch.testing.assert_close(entry.key, expected, atol=5e-3, rtol=5e-3)
            assert entry.score == pytest.approx(float(weights.max()), rel=1e-3)
            checked += 1
    assert checked >= ROWS - 1, "one row holds the one exact entry"


@pytest.mark.parametrize("bias", ["mass", "root", "none"])
def test_bias_of_a_super_token(bias: str) -> None:
    cache = CraftedCache(commitkv(absorb_gate=None, tiers=[[0, 4, "mean"]], budget_ratio=1e-6, pool_bias=bias),
                         seen=lambda row, position: 0.01)  # fmt: skip
    cache.add(4 + 24 + 16)
    cache.commit()
    factor, expected = {"mass": (1.0, math.log(4)), "root": (2.0, 0.0), "none": (1.0, 0.0)}[bias]
    mean = torch.stack([random_key(3, p) for p in range(8, 12)]).mean(dim=0)
    entry = next(e for e in cache.entries(3) if e.position == 9.5)
    torch.testing.assert_close(entry.key, mean * factor)
    assert entry.bias == pytest.approx(expected, abs=1e-3)


def test_principal_parts_of_spans() -> None:
    """Keys of two kinds in turn: each span of 8 becomes one super token of either kind."""

    def two_kinds(row: int, position: int) -> torch.Tensor:
        return random_key(row, position) * 0.01 + (3.0 if position % 2 else -3.0)

    policy = commitkv(absorb_gate=None, tiers=[[0, 8, "pca", 2]], budget_ratio=1e-6)
    cache = CraftedCache(policy, keys=two_kinds, seen=lambda row, position: 0.01)
    cache.add(4 + 48 + 16)
    cache.commit()
    for row in range(1, ROWS):
        entries = cache.entries(row)[: 2 * (cache.kv.committed_tokens // 8)]
        assert [round(float(e.key.mean())) for e in entries] == [-3, 3] * (len(entries) // 2), "positions begin even"
        assert len(entries) >= 10
        assert all(e.bias == pytest.approx(math.log(4), abs=1e-3) for e in entries)
        assert [e.position for e in entries[:2]] == [7.0, 8.0], "4, 6, 8, 10 and 5, 7, 9, 11"
    assert policy.expected_entries(160) == pytest.approx(160 / 4, abs=5)


def test_a_trained_network_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks at the key's first channel alone: of each span the token with the largest one carries it."""
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    hidden = torch.zeros(ROWS, 2 * SPEC.head_dim + 1, 1)
    hidden[:, 0] = 0.3
    tensors = {"hidden": hidden, "offset": torch.zeros(ROWS, 1), "out": torch.full((ROWS, 1), 5000.0),
               "score": torch.zeros(ROWS)}  # fmt: skip
    save_file(tensors, tmp_path / "tiny.merge.safetensors")
    merger = Gate((SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, SPEC.name), "tiny.merge.safetensors")
    policy = replace(commitkv(absorb_gate=None, tiers=[[0, 5, "learned"]], budget_ratio=1e-6), merger=merger)
    cache = CraftedCache(policy, seen=lambda row, position: 0.01)
    cache.add(4 + 20 + 16)
    cache.commit()
    for row in range(1, ROWS):
        for entry, first in zip(cache.entries(row), range(4, 4 + cache.kv.committed_tokens, 5), strict=False):
            span = range(first, min(first + 5, 4 + cache.kv.committed_tokens))
            best = max(span, key=lambda p: float(random_key(row, p)[0]))
            assert entry.position == pytest.approx(best, abs=0.2)
    with pytest.raises(UnsupportedPolicyError, match=r"merging network was trained on SmolLM2.*train_merge"):
        cache.manager.open(1, commitkv(absorb_gate=None, tiers=[[0, 5, "learned"]]))
    with pytest.raises(ConfigError, match=r"merger: .*nowhere"):
        gates.load_merger("nowhere", torch.device("cpu"))


def test_tiers_that_cannot_be_are_refused() -> None:
    recency = {"score": "recency", "redraw": False, "absorb_gate": None}
    for changes, message in (
        ({"absorb_gate": None, "tiers": [[0, 5, "mean", 2]]}, "2 entries for 5 tokens by mean"),
        ({"absorb_gate": None, "tiers": [[0, 5, "pca", 5]]}, "fewer than the tokens"),
        ({"absorb_gate": None, "tiers": [[0, 5, "pca", 0]]}, "0 entries"),
        (recency | {"tiers": [[0, 5, "pca", 2]]}, "pca with the score recency"),
        (recency | {"tiers": [[0, 5, "learned"]]}, "learned with the score recency"),
    ):
        with pytest.raises(ConfigError, match=message):
            commitkv(**changes)  # type: ignore[arg-type]


def test_spans_grow_with_age_near_5_to_1_far_20_to_1() -> None:
    """The hierarchy by age alone: fives merge in fours once they are old."""
    tiers = [[0, 5, "mean"], [100, 20, "mean"]]
    policy = commitkv(score="recency", redraw=False, absorb_gate=None, tiers=tiers)
    cache = CraftedCache(policy)
    for _ in range(5):
        cache.add(60)
        cache.commit()
    newest = cache.kv.num_tokens - 1
    for row in range(ROWS):
        masses = {round(math.exp(e.bias)) for e in cache.entries(row) if newest - e.position > 160}
        assert 20 in masses and max(masses) == 20
        assert max(round(math.exp(e.bias)) for e in cache.entries(row) if newest - e.position < 90) == 5


def test_near_gentler_than_far() -> None:
    tiers = [[0, 5, "mean"], [100, 20, "mean"]]
    cache = CraftedCache(commitkv(absorb_gate=None, tiers=tiers, budget_ratio=1e-6), seen=lambda row, p: 0.01)
    cache.add(4 + 200 + 16)
    cache.commit()
    newest = cache.kv.num_tokens - 1
    masses = {round(math.exp(e.bias)) for e in cache.entries(1) if newest - e.position < 95}
    assert 5 in masses and max(masses) == 5
    assert 20 in {round(math.exp(e.bias)) for e in cache.entries(1) if newest - e.position > 110}


def test_super_tokens_compete_at_the_next_line() -> None:
    cache = CraftedCache(commitkv(absorb_gate=None, tiers=[[0, 10, "mean"]], budget_ratio=0.1))
    for _ in range(4):
        cache.add(80)
        cache.commit()
    assert cache.dropped > 0, "old super tokens of low scores fall like others"


def test_a_line_that_is_not_redrawn_keeps_what_stayed_once() -> None:
    def louder_later(row: int, position: int) -> float:
        return random_seen(row, position) * (0.01 if position < 80 else 1.0)

    kept: dict[bool, list[float]] = {}
    for redraw in (True, False):
        cache = CraftedCache(commitkv(redraw=redraw, absorb_gate=None), seen=louder_later)
        cache.add(80)
        cache.commit()
        first = {row: cache.positions(row) for row in range(ROWS)}
        for _ in range(3):
            cache.add(80)
            cache.commit()
        kept[redraw] = [len(set(first[row]) & set(cache.positions(row))) / len(first[row]) for row in range(ROWS)]
        committed = cache.kv.committed_tokens
        assert cache.kv.ledger[State.COMMITTED] <= math.ceil(0.35 * committed * ROWS) + 4
    assert min(kept[False]) == 1.0 and max(kept[True]) < 1.0


def test_a_layers_scores_can_be_scaled() -> None:
    cache = CraftedCache(commitkv(layer_scale=[4.0, 1.0, 1.0, 1.0]))
    cache.add(150)
    cache.commit()
    kept = [len(cache.entries(row)) for row in range(ROWS)]
    assert min(kept[:2]) > max(kept[2:])


def test_warm_up_grows_in_steps() -> None:
    schedule = Schedule(warmup_tokens=1000, warmup_every=500)
    assert [schedule.strength(n) for n in (0, 999, 1499, 1500, 2000, 5999, 6000, 9000)] == pytest.approx(
        [0, 0, 0, 0.1, 0.2, 0.9, 1.0, 1.0]
    )
    assert Schedule().strength(0) == 1.0
    policy = commitkv(**{"schedule.warmup_tokens": 20, "schedule.warmup_every": 20})
    cache = CraftedCache(policy)
    cache.add(60)
    cache.commit()
    kept = sum(len(cache.entries(row)) for row in range(ROWS))
    expected = policy.budget_at(60) * cache.kv.committed_tokens * ROWS
    assert policy.budget_at(60) == pytest.approx(1 - 0.2 * (1 - policy.budget_ratio))
    assert kept == pytest.approx(expected, abs=1)


def test_probe_alone_records_no_steps() -> None:
    probing = commitkv(score="probe")
    assert probing.probe and not probing.records
    assert commitkv(score="seen").records and not commitkv(score="seen").probe
    assert Tier(0, 5) == commitkv(absorb_gate=None, tiers=[[0, 5]]).tiers[0]
