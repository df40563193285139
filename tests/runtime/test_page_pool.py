"""Pools of ids under one byte budget: free + owned = total, no id twice, a failed take changes nothing."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from runtime.errors import OutOfMemoryError
from runtime.page_pool import ByteBudget, IdPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(1000, headroom_bytes=100)
        self.pools = {size: IdPool(1000 // size, size, self.budget) for size in (10, 70)}
        self.held: dict[int, list[int]] = {10: [], 70: []}

    @rule(size=st.sampled_from([10, 70]), count=st.integers(0, 40), for_commit=st.booleans())
    def take(self, size: int, count: int, for_commit: bool) -> None:
        pool, before = self.pools[size], self.budget.used_bytes
        limit = 1000 if for_commit else 900
        if count > pool.num_free or before + count * size > limit:
            owned = pool.num_owned
            with pytest.raises(OutOfMemoryError):
                pool.take(count, for_commit=for_commit)
            assert (pool.num_owned, self.budget.used_bytes) == (owned, before)
        else:
            ids = pool.take(count, for_commit=for_commit)
            assert not set(ids) & set(self.held[size])
            self.held[size].extend(ids)

    @rule(size=st.sampled_from([10, 70]), data=st.data())
    def give(self, size: int, data: st.DataObject) -> None:
        if self.held[size]:
            ids = data.draw(st.lists(st.sampled_from(self.held[size]), unique=True))
            self.pools[size].give(ids)
            self.held[size] = [i for i in self.held[size] if i not in ids]

    @invariant()
    def adds_up(self) -> None:
        for size, pool in self.pools.items():
            assert pool.num_owned == len(self.held[size]) == len(set(self.held[size]))
            assert pool.num_free + pool.num_owned == pool.capacity
            assert all(pool.owns(i) for i in self.held[size])
        assert self.budget.used_bytes == sum(size * len(ids) for size, ids in self.held.items())


TestPool = PoolMachine.TestCase


def test_double_give_is_caught() -> None:
    pool = IdPool(4, 1, ByteBudget(10))
    ids = pool.take(2)
    pool.give(ids)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids)


def test_newest_returned_id_is_reused_first() -> None:
    pool = IdPool(10, 1, ByteBudget(10))
    ids = list(pool.take(3))
    pool.give([ids[0]])
    assert list(pool.take(2)) == [ids[0], 3]


def test_error_says_what_to_do() -> None:
    with pytest.raises(OutOfMemoryError, match=r"raise kv_memory_bytes"):
        IdPool(10, 100, ByteBudget(150)).take(2)
