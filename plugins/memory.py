"""The arenas as operations see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from plugins.layout import BlockLayout


@dataclass(frozen=True, eq=False)
class KvMemory:
    """Per layer: pages [num_pages, G, 2, P, D] kv_dtype and seen [num_pages, G, P] fp16.

    blocks [num_blocks, block_bytes] uint8 and score [num_blocks, E] fp16 in `layout`'s format; score inf: protected.
    """

    pages: tuple[torch.Tensor, ...]
    seen: tuple[torch.Tensor, ...]
    blocks: torch.Tensor
    score: torch.Tensor
    layout: BlockLayout

    @property
    def num_rows(self) -> int:
        """Lists of entries a conversation has: layers * G."""
        return len(self.pages) * self.pages[0].shape[1]

    @cached_property
    def addresses(self) -> tuple[tuple[int, int], ...]:
        """Per layer where `pages` and `seen` begin, for native forms; the tensors must be contiguous."""
        assert all(x.is_contiguous() for x in (*self.pages, *self.seen, self.blocks, self.score))
        return tuple((p.data_ptr(), s.data_ptr()) for p, s in zip(self.pages, self.seen, strict=True))
