"""What the manager hands out before device work and takes back after it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from runtime.commit_planner import CommitDraft
from runtime.kv_state import twin_of
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


@dataclass(eq=False)
class OpenCommit:
    """The commit that has room and is not settled, if there is one: its blocks may be written by another thread.

    handle: of the cache.   finish: waits for the writing and settles it, set by whoever lets another thread write.
    """

    handle: int | None = None
    finish: Callable[[], object] | None = None

    @property
    def is_open(self) -> bool:
        return self.handle is not None

    def concerns(self, handle: int) -> bool:
        """Whether it is of a conversation's cache, or of its twin."""
        return self.handle is not None and handle in (self.handle, twin_of(self.handle))

    def conclude(self, handle: int) -> None:
        """Comes before everything that reads or changes a cache."""
        if self.finish is not None and self.concerns(handle):
            self.finish()
