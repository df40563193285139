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


class OpenCommits:
    """Caches whose commit is under way: another thread may read their scores or write their blocks.

    settle: waits for the commit of a cache and settles it, whatever becomes of it; set by whoever begins commits.
    """

    def __init__(self) -> None:
        self._handles: set[int] = set()
        self.settle: Callable[[int], object] = self.end

    def __bool__(self) -> bool:
        return bool(self._handles)

    def begin(self, handle: int) -> None:
        """A line is to be drawn over what this cache holds now."""
        assert not self.concerns(handle), handle
        self._handles.add(handle)

    def end(self, handle: int) -> None:
        """It was settled, or is no commit after all."""
        self._handles.remove(handle)

    def concerns(self, handle: int) -> bool:
        """Whether one of them is of a conversation's cache, or of its twin."""
        return handle in self._handles or twin_of(handle) in self._handles

    def conclude(self, handle: int) -> None:
        """Comes before everything that reads or changes a cache, or its twin."""
        for one in (handle, twin_of(handle)):
            if one in self._handles:
                self.settle(one)
                assert one not in self._handles
