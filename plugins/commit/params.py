"""Records of a commit's two halves; reference and torch forms take and give the same ones.

A *row* is layer * G + kv_head. Entries of a row are ordered: old blocks in table order, then staged tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

TINY_WEIGHT = 2.0**-24
"""Least weight of an entry in a merge: the smallest attention weight that fp16 can hold."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """Blocks of one conversation: row r owns [starts[r], starts[r + 1]) of ids and lens [num_blocks] int64."""

    starts: tuple[int, ...]
    ids: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True, eq=False)
class LineParams:
    """staged [n] int64: slots of the tokens to commit.   The rest as in the policy's rules for the line."""

    staged: torch.Tensor
    table: RowTable
    keep_entries: int
    floor_entries: int
    layer_scale: tuple[float, ...] = ()
    outlier_z: float | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """What stays.   line: the lowest scaled score that the line let in; inf where the floor alone decided.

    staged_keep [rows, n] bool; staged_score [rows, n] fp32, unscaled, inf where now protected.
    alive [num_blocks, E] bool: filled entries of the old blocks above the line.
    """

    line: float
    staged_keep: torch.Tensor
    staged_score: torch.Tensor
    alive: torch.Tensor


@dataclass(frozen=True, eq=False)
class PublishParams:
    """staged, old: as in LineParams.   dissolve [num old blocks] bool.   new: the table after the commit.

    is_new [num blocks of new] bool; per row the blocks that stay come first.
    move_from, move_to [m] int64: slots copied whole.
    """

    staged: torch.Tensor
    old: RowTable
    dissolve: torch.Tensor
    new: RowTable
    is_new: torch.Tensor
    absorb_gate: float | None
    move_from: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    move_to: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class Entries:
    """keys, values [n, D] fp32; bias, score [n] fp32."""

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    score: torch.Tensor

    def __getitem__(self, where: torch.Tensor) -> Entries:
        return Entries(self.keys[where], self.values[where], self.bias[where], self.score[where])
