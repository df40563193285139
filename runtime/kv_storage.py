"""The arenas: memory of pages and committed blocks, on the host given back to the system page by page.

On a CPU arenas are anonymous private mappings. Memory that was never written costs nothing, so pages and blocks can
each be sized for the whole KV memory; the manager bounds what both hold together. `release` tells the kernel to drop
the memory pages (of the operating system) that lie wholly inside what was released, so a neighbour is never touched.

On a GPU arenas are plain allocations, so addresses never change and a captured graph stays valid. They are taken whole
when they are made and nothing goes back before the engine ends: an engine takes `kv_memory_bytes` for its pages and as
much again for every block format in use. What a release frees serves the next conversation, not another process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, get_args

import torch

from plugins.blocks import VALUE_DTYPES
from plugins.layout import BlockFormat, BlockLayout, PageLayout
from runtime.config import DTYPE_BYTES, EngineLimits, ModelSpec
from runtime.errors import ConfigError

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_POISON = 255  # a run of these bytes is NaN in fp32, bf16 and fp16


class _Memory(Protocol):
    """`tensor` [num_bytes] uint8 of one arena."""

    tensor: torch.Tensor

    def release(self, start: int, end: int) -> None:
        """Bytes [start, end) hold nothing any more."""
        ...


class _HostMemory:
    """One anonymous mapping."""

    def __init__(self, num_bytes: int, poison: bool) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"kv_memory_bytes: the system has no {num_bytes:,} bytes of addresses for one arena ({error}), "
                f"expected a KV memory that this machine can hold; lower it"
            ) from error
        self._poison = poison
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        if poison:
            self.tensor.fill_(_POISON)

    def release(self, start: int, end: int) -> None:
        if self._poison:
            self.tensor[start:end] = _POISON
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class _DeviceMemory:
    """One allocation of a GPU; keeps its memory until it is dropped."""

    def __init__(self, num_bytes: int, poison: bool, device: torch.device) -> None:
        try:
            with torch.inference_mode(False):
                self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_memory_bytes: {device} has no {num_bytes:,} bytes left for one arena, expected room for the pages "
                f"and for the blocks of every format in use; lower it"
            ) from error
        self._poison = poison
        if poison:
            self.tensor.fill_(_POISON)

    def release(self, start: int, end: int) -> None:
        if self._poison:
            self.tensor[start:end] = _POISON


@dataclass(frozen=True)
class ArenaPlace:
    """Where arenas lie.   poison: fill what was never written or was released with NaN, for tests."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    poison: bool = False

    def memory(self, num_bytes: int) -> _Memory:
        """Memory of one arena. Raises ConfigError when there is not enough."""
        if self.device.type == "cpu":
            return _HostMemory(num_bytes, self.poison)
        return _DeviceMemory(num_bytes, self.poison, self.device)


HOST = ArenaPlace()


class BlockArena:
    """Blocks of one format.   raw [num_blocks, block_bytes] uint8;   score [num_blocks, block_entries] fp16."""

    def __init__(self, layout: BlockLayout, num_blocks: int, place: ArenaPlace) -> None:
        self.layout = layout
        self._raw = place.memory(num_blocks * layout.block_bytes)
        self._score = place.memory(2 * num_blocks * layout.block_entries)
        with torch.inference_mode(False):
            self.raw = self._raw.tensor.view(num_blocks, layout.block_bytes)
            self.score = self._score.tensor.view(torch.float16).view(num_blocks, layout.block_entries)

    def release(self, ids: Iterable[int]) -> None:
        size = self.layout.block_bytes
        for first, last in _runs(ids):
            self._raw.release(first * size, last * size)


class KvStorage:
    """Page and block arenas of one engine.

    pages, seen: one tensor per layer, [num_pages, G, 2, page_tokens, D] kv_dtype and [num_pages, G, page_tokens] fp16.
    num_blocks: blocks per format; an arena is made when its format is first asked for.
    """

    def __init__(
        self,
        spec: ModelSpec,
        limits: EngineLimits,
        num_pages: int,
        num_blocks: Mapping[str, int],
        place: ArenaPlace = HOST,
    ) -> None:
        self.spec, self.limits, self.num_pages = spec, limits, num_pages
        self.device = place.device
        element_bytes = DTYPE_BYTES[limits.kv_dtype]
        self.page_layout = PageLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, limits.page_tokens, element_bytes
        )
        self._num_blocks, self._place = dict(num_blocks), place
        self._blocks: dict[str, BlockArena] = {}
        page_shape = (num_pages, spec.num_kv_heads, 2, limits.page_tokens, spec.head_dim)
        seen_shape = (num_pages, spec.num_kv_heads, limits.page_tokens)
        layer_bytes = num_pages * self.page_layout.layer_bytes
        self._pages = [place.memory(layer_bytes) for _ in range(spec.num_layers)]
        seen_bytes = 2 * num_pages * spec.num_kv_heads * limits.page_tokens
        self._seen = [place.memory(seen_bytes) for _ in range(spec.num_layers)]
        with torch.inference_mode(False):
            dtype = VALUE_DTYPES[limits.kv_dtype]
            self.pages = tuple(m.tensor.view(dtype).view(page_shape) for m in self._pages)
            self.seen = tuple(m.tensor.view(torch.float16).view(seen_shape) for m in self._seen)

    def blocks(self, block_format: str) -> BlockArena:
        """The arena of a block format."""
        if block_format not in self._blocks:
            layout = block_layout(self.spec, self.limits, block_format)
            self._blocks[block_format] = BlockArena(layout, self._num_blocks[block_format], self._place)
        return self._blocks[block_format]

    def no_blocks(self, block_format: str) -> BlockArena:
        """An arena that holds none."""
        return BlockArena(block_layout(self.spec, self.limits, block_format), 0, self._place)

    def num_blocks(self, block_format: str) -> int:
        """Blocks that the arena of a format holds; 0 for a format this engine does not have."""
        return self._num_blocks.get(block_format, 0)

    def release_pages(self, ids: Iterable[int]) -> None:
        """K and V of these pages may go; their `seen` is small and stays mapped."""
        size = self.page_layout.layer_bytes
        for first, last in _runs(ids):
            for pages in self._pages:
                pages.release(first * size, last * size)


def block_layout(spec: ModelSpec, limits: EngineLimits, block_format: str) -> BlockLayout:
    """Geometry of a committed block of this engine; `block_format` is one of `plugins.layout.BlockFormat`."""
    known: dict[str, BlockFormat] = {name: name for name in get_args(BlockFormat)}
    return BlockLayout(known[block_format], limits.block_entries, spec.head_dim)


def _runs(ids: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Sorted ids as runs [first, last) of consecutive ones."""
    run: tuple[int, int] | None = None
    for i in sorted(ids):
        if run is not None and i == run[1]:
            run = (run[0], i + 1)
            continue
        if run is not None:
            yield run
        run = (i, i + 1)
    if run is not None:
        yield run
