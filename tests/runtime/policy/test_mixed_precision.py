"""Blocks that spend key bits by score, through a conversation's life: what is precise, what it costs, how it moves."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from crafted_cache import HANDLE, LIMITS, ROWS, SPEC, CraftedCache, random_key, small

from plugins import blocks as block_bytes
from plugins.layout import STORABLE
from runtime.checkpoint_tables import place_of
from runtime.errors import ConfigError, UnsupportedPolicyError
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.kv_transfer import KvTransfer
from runtime.policy.registry import ALL_POLICIES
from runtime.policy.variants import with_changes

COMMITKV = small(ALL_POLICIES["commitkv"], floor_entries=0)


def lived(block_format: str) -> CraftedCache:
    policy = with_changes(COMMITKV, {"block_format": block_format, "absorb_gate": None, "budget_ratio": 0.5})
    cache = CraftedCache(policy)
    for _ in range(3):
        cache.add(96)
        cache.commit()
    return cache


def errors(cache: CraftedCache, row: int) -> list[tuple[float, float]]:
    """(score, largest error of the key) of each entry, whose token is the one that its value says."""
    return [(e.score, float((e.key - random_key(row, round(e.position))).abs().max())) for e in cache.entries(row)]


def test_the_best_entries_are_the_precise_ones() -> None:
    mixed, narrow = lived("k84v4"), lived("int4")
    for row in range(ROWS):
        found = sorted(errors(mixed, row), reverse=True)
        best, rest = found[: len(found) // 8], found[len(found) // 2 :]
        coarse = [error for _, error in errors(narrow, row)]
        assert mean(e for _, e in best) < 0.4 * mean(coarse), "but for those that met many better ones in a block"
        assert mean(e for _, e in rest) > 0.7 * mean(coarse)
        assert max(e for _, e in found) <= 1.5 * max(coarse)


def test_it_holds_fewer_bytes_than_wide_keys_and_the_same_entries() -> None:
    caches = {block_format: lived(block_format) for block_format in ("int4", "k84v4", "k8v4")}
    held = {name: cache.manager.kv_bytes(HANDLE) for name, cache in caches.items()}
    assert held["int4"] < held["k84v4"] < held["k8v4"]
    for row in range(ROWS):
        kept = {tuple(e.score for e in cache.entries(row)) for cache in caches.values()}
        assert len(kept) == 1, "the line does not ask how entries are stored"


def test_a_conversation_moves_to_other_arenas_whole() -> None:
    cache = lived("k84v4")
    source, table = place_of(cache.kv), cache.kv.blocks
    image = KvTransfer(cache.storage).copy_out(source)
    other = KvStorage(SPEC, LIMITS, cache.manager.num_pages, cache.manager.num_blocks, ArenaPlace(poison=True))
    KvTransfer(other).copy_in(source, image)
    ids = torch.tensor(table.ids.tolist())
    for block, count in zip(ids, table.lens, strict=True):
        raw, moved = (arena.blocks("k84v4").raw[block][None] for arena in (cache.storage, other))
        for read in (block_bytes.read_keys, block_bytes.read_values, block_bytes.read_bias):
            layout = cache.storage.blocks("k84v4").layout
            assert torch.equal(read(raw, layout)[:, :count], read(moved, layout)[:, :count])


def test_who_takes_it() -> None:
    assert with_changes(COMMITKV, {"block_format": "k84v4"}).block_format in STORABLE
    with pytest.raises(ConfigError, match="k84v4"):
        with_changes(COMMITKV, {"block_format": "k84v8"})
    manager = KvManager(SPEC, LIMITS, 8 << 20, only_format="k8v4")
    with pytest.raises(UnsupportedPolicyError, match=r"keeps k84v4 blocks, expected k8v4"):
        manager.open(0, with_changes(COMMITKV, {"block_format": "k84v4"}))
