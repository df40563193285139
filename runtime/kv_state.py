"""What the manager knows about the cache of one conversation. Only `kv_manager` writes it."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from runtime.lifecycle import Ledger, State
from runtime.policy.base import Policy
from runtime.request import KvStats
from runtime.step import BlockTable, KvView, int32

_versions = itertools.count(1)


def twin_of(handle: int) -> int:
    """Handle of the cache that is computed anew to take the place of `handle`'s, and back."""
    return -1 - handle


def make_block_table(block_format: str, rows: list[list[tuple[int, int]]]) -> BlockTable:
    """A table from (block id, entries filled) lists, one list per row."""
    starts, ids, lens = int32([0]), int32(), int32()
    for row in rows:
        for block_id, length in row:
            ids.append(block_id)
            lens.append(length)
        starts.append(len(ids))
    return BlockTable(next(_versions), block_format, starts, ids, lens)


@dataclass
class Page:
    """One page of a conversation.

    positions: logical position of each token in slot order; -1 in pages of committed entries, which are exact: their
        slots hold other tokens in every layer and head.
    compacted: holds protected tokens that were moved out of staged pages; new turns never write here.
    """

    page_id: int
    positions: array[int] = field(default_factory=int32)
    state: State = State.ACTIVE
    compacted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class ConversationKv:
    """Pages, blocks and counts of one conversation.

    pages: in table order; the last one is where new tokens go, unless it is full, compacted or not active.
    committed_tokens: logical tokens that went through a commit; the budget is a share of them.
    num_commits: commits so far, for policies that alternate.
    unprobed: [start, end) spans of logical positions that were staged and not yet re-read.
    whole: the last commit kept everything, since some of it had not been re-read.
    reread: spans still to be re-read once more, now that they are older.   reread_at: tokens it had when that began
        last, or at its first commit; 0: there was none.
    """

    def __init__(self, policy: Policy, block_format: str, num_rows: int, page_tokens: int) -> None:
        self.policy = policy
        self.num_rows = num_rows
        self.page_tokens = page_tokens
        self.pages: list[Page] = []
        self.blocks = make_block_table(block_format, [[] for _ in range(num_rows)])
        self.ledger = Ledger()
        self.num_tokens = 0
        self.committed_tokens = 0
        self.num_commits = 0
        self.peak_bytes = 0
        self.unprobed: list[tuple[int, int]] = []
        self.whole = False
        self.reread: list[tuple[int, int]] = []
        self.reread_at = 0
        self._protected = bytearray()
        self._page_ids = int32()
        self._page_lens = int32()

    def protect(self, start: int, end: int) -> None:
        """Marks logical positions [start, end), which may lie ahead."""
        if end > len(self._protected):
            self._protected.extend(bytes(end - len(self._protected)))
        self._protected[start:end] = b"\x01" * (end - start)

    def unprotect_from(self, start: int) -> None:
        """Forgets the marks of positions that are undone."""
        del self._protected[start:]

    def is_protected(self, position: int) -> bool:
        return position < len(self._protected) and bool(self._protected[position])

    def protected_ranges(self) -> list[tuple[int, int]]:
        """[start, end) ranges of protected positions."""
        ranges: list[tuple[int, int]] = []
        end = 0
        while (start := self._protected.find(1, end)) >= 0:
            end = self._protected.find(0, start)
            end = len(self._protected) if end < 0 else end
            ranges.append((start, end))
        return ranges

    def holds_protected(self, page: Page) -> bool:
        """Whether a page of consecutive tokens, which no compacted one is, has protected ones."""
        assert not page.compacted
        return self._protected.find(1, page.positions[0], page.positions[-1] + 1) >= 0

    def loose_positions(self, page: Page) -> Sequence[int]:
        """Positions in a page of consecutive tokens that are not protected."""
        if not self.holds_protected(page):
            return page.positions
        return [p for p in page.positions if not self.is_protected(p)]

    def staged_pages(self) -> Iterator[Page]:
        return (page for page in self.pages if page.state is State.STAGED)

    def exact_pages(self) -> Iterator[Page]:
        """Pages of entries that are committed and not quantized."""
        return (page for page in self.pages if page.state is State.COMMITTED)

    @property
    def num_exact(self) -> int:
        """Entries of each (layer, KV head) in them."""
        return sum(page.num_tokens for page in self.exact_pages())

    @property
    def num_staged(self) -> int:
        """Tokens waiting for a commit, protected ones not counted."""
        return self.ledger[State.STAGED] // self.num_rows

    @property
    def tail_room(self) -> int:
        """Free slots of the page that new tokens go to."""
        if not self.pages:
            return 0
        tail = self.pages[-1]
        if tail.state is not State.ACTIVE or tail.compacted:
            return 0
        return self.page_tokens - tail.num_tokens

    def view(self, new_tokens: int, new_page_ids: Iterable[int], *, use_tail: bool = True) -> KvView:
        """The cache as rows being run see it: `new_tokens` at the end of the tail page and of new pages."""
        ids, lens = self._page_ids[:], self._page_lens[:]
        if use_tail and self.tail_room:
            in_tail = min(new_tokens, self.tail_room)
            lens[-1] += in_tail
            new_tokens -= in_tail
        for page_id in new_page_ids:
            ids.append(page_id)
            lens.append(min(new_tokens, self.page_tokens))
            new_tokens -= lens[-1]
        assert new_tokens == 0, new_tokens
        return KvView(ids, lens, self.blocks)

    def append(self, num_tokens: int, new_page_ids: Iterable[int]) -> None:
        """Records tokens that attention has written, in the order of `view`."""
        positions = range(self.num_tokens, self.num_tokens + num_tokens)
        in_tail = min(num_tokens, self.tail_room)
        if in_tail:
            self.pages[-1].positions.extend(positions[:in_tail])
            self._page_lens[-1] += in_tail
        done = in_tail
        for page_id in new_page_ids:
            page = Page(page_id, int32(positions[done : done + self.page_tokens]))
            self.pages.append(page)
            self._page_ids.append(page_id)
            self._page_lens.append(page.num_tokens)
            done += page.num_tokens
        assert done == num_tokens, (done, num_tokens)
        self.num_tokens += num_tokens
        self.ledger.arrive(num_tokens * self.num_rows)

    def undo(self, num_tokens: int) -> list[int] | None:
        """Takes back the tokens from `num_tokens` on, which have to be in pages still; returns the pages left empty.

        None, with nothing changed, if one of them was committed, or moved when what stood beside it was.
        """
        kept: list[Page] = []
        emptied: list[int] = []
        undone = staged = 0
        for page in self.pages:
            stays = int32(p for p in page.positions if p < num_tokens)
            if len(stays) < page.num_tokens and page.compacted:
                return None
            undone += page.num_tokens - len(stays)
            if page.state is State.STAGED:
                staged += sum(p >= num_tokens for p in self.loose_positions(page))
            if stays:
                kept.append(Page(page.page_id, stays, page.state, page.compacted))
            else:
                emptied.append(page.page_id)
        if undone != self.num_tokens - num_tokens:
            return None
        self.set_pages(kept)
        self.ledger.withdraw((undone - staged) * self.num_rows)
        self.ledger.withdraw(staged * self.num_rows, State.STAGED)
        self.num_tokens = num_tokens
        self.unprobed = _up_to(num_tokens, self.unprobed)
        self.reread = _up_to(num_tokens, self.reread)
        return emptied

    def active_page_of(self, position: int) -> Page | None:
        """The full active page whose first token is `position`, None if there is no such page."""
        for page in self.pages:
            if page.positions[0] == position and page.num_tokens == self.page_tokens:
                return page if page.state is State.ACTIVE and not page.compacted else None
        return None

    def set_pages(self, pages: list[Page]) -> None:
        """Replaces the page list, after a commit or a rollback."""
        self.pages = pages
        self._page_ids = int32(page.page_id for page in pages)
        self._page_lens = int32(page.num_tokens for page in pages)

    def begin_reread(self, end: int) -> None:
        """All positions under `end` are to be re-read once more."""
        self.reread, self.reread_at = [(0, end)], self.num_tokens

    def outgrown(self, growth: float) -> bool:
        """Whether there are `growth` times as many tokens as when its entries were last scored; never for 0."""
        return growth > 0 and self.blocks.num_blocks > 0 and self.num_tokens >= growth * self.reread_at

    def probed(self, start: int, end: int, *, again: bool = False) -> None:
        """[start, end) at the head of `unprobed`, or of `reread`, was re-read."""
        spans = self.reread if again else self.unprobed
        first, last = spans.pop(0)
        assert first == start and end <= last, (first, last, start, end)
        if end < last:
            spans.insert(0, (end, last))

    @property
    def commit_due(self) -> bool:
        """Whether a commit has something to do: staged text, or a line to draw at last."""
        return self.num_staged > 0 or (self.whole and not self.unprobed and self.blocks.num_blocks > 0)

    def add_unprobed(self, start: int, end: int) -> None:
        if self.unprobed and self.unprobed[-1][1] == start:
            start = self.unprobed.pop()[0]
        self.unprobed.append((start, end))

    def stats(self, kv_bytes: int, full_token_bytes: int, shared_bytes: int) -> KvStats:
        """kv_bytes, shared_bytes: as `KvStats` has them.   full_token_bytes: of a token in a full cache in fp16."""
        living = self.ledger.living // self.num_rows
        return KvStats(
            kv_bytes=kv_bytes,
            kv_full_bytes=self.num_tokens * full_token_bytes,
            active=self.ledger[State.ACTIVE] // self.num_rows,
            staged=self.num_staged,
            committed=(self.ledger[State.COMMITTED] + self.ledger[State.EVICTABLE]) // self.num_rows,
            evicted=self.num_tokens - living,
            peak_kv_bytes=max(self.peak_bytes, kv_bytes),
            shared_kv_bytes=shared_bytes,
        )

    @property
    def table_bytes(self) -> int:
        """int32 rows that the device is given for this conversation."""
        return 4 * (2 * len(self.pages) + 2 * self.blocks.num_blocks + len(self.blocks.starts))


def _up_to(num_tokens: int, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans without positions from `num_tokens` on."""
    return [(start, min(end, num_tokens)) for start, end in spans if start < num_tokens]
