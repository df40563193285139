"""Keys of two widths in one block: the best entries in 8 bits, the others in 4; see `plugins.layout`.

A slot is a row of the K codes, wide ones first. Entries with the largest scores take the wide slots, ties and the rest
go in order, so that every entry has a slot whether it is filled or not.
"""

from __future__ import annotations

import torch

from plugins.codes import pack_codes, to_codes, unpack_codes
from plugins.layout import BlockLayout

NARROW_STEP = 17
"""What a narrow code counts in wide ones: (2^8 - 1) / (2^4 - 1)."""
NARROW_BITS = 4


def read_mixed_keys(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """[n, block_bytes] -> keys [n, E, D] fp32 in the order of entries."""
    wide, narrow = _fields(raw, layout)
    by_slot = torch.cat((unpack_codes(wide, layout.k_bits), NARROW_STEP * unpack_codes(narrow, NARROW_BITS)), dim=1)
    # Blocks that hold nothing are garbage, and so are their slots.
    slots = _slots(raw, layout).long().clamp(max=layout.block_entries - 1)
    codes = by_slot.gather(1, slots[..., None].expand_as(by_slot))
    scale, minimum = _range(raw, layout)
    return codes.mul_(scale.float()[:, None]).add_(minimum.float()[:, None])


def write_mixed_keys(
    raw: torch.Tensor, layout: BlockLayout, keys: torch.Tensor, filled: torch.Tensor, score: torch.Tensor | None
) -> None:
    """Writes codes and slots of keys [n, E, D] fp32 into `raw`, whose k_scale and k_min are set.

    filled [n, E] bool; score [n, E] fp32, or None: the first entries get the wide keys.
    """
    rank = torch.zeros(filled.shape, device=filled.device) if score is None else score
    order = torch.where(filled, rank, -torch.inf).argsort(dim=1, descending=True, stable=True)  # slot -> entry
    slots = order.argsort(dim=1)
    by_slot = keys.gather(1, order[..., None].expand_as(keys))
    in_use = filled.gather(1, order)[..., None]
    scale, minimum = _range(raw, layout)
    wide, narrow = _fields(raw, layout)
    count = layout.wide_entries
    codes = to_codes(by_slot[:, :count], scale[:, None], minimum[:, None], layout.k_bits) * in_use[:, :count]
    wide.copy_(pack_codes(codes, layout.k_bits))
    # The step in fp32: fp16 cannot hold 17 times every scale that it can hold.
    offset = by_slot[:, count:] - minimum.float()[:, None]
    codes = to_codes(offset, NARROW_STEP * scale.float()[:, None], torch.zeros_like(minimum)[:, None], NARROW_BITS)
    narrow.copy_(pack_codes(codes * in_use[:, count:], NARROW_BITS))
    _slots(raw, layout).copy_(slots)


def _fields(raw: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the wide codes [n, wide, D] and the narrow ones [n, E - wide, D / 2]."""
    count, size = layout.wide_entries, layout.k_row_bytes
    split = layout.k_codes + count * size
    end = split + (layout.block_entries - count) * size // 2
    wide, narrow = raw[:, layout.k_codes : split], raw[:, split:end]
    return wide.view(-1, count, size), narrow.view(-1, layout.block_entries - count, size // 2)


def _slots(raw: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    return raw[:, layout.slots : layout.slots + layout.block_entries]


def _range(raw: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of every channel, [n, D] fp16."""
    size = 2 * layout.head_dim
    return (
        raw[:, layout.k_scale : layout.k_scale + size].view(torch.float16),
        raw[:, layout.k_min : layout.k_min + size].view(torch.float16),
    )
