"""Arenas: shapes, lazy memory, release that gives memory back and never touches a neighbour."""

from __future__ import annotations

import mmap

import pytest
import torch

from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.errors import ConfigError
from runtime.kv_storage import ArenaPlace, KvStorage

SPEC = ModelSpec("llama", 2, 64, 128, 6, 3, 64, 100, 1e-5, RopeSpec(10000.0), 1024, True)
LIMITS = EngineLimits(page_tokens=16, block_entries=64)
NUM_BLOCKS = {"int4": 4000, "k8v4": 3000, "int8": 2000, "bf16": 1000, "fp16": 1000, "fp32": 500}


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * mmap.PAGESIZE


def test_shapes_follow_the_layout() -> None:
    storage = KvStorage(SPEC, LIMITS, 10, NUM_BLOCKS)
    assert [tuple(p.shape) for p in storage.pages] == [(10, 3, 2, 16, 64)] * 2
    assert storage.pages[0].dtype == torch.bfloat16 and storage.pages[0].is_contiguous()
    assert tuple(storage.seen[1].shape) == (10, 3, 16) and storage.seen[1].dtype == torch.float16
    for name, count in NUM_BLOCKS.items():
        arena = storage.blocks(name)
        assert tuple(arena.raw.shape) == (count, arena.layout.block_bytes)
        assert tuple(arena.score.shape) == (count, 64)
        assert arena.raw.data_ptr() % 16 == 0
    assert storage.blocks("int4") is storage.blocks("int4")
    with pytest.raises(KeyError):
        storage.blocks("int3")


def test_more_memory_than_addresses_is_one_clear_error() -> None:
    for num_pages in (1 << 40, 1 << 60):
        with pytest.raises(ConfigError, match="kv_memory_bytes: the system has no"):
            KvStorage(SPEC, LIMITS, num_pages, NUM_BLOCKS)


def test_huge_arenas_cost_nothing_until_written_and_nothing_after_release() -> None:
    before = resident_bytes()
    storage = KvStorage(SPEC, LIMITS, 1 << 20, {"int4": 1 << 22})
    arena = storage.blocks("int4")
    assert resident_bytes() - before < 32 << 20
    storage.pages[0][:4000] = 1
    arena.raw[:10000] = 1
    used = 4000 * storage.page_layout.layer_bytes + 10000 * arena.layout.block_bytes
    assert resident_bytes() - before > 0.9 * used
    storage.release_pages(range(4000))
    arena.release(range(10000))
    assert resident_bytes() - before < 32 << 20


@pytest.mark.parametrize("name", ["int4", "k8v4", "int8", "bf16", "fp32"])
def test_release_never_touches_neighbours(name: str) -> None:
    storage = KvStorage(SPEC, LIMITS, 50, NUM_BLOCKS)
    arena = storage.blocks(name)
    for pages in storage.pages:
        pages[:] = 3
    arena.raw[:200] = 7
    gone_pages, gone_blocks = [3, 4, 5, 9, 49, 20], [0, 1, 2, 3, 17, 100, 101, 199]
    storage.release_pages(gone_pages)
    arena.release(gone_blocks)
    for pages in storage.pages:
        assert all(bool((pages[i] == 3).all()) for i in range(50) if i not in gone_pages)
    assert all(bool((arena.raw[i] == 7).all()) for i in range(200) if i not in gone_blocks)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
def test_poison_is_nan_in_every_format(kv_dtype: str) -> None:
    limits = EngineLimits(kv_dtype=kv_dtype, page_tokens=8, block_entries=16)  # type: ignore[arg-type]
    storage = KvStorage(SPEC, limits, 6, {"int8": 8}, ArenaPlace(poison=True))
    arena = storage.blocks("int8")
    assert storage.pages[0].isnan().all() and storage.seen[0].isnan().all() and arena.score.isnan().all()
    storage.pages[1][:] = 1
    arena.raw[:] = 1
    storage.release_pages([2, 3])
    arena.release([5])
    assert storage.pages[1][2:4].isnan().all()
    assert not storage.pages[1][:2].isnan().any() and not storage.pages[1][4:].isnan().any()
    assert bool((arena.raw[5] == 255).all()) and bool((arena.raw[:5] == 1).all())


def test_arenas_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        storage = KvStorage(SPEC, LIMITS, 4, NUM_BLOCKS)
        arena = storage.blocks("int4")
    storage.pages[0][0] = 1
    arena.raw[0] = 1
    assert arena.raw[0].sum() == arena.layout.block_bytes
