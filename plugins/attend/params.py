"""The parameters of `attend`: one record for a single layer, and what a form offers for the layers of a step.

For sequence s and query head h of KV head g = h // group_size, row i of its n rows attends to
    the page tokens of s in table order, all but the last n - 1 - i of them, and
    every filled entry of the blocks listed for (s, g), whose bias is added to the logit.
out = softmax(scale * q.k + bias) . v over that union. For rows with `record` set, the largest weight over those
rows and over the query heads of the group raises `seen` (pages) and `score` (blocks): x = max(x, weight).
Blocks themselves are never written.

Where `record` is RECORD_SUM, in all recorded rows of a sequence, weights are added up instead: x = x + the sum over
rows of the mean over the group's query heads. Only the torch form and the reference know it; executors run it then.
Where it is RECORD_SQUARES, again in all recorded rows, squares are added up: x = sqrt(x^2 + the sum of weight^2 over
rows and query heads), the Euclidean norm of all that was recorded there. Two such sequences of one call must have no
page or block in common: kernels write these sums without atomics.

What a row reads among the newest `record_skip` page tokens up to and including itself is not recorded. Heads that
look at their neighbourhood give every token a large weight when it is new, which says nothing about whether it is
needed once it is old; and the newest tokens stay active anyway, so nobody asks for their score yet. Skipping 128 took
the Kullback-Leibler divergence of next-token distributions to the full cache from 0.065 to 0.020 (SmolLM2-135M, 2,100
tokens, 35 % of the entries kept, unquantized). Committed entries are always recorded: they are old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from plugins.layout import BlockLayout
from plugins.memory import KvMemory

RECORD_SUM = 2
RECORD_SQUARES = 3

AttendStep = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, q, out [rows, q_heads, D] contiguous): writes out, raises the layer's `seen` and `score`."""


@dataclass(frozen=True, eq=False)
class AttendTables:
    """Flat int32 CPU or device tensors; S sequences, G KV heads.

    row_starts [S+1]: query rows of sequence s are [row_starts[s], row_starts[s+1]).
    page_starts [S+1] into page_ids, page_lens.
    block_starts [S*G+1] into block_ids, block_lens; list s*G+g belongs to sequence s, KV head g (of ONE layer).
    record [rows] uint8: 0, 1, RECORD_SUM or RECORD_SQUARES.
    record_skip [S]: so many page tokens up to and including a row of s are not recorded for that row; `out` sees all.
    """

    row_starts: torch.Tensor
    page_starts: torch.Tensor
    page_ids: torch.Tensor
    page_lens: torch.Tensor
    block_starts: torch.Tensor
    block_ids: torch.Tensor
    block_lens: torch.Tensor
    record: torch.Tensor
    record_skip: torch.Tensor


@dataclass(frozen=True, eq=False)
class AttendParams:
    """q, out [rows, q_heads, head_dim] fp32/bf16/fp16, contiguous.

    pages [num_pages, G, 2, page_tokens, head_dim] kv_dtype; seen [num_pages, G, page_tokens] fp16;
    blocks [num_blocks, block_bytes] uint8 and score [num_blocks, block_entries] fp16 in `block_layout`'s format.
    """

    q: torch.Tensor
    out: torch.Tensor
    pages: torch.Tensor
    seen: torch.Tensor
    blocks: torch.Tensor
    score: torch.Tensor
    block_layout: BlockLayout
    tables: AttendTables
    scale: float


@dataclass(frozen=True, eq=False)
class LayerBlocks:
    """Block lists of some sequences in every layer, in the order of `AttendTables`.

    starts [num_layers, S*G+1] int32, counted within the layer; layer i owns ids and lens from first[i].
    """

    starts: torch.Tensor
    ids: torch.Tensor
    lens: torch.Tensor
    first: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepTables:
    """Tables of one step: as in `AttendTables`, where only the blocks differ from layer to layer."""

    row_starts: torch.Tensor
    page_starts: torch.Tensor
    page_ids: torch.Tensor
    page_lens: torch.Tensor
    record: torch.Tensor
    record_skip: torch.Tensor
    blocks: LayerBlocks

    def layer(self, layer: int) -> AttendTables:
        """The tables of one layer."""
        blocks = self.blocks
        part = slice(blocks.first[layer], blocks.first[layer] + int(blocks.starts[layer, -1]))
        return AttendTables(
            self.row_starts, self.page_starts, self.page_ids, self.page_lens,
            blocks.starts[layer], blocks.ids[part], blocks.lens[part], self.record, self.record_skip,
        )  # fmt: skip

    def to(self, device: torch.device) -> StepTables:
        """The same tables on `device`."""
        blocks = replace(
            self.blocks, **{name: getattr(self.blocks, name).to(device) for name in ("starts", "ids", "lens")}
        )
        flat = ("row_starts", "page_starts", "page_ids", "page_lens", "record", "record_skip")
        return replace(self, blocks=blocks, **{name: getattr(self, name).to(device) for name in flat})


class AttendForm(Protocol):
    """A form of `attend` for all layers of one step."""

    def begin(self, memory: KvMemory, tables: StepTables, scale: float) -> AttendStep: ...
