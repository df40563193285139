"""Copies one conversation out of the arenas and into others: the device half of a checkpoint.

Called between two steps from the thread that runs them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch

from plugins.blocks import fp16_field, k_field, v_field
from runtime.checkpoint import Bytes, KvImage
from runtime.checkpoint_tables import KvPlace
from runtime.kv_storage import BlockArena, KvStorage


class KvTransfer:
    """Of one storage."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage

    @torch.inference_mode()
    def copy_out(self, place: KvPlace) -> KvImage:
        """The bytes that lie at `place`. What is not filled comes out as zero: it may be another conversation's."""
        storage = self._storage
        _wait(storage.device)
        ids, filled = self._index(place.page_ids), self._filled(place.page_lens, storage.limits.page_tokens)
        pages, seen = _gather(storage.pages, ids), _gather(storage.seen, ids)
        pages.masked_fill_(~filled[:, None, None, :, None], 0.0)
        seen.masked_fill_(~filled[:, None, :], 0.0)
        blocks: Bytes = b""
        score: Bytes = b""
        if place.blocks.num_blocks:
            raw, scores = self._copy_blocks(storage.blocks(place.blocks.format), place)
            blocks, score = _bytes_of(raw), _bytes_of(scores)
        return KvImage(_bytes_of(pages), _bytes_of(seen), blocks, score)

    def _copy_blocks(self, arena: BlockArena, place: KvPlace) -> tuple[torch.Tensor, torch.Tensor]:
        layout, ids = arena.layout, self._index(place.blocks.ids)
        raw, score = arena.raw.index_select(0, ids), arena.score.index_select(0, ids)
        empty = ~self._filled(place.blocks.lens, layout.block_entries)
        # Blocks with keys of two widths are always written whole, with zeros where no entry lies.
        keys = () if layout.mixed else (k_field(raw, layout),)
        for codes in (*keys, v_field(raw, layout)):
            codes.masked_fill_(empty[..., None], 0)
        offsets = (layout.v_scale, layout.v_min, layout.bias) if layout.quantized else (layout.bias,)
        for entries in (score, *(fp16_field(raw, offset, layout.block_entries) for offset in offsets)):
            entries.masked_fill_(empty, 0.0)
        return raw, score

    @torch.inference_mode()
    def copy_in(self, place: KvPlace, image: KvImage) -> None:
        """Writes to `place` what `copy_out` gave for as many pages and blocks."""
        storage = self._storage
        num_pages, num_blocks = len(place.page_ids), place.blocks.num_blocks
        if num_pages:
            ids = self._index(place.page_ids)
            for arenas, part in ((storage.pages, image.pages), (storage.seen, image.seen)):
                for target, source in zip(arenas, _layers(part, len(arenas)), strict=True):
                    target.index_copy_(0, ids, _tensor_of(source, num_pages, target))
        if num_blocks:
            arena = storage.blocks(place.blocks.format)
            ids = self._index(place.blocks.ids)
            arena.raw.index_copy_(0, ids, _tensor_of(image.blocks, num_blocks, arena.raw))
            arena.score.index_copy_(0, ids, _tensor_of(image.score, num_blocks, arena.score))
        _wait(storage.device)

    def _index(self, values: array[int]) -> torch.Tensor:
        return torch.tensor(values.tolist(), dtype=torch.int64, device=self._storage.device)

    def _filled(self, lens: array[int], size: int) -> torch.Tensor:
        """[n, size] bool: the first lens[i] of every item."""
        device = self._storage.device
        return torch.arange(size, device=device)[None] < self._index(lens)[:, None]


def _gather(arenas: tuple[torch.Tensor, ...], ids: torch.Tensor) -> torch.Tensor:
    """[L, n, ...]: items `ids` of every layer's arena."""
    out = arenas[0].new_empty((len(arenas), len(ids), *arenas[0].shape[1:]))
    for layer, arena in enumerate(arenas):
        torch.index_select(arena, 0, ids, out=out[layer])
    return out


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, on the host."""
    if not tensor.numel():
        return b""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)


def _layers(part: Bytes, num_layers: int) -> Iterator[memoryview]:
    size = len(part) // num_layers
    view = memoryview(part)
    return (view[layer * size : (layer + 1) * size] for layer in range(num_layers))


def _tensor_of(part: Bytes, num_items: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes as `num_items` items of an arena."""
    flat = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(like.dtype)
    return flat.view(num_items, *like.shape[1:]).to(like.device)


def _wait(device: torch.device) -> None:
    """Nothing that other streams do to the arenas is still under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
