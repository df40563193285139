"""The device half on torch: turns plans into flat tables, runs the decoder over paged storage, samples, commits."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.append.cpu import TorchAppend
from plugins.append.params import AppendForm, AppendStep, Rotary
from plugins.attend.cpu import TorchAttend
from plugins.attend.params import AttendForm, AttendStep
from plugins.commit.line import draw_line
from plugins.commit.params import Decision, LineParams, PublishParams, RowTable
from plugins.commit.publish import publish
from plugins.memory import KvMemory
from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec
from runtime.kv_storage import KvStorage
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
    StepPlan,
    StepResult,
    int32,
)
from runtime.step_tables import StepRows, TableBuilder, int32_tensor, int64_tensor
from runtime.table_checks import TableBounds, TableChecks


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


class LineForm(Protocol):
    """A form of the first half of a commit."""

    def __call__(self, memory: KvMemory, params: LineParams) -> Decision: ...


class PublishForm(Protocol):
    """A form of the second half of a commit; returns (absorbed, dropped) counts."""

    def __call__(self, memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Forms:
    """Which form of each operation an executor runs."""

    append: AppendForm
    attend: AttendForm
    draw_line: LineForm
    publish: PublishForm


TORCH_FORMS = Forms(TorchAppend(), TorchAttend(), draw_line, publish)


@dataclass(frozen=True, eq=False)
class _Group:
    """Consecutive sequences whose blocks lie in one arena."""

    rows: slice
    attend: AttendStep


class _PagedStep:
    """`KvStep` over the arenas, for the rows of one step."""

    def __init__(self, append: AppendForm, slots: torch.Tensor, memory: KvMemory, groups: list[_Group]) -> None:
        self._append, self._slots, self._memory, self._groups = append, slots, memory, groups
        self._begun: AppendStep | None = None

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        if self._begun is None:
            self._begun = self._append.begin(self._slots, rotary, self._memory)
        return self._begun(layer, q, k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        if len(self._groups) == 1:
            self._groups[0].attend(layer, q, out)
            return out
        for group in self._groups:
            group.attend(layer, q[group.rows], out[group.rows])
        return out


@dataclass(frozen=True, eq=False)
class _Step:
    """What a decoder reads.   token_ids, positions [rows], logit_rows [n]: int64, int32 on a device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv: _PagedStep
    logit_rows: torch.Tensor


class TorchExecutor:
    """`runtime.step.Executor` where torch runs: on a CPU, or on a GPU with the forms that launch our kernels.

    On a GPU all tables of a step go down in one copy and its tokens come up in one. Attention's tables stay host
    tensors until its form has laid out tiles over them; it puts them into the same copy.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        limits: EngineLimits,
        storage: KvStorage,
        forms: Forms = TORCH_FORMS,
        staging: TableStaging | None = None,
    ) -> None:
        """staging: what the forms for a device were made with; None for forms that read host tables."""
        self._decoder, self._limits, self._storage, self._forms = decoder, limits, storage, forms
        self._staging = staging
        self._checks = TableChecks(TableBounds.of(spec, limits, storage.num_pages), storage)
        self._scale = spec.head_dim**-0.5
        self._tables = TableBuilder(spec)
        self._memory: dict[str, KvMemory] = {}  # by block format
        self._decided: tuple[LinePlan, Decision] | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._decided = None
        if not plan.sequences:
            return StepResult()
        sequences = sorted(plan.sequences, key=lambda s: s.view.blocks.format if s.view.blocks.num_blocks else "")
        logit_rows, sampled, last = int32(), [], -1
        for sequence in sequences:
            last += len(sequence.token_ids)
            if sequence.sample is not None:
                logit_rows.append(last)
                sampled.append((sequence.handle, sequence.sample))
        step = self._prepare([StepRows.of(s) for s in sequences], logit_rows)
        logits = self._decoder.forward(step.token_ids, step.positions, step.kv, step.logit_rows)
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
        rows = StepRows(plan.token_ids, plan.first_position, plan.slots, plan.view, record, plan.record_skip)
        step = self._prepare([rows], int32())
        with self._scores_put_back(plan.view) as put_back:
            forward = self._decoder.forward
            done = forward(step.token_ids, step.positions, step.kv, step.logit_rows, interrupted) is not None
            if not done:
                put_back()
        return done

    @torch.inference_mode()
    def logits(self, plan: ProbePlan) -> torch.Tensor:
        """[vocab] fp32 after the last row of `plan`, for evaluation; no score is raised."""
        self._decided = None
        num_rows = len(plan.token_ids)
        rows = StepRows(plan.token_ids, plan.first_position, plan.slots, plan.view, bytes(num_rows), plan.record_skip)
        step = self._prepare([rows], int32([num_rows - 1]))
        logits = self._decoder.forward(step.token_ids, step.positions, step.kv, step.logit_rows)
        assert logits is not None, "nothing interrupts it"
        return logits[0]

    @torch.inference_mode()
    def draw_line(self, plan: LinePlan) -> LineResult:
        rules = plan.rules
        self._check_commit(plan.blocks, staged_slots=plan.staged_slots)
        with self._uploads() as put:
            params = LineParams(
                put(int64_tensor(plan.staged_slots)),
                _row_table(plan.blocks, put),
                plan.keep_entries,
                rules.floor_entries,
                rules.layer_scale,
                rules.protect_outlier_z,
            )
        decision = self._forms.draw_line(self._memory_of(plan.blocks.format), params)
        self._decided = (plan, decision)
        new_kept, alive = decision.staged_keep.sum(dim=1), decision.alive.sum(dim=1)
        return LineResult(decision.line, int32(new_kept.tolist()), int32(alive.tolist()))

    @torch.inference_mode()
    def publish(self, plan: PublishPlan) -> PublishResult:
        decided, self._decided = self._decided, None
        assert decided is not None and decided[0] is plan.line, "publish must follow its draw_line at once"
        assert plan.blocks.format == plan.line.blocks.format
        self._check_commit(plan.blocks, move_from=plan.move_from, move_to=plan.move_to)
        with self._uploads() as put:
            params = PublishParams(
                put(int64_tensor(plan.line.staged_slots)),
                _row_table(plan.line.blocks, put),
                put(int64_tensor(plan.dissolve).bool()),
                _row_table(plan.blocks, put),
                put(int64_tensor(plan.new_block).bool()),
                plan.line.rules.absorb_gate,
                put(int64_tensor(plan.move_from)),
                put(int64_tensor(plan.move_to)),
            )
        return PublishResult(*self._forms.publish(self._memory_of(plan.blocks.format), params, decided[1]))

    def release(self, page_ids: array[int], blocks: BlockTable | None) -> None:
        self._storage.release_pages(page_ids)
        if blocks is not None and blocks.num_blocks:
            self._storage.blocks(blocks.format).release(blocks.ids)

    def _memory_of(self, block_format: str) -> KvMemory:
        """The arenas of pages and of one block format."""
        memory = self._memory.get(block_format)
        if memory is None:
            arena, storage = self._storage.blocks(block_format), self._storage
            memory = KvMemory(storage.pages, storage.seen, arena.raw, arena.score, arena.layout)
            self._memory[block_format] = memory
        return memory

    def _prepare(self, sequences: list[StepRows], logit_rows: array[int]) -> _Step:
        """A step's tables, on the device. Sequences of one block format must be adjacent."""
        token_ids, positions, slots = int32(), int32(), int32()
        for rows in sequences:
            if self._staging is not None:
                self._checks.rows(rows)
            assert len(rows.slots) == len(rows.token_ids) == len(rows.record)
            token_ids.extend(rows.token_ids)
            positions.extend(range(rows.first_position, rows.first_position + len(rows.token_ids)))
            slots.extend(rows.slots)
        with self._uploads() as put:
            indices = [put(self._index(x)) for x in (token_ids, positions, slots, logit_rows)]
            groups = list(self._groups(sequences))
        memory = self._memory_of(self._limits.kv_dtype)  # of which append needs the pages only
        kv = _PagedStep(self._forms.append, indices[2], memory, groups)
        return _Step(indices[0], indices[1], kv, indices[3])

    def _index(self, values: array[int]) -> torch.Tensor:
        """int32 for kernels, int64 for the forms of a CPU."""
        return int64_tensor(values) if self._staging is None else int32_tensor(values)

    @contextmanager
    def _uploads(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Gives `put`, whose results hold their values once this ends."""
        if self._staging is None:
            yield lambda table: table
            return
        self._staging.begin()
        yield self._staging.put
        self._staging.flush()

    def _check_commit(self, blocks: BlockTable, **slots: array[int]) -> None:
        if self._staging is not None:
            self._checks.blocks(blocks)
            for name, values in slots.items():
                self._checks.slots(name, values)

    def _groups(self, sequences: list[StepRows]) -> Iterator[_Group]:
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
            memory = self._memory_of(block_format or self._limits.kv_dtype)
            attend = self._forms.attend.begin(memory, self._tables.build(members), self._scale)
            yield _Group(slice(first_row, end_row), attend)
            first, first_row = last, end_row

    @contextmanager
    def _scores_put_back(self, view: KvView) -> Iterator[Callable[[], None]]:
        """Copies of the scores that `view` can reach; the function given restores them."""
        device = self._storage.device
        pages = int64_tensor(view.page_ids).to(device)
        seen = [s.index_select(0, pages) for s in self._storage.seen]
        arena = self._storage.blocks(view.blocks.format) if view.blocks.num_blocks else None
        ids = int64_tensor(view.blocks.ids).to(device)
        score = arena.score.index_select(0, ids) if arena is not None else None

        def put_back() -> None:
            for target, copy in zip(self._storage.seen, seen, strict=True):
                target.index_copy_(0, pages, copy)
            if arena is not None and score is not None:
                arena.score.index_copy_(0, ids, score)

        yield put_back


def _row_table(table: BlockTable, put: Callable[[torch.Tensor], torch.Tensor]) -> RowTable:
    return RowTable(tuple(table.starts), put(int64_tensor(table.ids)), put(int64_tensor(table.lens)))
