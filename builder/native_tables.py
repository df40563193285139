"""What the tables of a step mean, composed of plain layers: who sees which token, and where scatters write.

S sequences, R rows, P listed pages of T tokens, B listed blocks of one layer with E entries, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from builder.layers import Layers
from plugins.layout import BlockLayout

T = TypeVar("T")

NO_LIST = -(1 << 30)  # of an entry that is not filled; no row's list, not even that of a row without a sequence


@dataclass(frozen=True)
class Geometry:
    """Fixed sizes of an engine.   scale: of the logits."""

    kv_heads: int
    group_size: int
    head_dim: int
    page_tokens: int
    layout: BlockLayout
    scale: float


@dataclass(frozen=True, eq=False)
class Tables(Generic[T]):
    """Inputs that `append` and `attend` read; names and shapes as in `runtime.engine_interface`."""

    slots: T
    row_starts: T
    page_starts: T
    page_ids: T
    page_lens: T
    record: T
    record_skip: T
    block_starts: T
    block_ids: T
    block_lens: T


@dataclass(frozen=True, eq=False)
class Pick(Generic[T]):
    """Where a scatter of n entries writes. Entries that pad repeat one that does not, so writing them changes nothing.

    index [n] int32: entry to take.   target [n] int32: where it goes.   some [1] bool: one at least does not pad;
    if all do, target is 0.
    """

    index: T
    target: T
    some: T


@dataclass(frozen=True, eq=False)
class BlockList(Generic[T]):
    """One layer's blocks.   ids [B] int32: to read; block 0 for one that pads.

    mask, recorded [G, 1, R, B * E] bool: a row of that head sees the entry; and raises its score.
    """

    ids: T
    mask: T
    recorded: T


class IntegerMath(Generic[T]):
    """Small words over int32 vectors."""

    def __init__(self, layers: Layers[T]) -> None:
        self._l = layers

    def number(self, value: int, rank: int = 1) -> T:
        return self._l.constant(torch.full((1,) * rank, value, dtype=torch.int32), "int32")

    def count_up(self, like: T) -> T:
        """0, 1, 2, ... as long as `like` [n] int32."""
        ones = self._l.add(self._l.mul(like, self.number(0)), self.number(1))
        return self._l.sum_before(ones)

    def at_least_zero(self, x: T) -> T:
        return self._l.maximum(x, self.number(0))

    def not_negative(self, x: T) -> T:
        """bool, in x's shape."""
        return self._l.less(self.number(-1, self._l.rank(x)), x)

    def owner(self, first: T, last: T, num_items: T) -> T:
        """Which of the ranges [first, last) [L, k] holds each of the items 0, 1, ...; -1 if none. Ranges are apart.

        num_items [n] int32: as many items. Gives [L, n] int32.
        """
        n, rows = self._l, (0, 1, -1)
        item = n.reshape(self.count_up(num_items), (1, -1, 1))
        above = n.less(n.reshape(first, rows), n.add(item, self.number(1, 3)))
        inside = n.both(above, n.less(item, n.reshape(last, rows)))
        which = n.reshape(self.count_up(n.reshape(n.take(first, 0, 0), (-1,))), (1, 1, -1))
        return n.reshape(n.reduce_max(n.select(inside, which, self.number(-1, 3)), (2,)), (0, -1))

    def pick(self, places: T, valid: T | None = None) -> Pick[T]:
        """places [n] int32: where entries would go; valid [n] bool: which do, else those that are not negative."""
        n = self._l
        valid = self.not_negative(places) if valid is None else valid
        here = self.count_up(places)
        latest = n.reduce_max(n.select(valid, here, self.number(-1)), (0,))
        index = n.select(valid, here, self.at_least_zero(latest))
        return Pick(index, self.at_least_zero(n.gather(places, index)), self.not_negative(latest))


class StepTables(Generic[T]):
    """Everything about the tables that all layers share, composed when first needed; and each layer's block list."""

    def __init__(self, layers: Layers[T], geometry: Geometry, tables: Tables[T]) -> None:
        self._l, self._g, self._t = layers, geometry, tables
        self._math = IntegerMath(layers)

    @cached_property
    def _sequence(self) -> T:
        """[S]: 0, 1, ..."""
        return self._math.count_up(self._t.record_skip)

    def _ranges(self, starts: T, index: T) -> tuple[T, T]:
        n = self._l
        return n.gather(starts, index), n.gather(starts, n.add(index, self._math.number(1)))

    @cached_property
    def _rows(self) -> tuple[T, T, T]:
        """Sequence of every row [R] (-1: none), the same as an index, and its rows still to come [R]."""
        n, m = self._l, self._math
        first, last = self._ranges(self._t.row_starts, self._sequence)
        row = m.count_up(self._t.slots)
        owner = n.reshape(m.owner(n.reshape(first, (1, -1)), n.reshape(last, (1, -1)), self._t.slots), (-1,))
        index = m.at_least_zero(owner)
        return owner, index, n.sub(n.sub(n.gather(last, index), m.number(1)), row)

    @cached_property
    def _tokens(self) -> tuple[T, T, T]:
        """Tokens of each page [P]; of them before it and up to its end, over all pages [P]."""
        n, m = self._l, self._math
        lens = n.select(m.not_negative(self._t.page_ids), self._t.page_lens, m.number(0))
        before = n.sum_before(lens)
        return lens, before, n.add(before, lens)

    @cached_property
    def token_valid(self) -> T:
        """[P, T] bool: the page holds such a token."""
        n = self._l
        return n.less(self._offsets, n.reshape(self._tokens[0], (-1, 1)))

    @cached_property
    def _offsets(self) -> T:
        return self._l.constant(torch.arange(self._g.page_tokens)[None], "int32")

    @cached_property
    def token_there(self) -> T:
        """[1, 1, P * T, 1] bool: `token_valid`, flat."""
        return self._l.reshape(self.token_valid, (1, 1, -1, 1))

    @cached_property
    def picked_token_valid(self) -> T:
        """[P, 1, T] bool: `token_valid` in the order of `page_pick`."""
        picked = self._l.gather(self.token_valid, self.page_pick.index)
        return self._l.reshape(picked, (0, 1, self._g.page_tokens))

    @cached_property
    def _visible(self) -> tuple[T, T]:
        """Tokens that a row sees: its range [R, 1] each, in the order of all tokens of the step."""
        n, m = self._l, self._math
        first, last = self._ranges(self._t.page_starts, self._sequence)
        some = n.less(first, last)
        low = n.gather(self._tokens[1], n.select(some, first, m.number(0)))
        end = n.gather(self._tokens[2], n.select(some, n.sub(last, m.number(1)), m.number(0)))
        high = n.select(some, end, low)
        owner, index, to_come = self._rows
        low, high = n.gather(low, index), n.sub(n.gather(high, index), to_come)
        high = n.select(m.not_negative(owner), high, low)
        return n.reshape(low, (1, 1, -1, 1)), n.reshape(high, (1, 1, -1, 1))

    def _seen_below(self, high: T) -> T:
        """[1, 1, R, P * T] bool: the token is the row's sequence's, and comes before `high` [1, 1, R, 1]."""
        n = self._l
        order = n.reshape(n.add(n.reshape(self._tokens[1], (-1, 1)), self._offsets), (1, 1, 1, -1))
        there = n.reshape(self.token_valid, (1, 1, 1, -1))
        from_low = n.less(self._visible[0], n.add(order, self._math.number(1, 4)))
        return n.both(there, n.both(from_low, n.less(order, high)))

    @cached_property
    def page_mask(self) -> T:
        """[1, 1, R, P * T] bool: the row sees the token."""
        return self._seen_below(self._visible[1])

    @cached_property
    def page_recorded(self) -> T:
        """[1, 1, R, P * T] bool: the row sees the token and raises its `seen`."""
        n = self._l
        skip = n.reshape(n.gather(self._t.record_skip, self._rows[1]), (1, 1, -1, 1))
        older = self._seen_below(n.sub(self._visible[1], skip))
        return n.both(older, self._record)

    @cached_property
    def page_pick(self) -> Pick[T]:
        """`target` is also where pages are read."""
        return self._math.pick(self._t.page_ids)

    @cached_property
    def slot_pick(self) -> Pick[T]:
        return self._math.pick(self._t.slots)

    @cached_property
    def slot_places(self) -> tuple[T, T]:
        """Of the picked rows: (page, head, K or V, offset) [R, G, 2, 4], and (page, head, offset) [R, G, 3]."""
        n, m, heads = self._l, self._math, self._g.kv_heads
        slot = n.reshape(self.slot_pick.target, (-1, 1, 1, 1))
        tokens = m.number(self._g.page_tokens, 4)
        page = n.div(slot, tokens)
        offset = n.sub(slot, n.mul(page, tokens))
        zero = n.mul(slot, m.number(0, 4))
        spread = n.constant(torch.zeros(1, heads, 2, 1), "int32")
        head = n.constant(torch.arange(heads).view(1, heads, 1, 1).expand(1, heads, 2, 1), "int32")
        which = n.constant(torch.arange(2).view(1, 1, 2, 1).expand(1, heads, 2, 1), "int32")
        place = n.concat([n.add(page, spread), n.add(zero, head), n.add(zero, which), n.add(offset, spread)], axis=3)
        keys = n.reshape(n.part(place, 2, 0, 1), (0, heads, 4))
        return place, n.concat([n.part(keys, 2, 0, 2), n.part(keys, 2, 3, 1)], axis=2)

    @cached_property
    def _block_lists(self) -> tuple[T, T, T]:
        """Of all layers: blocks that do not pad [L, B] bool; filled entries, and their lists [L, B, E] bool, int32."""
        n, m, heads = self._l, self._math, self._g.kv_heads
        lists = n.add(n.mul(n.reshape(self._sequence, (-1, 1)), m.number(heads, 2)), self._heads)
        lists = n.reshape(lists, (-1,))
        first, last = (n.gather(self._t.block_starts, index, 1) for index in (lists, n.add(lists, m.number(1))))
        owner = m.owner(first, last, n.take(self._t.block_ids, 0, 0))
        listed = n.both(m.not_negative(owner), m.not_negative(self._t.block_ids))
        filled = n.reshape(n.select(listed, self._t.block_lens, m.number(0, 2)), (0, -1, 1))
        entry = n.constant(torch.arange(self._g.layout.block_entries)[None, None], "int32")
        valid = n.less(entry, filled)
        return listed, valid, n.select(valid, n.reshape(owner, (0, -1, 1)), m.number(NO_LIST, 3))

    @cached_property
    def block_pick(self) -> Pick[T]:
        """Over the blocks of all layers, one after the other [L * B]; no block is listed twice."""
        places, listed = (self._l.reshape(x, (-1,)) for x in (self._t.block_ids, self._block_lists[0]))
        return self._math.pick(places, listed)

    @cached_property
    def picked_entry_valid(self) -> T:
        """[L * B, E] bool, in the order of `block_pick`: the entry is filled."""
        valid = self._l.reshape(self._block_lists[1], (-1, self._g.layout.block_entries))
        return self._l.gather(valid, self.block_pick.index)

    @cached_property
    def _block_ids(self) -> T:
        """[L, B]: block to read."""
        return self._l.maximum(self._t.block_ids, self._math.number(0, 2))

    @cached_property
    def _record(self) -> T:
        return self._l.reshape(self._t.record, (1, 1, -1, 1))

    @cached_property
    def _heads(self) -> T:
        """[1, G]: 0, 1, ..."""
        return self._l.constant(torch.arange(self._g.kv_heads)[None], "int32")

    @cached_property
    def _row_lists(self) -> T:
        """[G, 1, R, 1] int32: the block list that a row reads for a head."""
        n, heads = self._l, self._g.kv_heads
        first = n.mul(n.reshape(self._rows[0], (1, 1, -1, 1)), self._math.number(heads, 4))
        return n.add(first, n.reshape(self._heads, (heads, 1, 1, 1)))

    def blocks(self, layer: int) -> BlockList[T]:
        """The block list of one layer."""
        n = self._l
        mask = n.equal(self._row_lists, n.reshape(n.take(self._block_lists[2], 0, layer), (1, 1, 1, -1)))
        return BlockList(n.take(self._block_ids, 0, layer), mask, n.both(mask, self._record))
