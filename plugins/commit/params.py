"""Records of a commit's two halves; reference and torch forms take and give the same ones.

A *row* is layer * G + kv_head. Entries of a row are ordered: old blocks in table order, then staged tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from plugins.commit.choices import PLAIN, LineChoices, Pooling
from plugins.commit.gate import GateWeights
from plugins.commit.merger import MergeWeights


@dataclass(frozen=True, eq=False)
class RowTable:
    """Blocks of one conversation: row r owns [starts[r], starts[r + 1]) of ids and lens [num_blocks] int64."""

    starts: tuple[int, ...]
    ids: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True, eq=False)
class LineParams:
    """staged [n] int64: slots of the tokens to commit.   The rest as in the policy's rules for the line.

    quotas: entries to keep in each group of consecutive rows, of equal size; empty: `keep_entries` over all of them.
    positions [n] int64: logical positions of the staged tokens; num_tokens: of the conversation. Both for `choices`
    that speak of positions or ages.   gate: for choices.score "gate".   merger: for tiers that say "learned".
    """

    staged: torch.Tensor
    table: RowTable
    keep_entries: int
    floor_entries: int
    layer_scale: tuple[float, ...] = ()
    outlier_z: float | None = None
    choices: LineChoices = PLAIN
    quotas: tuple[int, ...] = ()
    positions: torch.Tensor | None = None
    num_tokens: int = 0
    gate: GateWeights | None = None
    merger: MergeWeights | None = None

    @property
    def plain(self) -> bool:
        """One line over recorded scores, old entries included: what every form of `draw_line` knows."""
        return not self.quotas and self.choices == PLAIN


@dataclass(frozen=True, eq=False)
class Decision:
    """What stays.   line: the lowest scaled score that the line let in; inf where the floor alone decided. Found on a
    device it is a tensor of no dimension, so that nobody waits for it.

    staged_keep [rows, n] bool; staged_score [rows, n] fp32, unscaled, inf where now protected.
    alive [num_blocks, E] bool: filled entries of the old blocks above the line.
    pooling: set when some go into super tokens; then staged_group [rows, n] and old_group [num_blocks, E] int64 name
        each one's group (number * num_tiers + tier; -1: none), of which as many members are kept or alive as the tier
        has entries. Blocks with a group must be dissolved.   merger: as in LineParams.
    exact [rows, m] int64: which staged entries of each row stay as they are, in pages; `staged_keep` is without them.
    """

    line: float | torch.Tensor
    staged_keep: torch.Tensor
    staged_score: torch.Tensor
    alive: torch.Tensor
    pooling: Pooling | None = None
    staged_group: torch.Tensor | None = None
    old_group: torch.Tensor | None = None
    merger: MergeWeights | None = None
    exact: torch.Tensor | None = None

    @property
    def marks(self) -> torch.Tensor:
        """[rows, n] uint8 of the staged tokens: 0 falls below, 1 goes into a block, 2 is left alone, being exact."""
        marks = self.staged_keep.to(torch.uint8)
        return marks if self.exact is None else marks.scatter(1, self.exact, 2)

    @property
    def repooled(self) -> torch.Tensor:
        """Which old blocks hold members of a group, [num_blocks] bool; [0] where none does."""
        return self.alive.new_zeros(0) if self.old_group is None else (self.old_group >= 0).any(dim=1)


@dataclass(frozen=True, eq=False)
class PublishParams:
    """staged, old: as in LineParams.   dissolve [num old blocks] bool.   new: the table after the commit.

    is_new [num blocks of new] bool; per row the blocks that stay come first.
    move_from, move_to [m] int64: slots copied whole.   exact_to [m] int64: slots for `Decision.exact`, the same for all
    rows.
    """

    staged: torch.Tensor
    old: RowTable
    dissolve: torch.Tensor
    new: RowTable
    is_new: torch.Tensor
    absorb_gate: float | None
    move_from: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    move_to: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    exact_to: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
