"""`append`, `attend` and `score` of one step composed of plain layers: the native form of a TensorRT engine.

Semantics are those of `plugins.append.params` and `plugins.attend.params`. It is the oracle of the plugin form and what
TensorRT-RTX can build; it is not made to be fast: changed arenas are new tensors, so a step copies them.

Rows of all sequences and heads are laid against everything listed, page tokens and block entries, and masks say what a
row of a head reads: few layers, by which building time goes, for more arithmetic. Dead memory is read (what pads points
at a live page or page 0; unfilled entries and unwritten tokens hold anything, NaN too) and never used: masks select,
they do not multiply.
G KV heads, M query heads per KV head, R rows, P pages, T page tokens, B blocks, E entries, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from builder.block_reader import BlockReader, Entries
from builder.layers import Layers
from builder.native_tables import BlockList, Geometry, Pick, StepTables, Tables

T = TypeVar("T")

NOTHING = -1e30  # logit of what a row does not see, and log-sum-exp of a row that sees nothing


@dataclass(frozen=True, eq=False)
class Arenas(Generic[T]):
    """What attention reads: pages and seen of one layer, blocks of all."""

    pages: T
    seen: T
    blocks: T


@dataclass(frozen=True, eq=False)
class Raised(Generic[T]):
    """seen [pages, G, T] fp16, raised; entry_weights [B, E] real: what the layer's `score` is to be raised to."""

    seen: T
    entry_weights: T


@dataclass(frozen=True, eq=False)
class Attended(Generic[T]):
    """out [R, G * M, D] model;   lse [R, G * M] real."""

    out: T
    lse: T
    raised: Raised[T]


@dataclass(frozen=True, eq=False)
class _Parts(Generic[T]):
    """Logits or weights of page tokens [G, M, R, P * T] and of block entries [G, M, R, B * E]."""

    pages: T
    blocks: T


class NativeOps(Generic[T]):
    """The operations of one step; what all layers share is composed once."""

    def __init__(self, layers: Layers[T], geometry: Geometry, tables: Tables[T]) -> None:
        self._l, self._g = layers, geometry
        self._step = StepTables(layers, geometry, tables)
        self._reader = BlockReader(layers, geometry.layout)

    def append(self, k: T, v: T, pages: T, seen: T) -> tuple[T, T]:
        """Stores k (rotated) and v [R, G, D] in the rows' slots and clears their `seen`; returns pages and seen."""
        n, g = self._l, self._g
        pick, (place, seen_place) = self._step.slot_pick, self._step.slot_places
        both = n.concat([n.cast(n.reshape(x, (0, g.kv_heads, 1, g.head_dim)), "kv") for x in (k, v)], axis=2)
        pages = self._put_some(pages, place, n.gather(both, pick.index), pick)
        row = n.constant(torch.zeros(1, g.kv_heads), "fp16")
        zero = n.mul(pick.index, n.constant(torch.zeros(1), "int32"))
        return pages, self._put_some(seen, seen_place, n.gather(row, zero), pick)

    def attend(self, layer: int, q: T, arenas: Arenas[T]) -> Attended[T]:
        """q [R, G * M, D] model, rotated. `arenas.pages` holds this step's tokens already."""
        n, zero, heads = self._l, self._real(0.0), self._g.kv_heads * self._g.group_size
        blocks = self._step.blocks(layer)
        entries = self._reader.read(n.gather(arenas.blocks, blocks.ids))
        page_keys, page_values = self._listed(arenas.pages)
        logits = self._logits(q, page_keys, entries)
        top = self._top(logits, blocks)
        powers = self._powers(logits, top, blocks)
        total = n.add(n.reduce_sum(powers.pages, (3,)), n.reduce_sum(powers.blocks, (3,)))
        total = n.select(n.less(zero, total), total, self._real(1.0))
        weights = _Parts(n.div(powers.pages, total), n.div(powers.blocks, total))
        page_values = n.select(self._step.token_there, page_values, zero)  # weights of 0 would not hide a NaN
        out = n.matmul(weights.pages, page_values)
        out = n.add(out, n.matmul(weights.blocks, self._flat(entries.values)))
        rows_first = (2, 0, 1, 3)
        return Attended(
            out=n.cast(n.reshape(out, (0, heads, self._g.head_dim), first=rows_first), "model"),
            lse=n.reshape(n.add(top, n.log(total)), (0, heads), first=rows_first),
            raised=self._raise(weights, blocks, arenas.seen),
        )

    def score(self, layer: int, q: T, lse: T, arenas: Arenas[T]) -> Raised[T]:
        """Raises by exp(logit - lse) of the rows that record, where lse [R, G * M] real is known."""
        n, g = self._l, self._g
        blocks = self._step.blocks(layer)
        entries = self._reader.read(n.gather(arenas.blocks, blocks.ids))
        logits = self._logits(q, self._listed(arenas.pages)[0], entries)
        known = n.reshape(lse, (0, g.kv_heads, g.group_size, 1), then=(1, 2, 0, 3))
        return self._raise(self._powers(logits, known, blocks), blocks, arenas.seen)

    def raise_score(self, score: T, entry_weights: Sequence[T]) -> T:
        """score [blocks, E] fp16, raised by what each layer gave; once for all of them, since a block has one layer."""
        values = self._l.concat(entry_weights, axis=0)
        return self._put_larger(score, values, self._step.picked_entry_valid, self._step.block_pick)

    def _logits(self, q: T, page_keys: T, entries: Entries[T]) -> _Parts[T]:
        """Of everything listed, seen by the row or not."""
        n, g = self._l, self._g
        split = n.reshape(q, (0, g.kv_heads, g.group_size, g.head_dim), then=(1, 2, 0, 3))
        queries = n.mul(n.cast(split, "real"), self._real(g.scale))
        of_blocks = n.matmul(queries, self._flat(entries.keys), transpose_b=True)
        bias = n.reshape(entries.bias, (1, 1, 1, -1))
        return _Parts(n.matmul(queries, page_keys, transpose_b=True), n.add(of_blocks, bias))

    def _flat(self, x: T) -> T:
        """[B, E, D] -> [1, 1, B * E, D]."""
        return self._l.reshape(x, (1, 1, -1, self._g.head_dim))

    def _listed(self, pages: T) -> tuple[T, T]:
        """Keys and values [G, 1, P * T, D] real of all listed pages, whatever unwritten tokens hold."""
        n, g = self._l, self._g
        listed = n.gather(pages, self._step.page_pick.target)
        listed = n.cast(n.reshape(listed, (2, g.kv_heads, 1, -1, g.head_dim), first=(2, 1, 0, 3, 4)), "real")
        return n.take(listed, 0, 0), n.take(listed, 0, 1)

    def _top(self, logits: _Parts[T], blocks: BlockList[T]) -> T:
        """[G, M, R, 1]: the largest logit that a row sees; NOTHING if none."""
        n, nothing = self._l, self._real(NOTHING)
        of_pages = n.reduce_max(n.select(self._step.page_mask, logits.pages, nothing), (3,))
        return n.maximum(of_pages, n.reduce_max(n.select(blocks.mask, logits.blocks, nothing), (3,)))

    def _powers(self, logits: _Parts[T], top: T, blocks: BlockList[T]) -> _Parts[T]:
        """exp(logit - top) of what a row sees, else 0; top [G, M, R, 1]."""
        n, zero = self._l, self._real(0.0)
        pages, entries = (n.exp(n.sub(part, top)) for part in (logits.pages, logits.blocks))
        return _Parts(n.select(self._step.page_mask, pages, zero), n.select(blocks.mask, entries, zero))

    def _raise(self, weights: _Parts[T], blocks: BlockList[T], seen: T) -> Raised[T]:
        """By the largest weight over recorded rows and the query heads of the group."""
        n, g, zero = self._l, self._g, self._real(0.0)
        of_pages = n.reduce_max(n.select(self._step.page_recorded, weights.pages, zero), (1, 2))
        by_page = n.reshape(of_pages, (g.kv_heads, -1, g.page_tokens), then=(1, 0, 2))
        of_blocks = n.reduce_max(n.select(blocks.recorded, weights.blocks, zero), (0, 1, 2))
        return Raised(
            self._put_larger(seen, by_page, self._step.picked_token_valid, self._step.page_pick),
            n.reshape(of_blocks, (-1, g.layout.block_entries)),
        )

    def _put_larger(self, arena: T, values: T, valid: T, pick: Pick[T]) -> T:
        """arena[target] = max(arena[target], picked values) where valid, which is picked already."""
        n = self._l
        old = n.gather(arena, pick.target)
        new = n.maximum(old, n.cast(n.gather(values, pick.index), "fp16"))
        return n.scatter(arena, n.reshape(pick.target, (-1, 1)), n.select(valid, new, old))

    def _put_some(self, arena: T, place: T, values: T, pick: Pick[T]) -> T:
        """Scatters picked values; if everything pads, what is there already."""
        n = self._l
        some = n.reshape(pick.some, (1,) * n.rank(values))
        return n.scatter(arena, place, n.select(some, values, n.gather_at(arena, place)))

    def _real(self, value: float, rank: int = 4) -> T:
        return self._l.constant(torch.full((1,) * rank, value), "real")
