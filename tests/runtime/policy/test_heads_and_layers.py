"""h2o, snapkv and pyramidkv-layered: how the budget is shared, and which rows of a step are recorded."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from crafted_cache import GROUP, LIMITS, ROWS, SPEC, CraftedCache, random_seen, small

from runtime.errors import UnsupportedPolicyError
from runtime.kv_manager import KvManager
from runtime.policy import h2o, pyramid_layered, snapkv
from runtime.policy.recording import Recording, recording_of
from runtime.policy.registry import ALL_POLICIES


def loud_first_row(row: int, position: int) -> float:
    """Row 0 has all the large weights; one line over everything would give it everything."""
    return random_seen(row, position) * (1.0 if row == 0 else 0.01)


@pytest.mark.parametrize("policy", [h2o.POLICY, snapkv.POLICY], ids=lambda p: p.name)
def test_every_head_keeps_as_much(policy) -> None:  # type: ignore[no-untyped-def]
    cache = CraftedCache(small(policy, block_format="kv", smooth=1), seen=loud_first_row)
    cache.add(120)
    cache.commit()
    kept = [len(cache.entries(row)) for row in range(ROWS)]
    expected = policy.budget_ratio * cache.kv.committed_tokens
    assert max(kept) - min(kept) <= 1 and abs(sum(kept) / ROWS - expected) <= 1
    for row in range(ROWS):
        weights = {p: loud_first_row(row, p) for p in range(4, 4 + cache.kv.committed_tokens)}
        best = sorted(weights, key=lambda p: -weights[p])[: kept[row]]
        assert cache.positions(row) == sorted(best)


def test_one_line_gives_the_loud_head_more() -> None:
    cache = CraftedCache(small(ALL_POLICIES["commitkv"], block_format="kv", floor_entries=0), seen=loud_first_row)
    cache.add(120)
    cache.commit()
    kept = [len(cache.entries(row)) for row in range(ROWS)]
    assert kept[0] > 1.5 * max(kept[1:])


def test_a_layer_shares_among_its_heads() -> None:
    policy = small(ALL_POLICIES["commitkv"], block_format="kv", floor_entries=0, share="layer")
    cache = CraftedCache(policy, seen=loud_first_row)
    cache.add(120)
    cache.commit()
    kept = [len(cache.entries(row)) for row in range(ROWS)]
    by_layer = [sum(kept[i : i + GROUP]) for i in range(0, ROWS, GROUP)]
    assert max(by_layer) - min(by_layer) <= 1
    assert kept[0] > 2 * kept[1], "the loud head of the first layer"


def test_smoothing_brings_neighbours_along() -> None:
    peaks = (20, 50, 80)

    def seen(row: int, position: int) -> float:
        return 0.9 if position in peaks else 0.001

    budget = 21 / 100
    cache = CraftedCache(small(snapkv.POLICY, block_format="kv", budget_ratio=budget), seen=seen)
    cache.add(4 + 100 + 16)
    cache.commit()
    around = {p + d for p in peaks for d in range(-3, 4)}
    assert around <= set(cache.positions(0))


def test_layers_get_less_and_less() -> None:
    cache = CraftedCache(small(pyramid_layered.POLICY, block_format="kv", smooth=1))
    cache.add(240)
    cache.commit()
    by_layer = [sum(len(cache.entries(layer * GROUP + g)) for g in range(GROUP)) for layer in range(SPEC.num_layers)]
    steps = [a - b for a, b in pairwise(by_layer)]
    assert min(steps) > 0 and max(steps) - min(steps) <= 2, "falling in a line"
    total = pyramid_layered.POLICY.budget_ratio * cache.kv.committed_tokens * ROWS
    assert abs(sum(by_layer) - total) <= ROWS
    weights = [pyramid_layered.POLICY.layer_weight(layer, 30) for layer in range(30)]
    assert sum(weights) == pytest.approx(30) and (weights[0], weights[-1]) == pytest.approx((1.95, 0.05))


def test_which_rows_are_recorded() -> None:
    window = snapkv.POLICY.window_rows
    assert recording_of(snapkv.POLICY, 0, 256, 400) == Recording(False), "before the window"
    assert recording_of(snapkv.POLICY, 256, 380, 400) == Recording(True, 12), "its first rows"
    assert recording_of(snapkv.POLICY, 380, 400, 400) == Recording(True, 20)
    assert recording_of(snapkv.POLICY, 0, 400, 400) == Recording(True, window)
    assert recording_of(snapkv.POLICY, 400, 401, 400) == Recording(False), "answers are not looked at"
    assert recording_of(h2o.POLICY, 0, 5, 5) == Recording(True, adds=True)
    assert recording_of(dataclasses.replace(ALL_POLICIES["commitkv"], score="both"), 0, 5, 5) == Recording(True)
    for name in ("full", "commitkv", "streaming-llm", "rkv-gated", "pyramidkv-pooled"):
        assert recording_of(ALL_POLICIES[name], 0, 5, 5) == Recording(False)
    assert recording_of(ALL_POLICIES["pyramidkv-rkv-alternating"], 0, 5, 5) == Recording(True), "R-KV needs importance"


def test_an_engine_that_only_compares_weights_refuses_h2o() -> None:
    manager = KvManager(SPEC, LIMITS, 8 << 20, only_format="k8v4")
    manager.open(0, snapkv.POLICY)
    with pytest.raises(UnsupportedPolicyError, match=r"h2o.*adds attention weights up"):
        manager.open(1, h2o.POLICY)
    assert 1 not in manager
