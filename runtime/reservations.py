"""What the manager hands out before device work and takes back after it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from runtime.commit_planner import CommitDraft
from runtime.step import BlockTable, KvView, PublishPlan


@dataclass(frozen=True, eq=False)
class RowReservation:
    """Room for `num_tokens` new tokens of one conversation; scratch rows (a probe's) leave nothing behind."""

    handle: int
    num_tokens: int
    new_page_ids: array[int]
    slots: array[int]
    view: KvView
    scratch: bool = False


@dataclass(frozen=True, eq=False)
class Freed:
    """Ids that nobody owns any more, for `Executor.release`."""

    page_ids: array[int]
    blocks: BlockTable | None = None


@dataclass(frozen=True, eq=False)
class CommitReservation:
    """Blocks and pages taken for the second half of a commit."""

    handle: int
    plan: PublishPlan
    draft: CommitDraft
    new_block_ids: array[int]
    new_page_ids: array[int]
