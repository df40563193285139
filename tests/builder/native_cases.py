"""`AttendParams` of one layer as the tables of a step of three layers, padded like a captured step would be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from builder.native_tables import Geometry, Tables
from plugins.attend.params import AttendParams
from tests.plugins.attend_cases import int32

LAYER = 1
NUM_LAYERS = 3
WORD_BYTES = 4


@dataclass(frozen=True)
class Padding:
    """How many rows, sequences, pages and blocks pad."""

    rows: int = 0
    sequences: int = 0
    pages: int = 0
    blocks: int = 0


def geometry_of(params: AttendParams) -> Geometry:
    kv_heads, _, page_tokens, head_dim = params.pages.shape[1:]
    return Geometry(kv_heads, params.q.shape[1] // kv_heads, head_dim, page_tokens, params.block_layout, params.scale)


def words_of(blocks: torch.Tensor) -> torch.Tensor:
    """[n, block_bytes] uint8 -> [n, block_bytes / 4] int32."""
    return blocks.view(torch.int32)


def padded(x: torch.Tensor, count: int, value: int) -> torch.Tensor:
    return torch.cat((x, torch.full((count, *x.shape[1:]), value, dtype=x.dtype)))


def repeat_last(starts: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((starts, starts[-1:].expand(count)))


def tables_of(params: AttendParams, slots: torch.Tensor, padding: Padding) -> Tables[torch.Tensor]:
    """Tables as `runtime.engine_interface` says; the other layers' blocks are listed in other places."""
    tables, kv_heads = params.tables, params.pages.shape[1]
    starts = repeat_last(tables.block_starts, padding.sequences * kv_heads)
    least = 1 if tables.block_ids.numel() == 0 else 0  # a size is never 0
    ids = padded(tables.block_ids, max(padding.blocks, least), -1)
    lens = padded(tables.block_lens, max(padding.blocks, least), 7)
    others = torch.zeros_like(starts)
    others[1:] = 1
    spare = sorted(set(range(params.blocks.shape[0])) - set(tables.block_ids.tolist()))
    first, last = ids * 0 - 1, ids * 0 - 1
    first[0], last[0] = spare[0], spare[1]
    pages = max(padding.pages, 0 if tables.page_ids.numel() else 1)
    return Tables(
        slots=padded(slots, padding.rows, -1),
        row_starts=repeat_last(tables.row_starts, padding.sequences),
        page_starts=repeat_last(tables.page_starts, padding.sequences),
        page_ids=padded(tables.page_ids, pages, -1),
        page_lens=padded(tables.page_lens, pages, 5),
        record=padded(tables.record, padding.rows, 0).bool(),
        record_skip=padded(tables.record_skip, padding.sequences, 0),
        block_starts=torch.stack((others, starts, others)),
        block_ids=torch.stack((first, ids, last)),
        block_lens=torch.stack((lens * 0 + 1, lens, lens)),
    )


def pad_rows(params: AttendParams, padding: Padding) -> AttendParams:
    """Query rows that pad hold NaN-free garbage, as a buffer of an older step does."""
    extra = torch.full((padding.rows, *params.q.shape[1:]), 3.0, dtype=params.q.dtype)
    return replace(params, q=torch.cat((params.q, extra)))


def some_slots(rows: int) -> torch.Tensor:
    return int32(list(range(rows)))
