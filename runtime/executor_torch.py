"""The device half on torch: turns plans into flat tables, runs the decoder over paged storage, samples, commits."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.append.cpu import AppendTables, append_layer, prepare
from plugins.attend.params import AttendParams, AttendTables
from plugins.commit.line import draw_line
from plugins.commit.params import CommitMemory, Decision, LineParams, PublishParams, RowTable
from plugins.commit.publish import publish
from runtime.config import EngineLimits, ModelSpec
from runtime.kv_storage import BlockArena, KvStorage
from runtime.sampling import sample
from runtime.step import (
    BlockTable,
    KvView,
    LinePlan,
    LineResult,
    ProbePlan,
    PublishPlan,
    PublishResult,
    SampledToken,
    SequencePlan,
    StepPlan,
    StepResult,
    int32,
)

SEEN_LAST_ROWS = 64
SEEN_EVERY = 8
CACHED_TABLES = 64

AttendForm = Callable[[AttendParams], None]
Rotary = tuple[torch.Tensor, torch.Tensor]
LayerBlocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""block_starts, block_ids, block_lens of one layer, as in `AttendTables`."""


class KvStep(Protocol):
    """What a decoder calls in every layer, `append` before `attend`."""

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor: ...

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


class Decoder(Protocol):
    """A model that can run the rows of one step; logits [n, vocab] fp32 of `logit_rows`, None when interrupted."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvStep,
        logit_rows: torch.Tensor,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor | None: ...


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of one conversation.   record: [num_tokens] 1 where attention raises scores."""

    token_ids: Sequence[int]
    first_position: int
    slots: array[int]
    view: KvView
    record: bytes


@dataclass(frozen=True, eq=False)
class _Group:
    """Consecutive sequences whose blocks lie in one arena; `tables` of layer i are layer_tables[i]."""

    rows: slice
    arena: BlockArena
    layer_tables: tuple[AttendTables, ...]


class _PagedStep:
    """`KvStep` over the arenas, for the rows of one step."""

    def __init__(self, storage: KvStorage, attend: AttendForm, slots: torch.Tensor, groups: list[_Group]) -> None:
        self._storage, self._attend, self._slots, self._groups = storage, attend, slots, groups
        self._scale = storage.spec.head_dim**-0.5
        self._append_tables: AppendTables | None = None

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        pages, seen = self._storage.pages[layer], self._storage.seen[layer]
        if self._append_tables is None:  # the same for every layer of a step
            self._append_tables = prepare(self._slots, rotary, pages)
        return append_layer((q, k, v), self._append_tables, pages, seen)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        pages, seen = self._storage.pages[layer], self._storage.seen[layer]
        for group in self._groups:
            arena, tables, rows = group.arena, group.layer_tables[layer], group.rows
            self._attend(
                AttendParams(q[rows], out[rows], pages, seen, arena.raw, arena.score, arena.layout, tables, self._scale)
            )
        return out


class TorchExecutor:
    """`runtime.step.Executor` on a CPU.   attend: the torch or the native form of `plugins.attend`."""

    def __init__(
        self, decoder: Decoder, spec: ModelSpec, limits: EngineLimits, storage: KvStorage, attend: AttendForm
    ) -> None:
        self._decoder, self._spec, self._limits, self._storage, self._attend = decoder, spec, limits, storage, attend
        self._layer_blocks: OrderedDict[tuple[int, ...], tuple[LayerBlocks, ...]] = OrderedDict()
        self._decided: tuple[LinePlan, Decision] | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._decided = None
        if not plan.sequences:
            return StepResult()
        sequences = sorted(plan.sequences, key=lambda s: s.view.blocks.format if s.view.blocks.num_blocks else "")
        step, token_ids, positions = self._prepare([_step_rows(s) for s in sequences])
        logit_rows, sampled, last = [], [], -1
        for sequence in sequences:
            last += len(sequence.token_ids)
            if sequence.sample is not None:
                logit_rows.append(last)
                sampled.append((sequence.handle, sequence.sample))
        logits = self._decoder.forward(token_ids, positions, step, torch.tensor(logit_rows, dtype=torch.int64))
        assert logits is not None, "a step cannot be interrupted"
        if not sampled:
            return StepResult()
        tokens = sample(logits, [spec for _, spec in sampled])
        return StepResult(
            tuple(SampledToken(handle, *token) for (handle, _), token in zip(sampled, tokens, strict=True))
        )

    @torch.inference_mode()
    def probe(self, plan: ProbePlan, interrupted: Callable[[], bool]) -> bool:
        """Scores that an interrupted probe raised in its first layers are put back, so that no layer has an edge."""
        self._decided = None
        num_rows = len(plan.token_ids)
        record = bytes(i >= plan.first_scored_row for i in range(num_rows))
        rows = _Rows(plan.token_ids, plan.first_position, plan.slots, plan.view, record)
        step, token_ids, positions = self._prepare([rows])
        with self._scores_put_back(plan.view) as put_back:
            no_rows = torch.zeros(0, dtype=torch.int64)
            done = self._decoder.forward(token_ids, positions, step, no_rows, interrupted) is not None
            if not done:
                put_back()
        return done

    @torch.inference_mode()
    def draw_line(self, plan: LinePlan) -> LineResult:
        rules = plan.rules
        params = LineParams(
            _int64(plan.staged_slots),
            _row_table(plan.blocks),
            plan.keep_entries,
            rules.floor_entries,
            rules.layer_scale,
            rules.protect_outlier_z,
        )
        decision = draw_line(self._commit_memory(plan.blocks.format), params)
        self._decided = (plan, decision)
        new_kept, alive = decision.staged_keep.sum(dim=1), decision.alive.sum(dim=1)
        return LineResult(decision.line, int32(new_kept.tolist()), int32(alive.tolist()))

    @torch.inference_mode()
    def publish(self, plan: PublishPlan) -> PublishResult:
        decided, self._decided = self._decided, None
        assert decided is not None and decided[0] is plan.line, "publish must follow its draw_line at once"
        assert plan.blocks.format == plan.line.blocks.format
        params = PublishParams(
            _int64(plan.line.staged_slots),
            _row_table(plan.line.blocks),
            _int64(plan.dissolve).bool(),
            _row_table(plan.blocks),
            _int64(plan.new_block).bool(),
            plan.line.rules.absorb_gate,
            _int64(plan.move_from),
            _int64(plan.move_to),
        )
        return PublishResult(*publish(self._commit_memory(plan.blocks.format), params, decided[1]))

    def release(self, page_ids: array[int], blocks: BlockTable | None) -> None:
        self._storage.release_pages(page_ids)
        if blocks is not None and blocks.num_blocks:
            self._storage.blocks(blocks.format).release(blocks.ids)

    def _commit_memory(self, block_format: str) -> CommitMemory:
        arena, storage = self._storage.blocks(block_format), self._storage
        return CommitMemory(storage.pages, storage.seen, arena.raw, arena.score, arena.layout)

    def _prepare(self, sequences: list[_Rows]) -> tuple[_PagedStep, torch.Tensor, torch.Tensor]:
        """The step's storage side, token ids and positions. Sequences of one block format must be adjacent."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots = int32()
        for rows in sequences:
            assert len(rows.slots) == len(rows.token_ids) == len(rows.record)
            token_ids.extend(rows.token_ids)
            positions.extend(range(rows.first_position, rows.first_position + len(rows.token_ids)))
            slots.extend(rows.slots)
        groups = list(self._groups(sequences))
        step = _PagedStep(self._storage, self._attend, _int64(slots), groups)
        return step, torch.tensor(token_ids, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)

    def _groups(self, sequences: list[_Rows]) -> Iterator[_Group]:
        """Cuts sequences where the block format changes; those without blocks go with whatever is beside them."""
        first = first_row = 0
        while first < len(sequences):
            block_format, last = "", first
            while last < len(sequences):
                blocks = sequences[last].view.blocks
                if blocks.num_blocks and block_format not in ("", blocks.format):
                    break
                block_format = blocks.format if blocks.num_blocks else block_format
                last += 1
            members = sequences[first:last]
            end_row = first_row + sum(len(rows.token_ids) for rows in members)
            arena = self._storage.blocks(block_format or self._limits.kv_dtype)
            yield _Group(slice(first_row, end_row), arena, self._layer_tables(members))
            first, first_row = last, end_row

    def _layer_tables(self, sequences: list[_Rows]) -> tuple[AttendTables, ...]:
        row_starts, page_starts, page_ids, page_lens = int32([0]), int32([0]), int32(), int32()
        record = bytearray()
        for rows in sequences:
            row_starts.append(row_starts[-1] + len(rows.token_ids))
            page_starts.append(page_starts[-1] + len(rows.view.page_ids))
            page_ids.extend(rows.view.page_ids)
            page_lens.extend(rows.view.page_lens)
            record += rows.record
        starts, pages = _int32_tensor(row_starts), _int32_tensor(page_starts)
        ids, lens = _int32_tensor(page_ids), _int32_tensor(page_lens)
        recorded = torch.frombuffer(record, dtype=torch.uint8)
        per_layer = self._blocks_of(tuple(rows.view.blocks for rows in sequences))
        return tuple(AttendTables(starts, pages, ids, lens, *blocks, recorded) for blocks in per_layer)

    def _blocks_of(self, tables: tuple[BlockTable, ...]) -> tuple[LayerBlocks, ...]:
        """Block lists of a group per layer, cached: they change at commits only."""
        key = tuple(table.version for table in tables)
        cached = self._layer_blocks.get(key)
        if cached is None:
            cached = tuple(_by_layer(tables, self._spec))
            self._layer_blocks[key] = cached
            if len(self._layer_blocks) > CACHED_TABLES:
                self._layer_blocks.popitem(last=False)
        self._layer_blocks.move_to_end(key)
        return cached

    @contextmanager
    def _scores_put_back(self, view: KvView) -> Iterator[Callable[[], None]]:
        """Copies of the scores that `view` can reach; the function given restores them."""
        pages = _int64(view.page_ids)
        seen = [s.index_select(0, pages) for s in self._storage.seen]
        arena = self._storage.blocks(view.blocks.format) if view.blocks.num_blocks else None
        ids = _int64(view.blocks.ids)
        score = arena.score.index_select(0, ids) if arena is not None else None

        def put_back() -> None:
            for target, copy in zip(self._storage.seen, seen, strict=True):
                target.index_copy_(0, pages, copy)
            if arena is not None and score is not None:
                arena.score.index_copy_(0, ids, score)

        yield put_back


def _step_rows(sequence: SequencePlan) -> _Rows:
    """A decode row records if asked to; a chunk does with its last rows and every `SEEN_EVERY`-th position."""
    count, first = len(sequence.token_ids), sequence.first_position
    if not sequence.record_seen:
        record = bytes(count)
    elif count <= SEEN_LAST_ROWS:
        record = b"\x01" * count
    else:
        record = bytes(i >= count - SEEN_LAST_ROWS or (first + i) % SEEN_EVERY == 0 for i in range(count))
    return _Rows(sequence.token_ids, first, sequence.slots, sequence.view, record)


def _by_layer(tables: tuple[BlockTable, ...], spec: ModelSpec) -> Iterator[LayerBlocks]:
    """Lists (sequence, KV head) of each layer, starts counted within the layer."""
    layers, heads = spec.num_layers, spec.num_kv_heads
    starts = [_int32_tensor(table.starts) for table in tables]
    counts = torch.stack([s.diff().view(layers, heads) for s in starts], dim=1).view(layers, -1)
    layer_starts = torch.zeros((layers, counts.shape[1] + 1), dtype=torch.int32)
    torch.cumsum(counts, dim=1, out=layer_starts[:, 1:])
    ids, lens = ([_int32_tensor(a) for a in arrays] for arrays in zip(*((t.ids, t.lens) for t in tables), strict=True))
    for layer in range(layers):
        parts = [slice(int(s[layer * heads]), int(s[(layer + 1) * heads])) for s in starts]
        layer_ids = torch.cat([x[part] for x, part in zip(ids, parts, strict=True)])
        layer_lens = torch.cat([x[part] for x, part in zip(lens, parts, strict=True)])
        yield layer_starts[layer], layer_ids, layer_lens


def _int32_tensor(values: array[int]) -> torch.Tensor:
    """Shares the array's memory; tables are frozen and buffers of a step are its own."""
    return torch.frombuffer(values, dtype=torch.int32) if values else torch.zeros(0, dtype=torch.int32)


def _int64(values: array[int]) -> torch.Tensor:
    return _int32_tensor(values).long()


def _row_table(table: BlockTable) -> RowTable:
    return RowTable(tuple(table.starts), _int64(table.ids), _int64(table.lens))
