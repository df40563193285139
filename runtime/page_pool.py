"""Who owns which id, and how many bytes of KV memory are spoken for.

Arenas are virtual: each could fill the whole KV memory alone, and `ByteBudget` bounds them together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from runtime.errors import OutOfMemoryError


class ByteBudget:
    """Bytes taken by pages and blocks of all kinds. `headroom_bytes` is left for commits, which free more
    than they take, so that a full memory can always be compressed."""

    def __init__(self, total_bytes: int, headroom_bytes: int = 0) -> None:
        assert 0 <= headroom_bytes < total_bytes, (headroom_bytes, total_bytes)
        self.total_bytes = total_bytes
        self.headroom_bytes = headroom_bytes
        self.used_bytes = 0

    def fits(self, num_bytes: int, *, for_commit: bool = False) -> bool:
        limit = self.total_bytes if for_commit else self.total_bytes - self.headroom_bytes
        return self.used_bytes + num_bytes <= limit

    def take(self, num_bytes: int, *, for_commit: bool = False) -> None:
        """Raises OutOfMemoryError, with nothing taken, when the bytes are not there."""
        if not self.fits(num_bytes, for_commit=for_commit):
            raise OutOfMemoryError(
                f"KV memory: {num_bytes:,} bytes asked for with {self.used_bytes:,} of {self.total_bytes:,} in use; "
                f"raise kv_memory_bytes, end conversations, or choose a policy that compresses"
            )
        self.used_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        assert 0 <= num_bytes <= self.used_bytes, (num_bytes, self.used_bytes)
        self.used_bytes -= num_bytes


class IdPool:
    """Ids [0, capacity) of things of one size. Returned ids are reused first, newest first, so that the
    memory ever touched stays near the most ever in use. Take and give are O(ids)."""

    def __init__(self, capacity: int, item_bytes: int, budget: ByteBudget) -> None:
        self.capacity = capacity
        self.item_bytes = item_bytes
        self._budget = budget
        self._returned: list[int] = []
        self._num_fresh = 0  # ids [_num_fresh, capacity) were never handed out
        self._owned = bytearray()

    @property
    def num_owned(self) -> int:
        return self._num_fresh - len(self._returned)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_owned

    def take(self, num_ids: int, *, for_commit: bool = False) -> array[int]:
        """Raises OutOfMemoryError, with nothing taken, when ids or bytes are short."""
        if num_ids > self.num_free:
            raise OutOfMemoryError(
                f"KV memory: {num_ids} more ids asked for with {self.num_free} of {self.capacity} free; "
                f"raise kv_memory_bytes or end conversations"
            )
        self._budget.take(num_ids * self.item_bytes, for_commit=for_commit)
        ids = array("i")
        for _ in range(num_ids):
            if self._returned:
                page_id = self._returned.pop()
            else:
                page_id = self._num_fresh
                self._num_fresh += 1
                self._owned.append(0)
            self._owned[page_id] = 1
            ids.append(page_id)
        return ids

    def give(self, ids: Iterable[int]) -> None:
        num_ids = 0
        for page_id in ids:
            assert self._owned[page_id], f"id {page_id} given back twice"
            self._owned[page_id] = 0
            self._returned.append(page_id)
            num_ids += 1
        self._budget.give(num_ids * self.item_bytes)

    def owns(self, page_id: int) -> bool:
        """Whether somebody holds `page_id`."""
        return 0 <= page_id < self._num_fresh and bool(self._owned[page_id])
