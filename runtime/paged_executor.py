"""What executors share: they keep KV in the same arenas, sample in the same way and commit by the same forms.

An executor says how the rows of one step become logits (`_forward`); this does everything around that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.attend.params import RECORD_SQUARES
from plugins.commit.exact import choose_exact, copy_exact
from plugins.commit.gate import GateWeights
from plugins.commit.merger import MergeWeights
from plugins.commit.params import Decision, LineParams, PublishParams, RowTable
from plugins.memory import KvMemory
from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec
from runtime.gates import load_gate, load_merger
from runtime.kv_storage import KvStorage
from runtime.line_results import Decided, line_results
from runtime.memory_plan import block_layout
from runtime.policy.registry import get_policy
from runtime.sampling import sample
from runtime.step import (
    FADE,
    BlockTable,
    KvView,
    LinePlan,
    LineResult,
    ProbePlan,
    PublishPlan,
    PublishResult,
    SampledToken,
    SignalResult,
    StepPlan,
    StepResult,
    int32,
)
from runtime.step_tables import StepRows, int64_tensor
from runtime.table_checks import TableBounds, TableChecks


class LineForm(Protocol):
    """A form of the first half of a commit."""

    def __call__(self, memory: KvMemory, params: LineParams) -> Decision: ...


class PublishForm(Protocol):
    """A form of the second half of a commit; returns (absorbed, dropped) counts."""

    def __call__(self, memory: KvMemory, params: PublishParams, decision: Decision) -> tuple[int, int]: ...


class CommitWatcher(Protocol):
    """Sees a commit that is about to be written."""

    def committing(self, plan: PublishPlan, memory: KvMemory, params: PublishParams, decision: Decision) -> None: ...


@dataclass(frozen=True)
class CommitForms:
    """Which form of a commit's two halves an executor runs."""

    draw_line: LineForm
    publish: PublishForm


class PagedExecutor(ABC):
    """`runtime.step.Executor` but for the model itself."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: EngineLimits,
        storage: KvStorage,
        commit_forms: CommitForms,
        staging: TableStaging | None = None,
    ) -> None:
        """staging: what the forms for a device were made with; None for forms that read host tables.

        steer: given the logits [n, vocab] fp32 that a step samples from, it may put others in their place; for
        evaluation, which forces texts.
        """
        self._limits, self._storage, self._commit_forms = limits, storage, commit_forms
        self._staging = staging
        self._checks = TableChecks(TableBounds.of(spec, limits, storage.num_pages), storage)
        self._memory: dict[str, KvMemory] = {}  # by block format
        self._own_format = block_layout(spec, limits, get_policy(limits.policy).block_format).format
        self._gates: dict[str, GateWeights] = {}  # by file
        self._mergers: dict[str, MergeWeights] = {}  # by file
        self.watcher: CommitWatcher | None = None
        self.steer: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def storage(self) -> KvStorage:
        """The arenas that it works on."""
        return self._storage

    @abstractmethod
    def _forward(
        self, sequences: list[StepRows], logit_rows: array[int], interrupted: Callable[[], bool] | None
    ) -> torch.Tensor | None:
        """Runs rows, writing K and V and raising scores; logits [n, vocab] fp32 of `logit_rows`.

        None when `interrupted`, asked now and then, said so. Sequences of one block format are adjacent.
        """

    def _signals(self) -> tuple[SignalResult, ...]:
        """What the last `_forward` showed of its watched sequences; the manager gives those to executors that can."""
        return ()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if not plan.sequences:
            return StepResult()
        sequences = sorted(plan.sequences, key=lambda s: s.view.blocks.format if s.view.blocks.num_blocks else "")
        logit_rows, sampled, last = int32(), [], -1
        for sequence in sequences:
            last += len(sequence.token_ids)
            if sequence.sample is not None:
                logit_rows.append(last)
                sampled.append((sequence.handle, sequence.sample))
        logits = self._forward([StepRows.of(s) for s in sequences], logit_rows, None)
        assert logits is not None, "a step cannot be interrupted"
        signals = self._signals()
        if not sampled:
            return StepResult(signals=signals)
        if self.steer is not None:
            logits = self.steer(logits)
        tokens = sample(logits, [spec for _, spec in sampled])
        return StepResult(
            tuple(SampledToken(handle, *token) for (handle, _), token in zip(sampled, tokens, strict=True)), signals
        )

    @torch.inference_mode()
    def probe(self, plan: ProbePlan, interrupted: Callable[[], bool]) -> bool:
        """Scores that an interrupted probe raised in its first layers are put back, so that no layer has an edge."""
        num_rows = len(plan.token_ids)
        mark = RECORD_SQUARES if plan.squares else 1
        record = bytes(mark * (i >= plan.first_scored_row) for i in range(num_rows))
        rows = StepRows(plan.token_ids, plan.first_position, plan.slots, plan.view, record, plan.record_skip)
        with self._scores_put_back(plan.view) as put_back:
            if plan.fades:
                self._fade(plan)
            done = self._forward([rows], int32(), interrupted) is not None
            if not done:
                put_back()
        return done

    @torch.inference_mode()
    def logits(self, plan: ProbePlan) -> torch.Tensor:
        """[vocab] fp32 after the last row of `plan`, for evaluation; no score is raised."""
        num_rows = len(plan.token_ids)
        rows = StepRows(plan.token_ids, plan.first_position, plan.slots, plan.view, bytes(num_rows), plan.record_skip)
        logits = self._forward([rows], int32([num_rows - 1]), None)
        assert logits is not None, "nothing interrupts it"
        return logits[0].clone()  # an engine writes all its logits to one place

    def draw_lines(self, plans: Sequence[LinePlan]) -> tuple[LineResult, ...]:
        return self.drawing(plans)()

    @torch.inference_mode()
    def drawing(self, plans: Sequence[LinePlan]) -> Callable[[], tuple[LineResult, ...]]:
        """See `runtime.step.Executor`."""
        for plan in plans:
            self._check_commit(plan.blocks, staged_slots=plan.staged_slots)
        with self._uploads() as put:
            params = [self._line_params(plan, put) for plan in plans]
        memories = [self._memory_of(plan.blocks.format) for plan in plans]

        def draw() -> tuple[LineResult, ...]:
            with torch.inference_mode():
                decisions = map(self._commit_forms.draw_line, memories, params)
                exact = (plan.rules.exact_entries for plan in plans)
                return line_results(plans, list(map(choose_exact, decisions, exact)))

        return draw

    def _line_params(self, plan: LinePlan, put: Callable[[torch.Tensor], torch.Tensor]) -> LineParams:
        rules = plan.rules
        return LineParams(
            put(int64_tensor(plan.staged_slots)),
            _row_table(plan.blocks, put),
            plan.keep_entries,
            rules.floor_entries,
            rules.layer_scale,
            rules.protect_outlier_z,
            rules.choices,
            plan.quotas,
            put(int64_tensor(plan.positions)),
            plan.num_tokens,
            self._gate(rules.gate) if rules.gate else None,
            self._merger(rules.merger) if rules.merger else None,
        )

    def publish(self, plan: PublishPlan, line: LineResult) -> PublishResult:
        return self.publishing(plan, line)()

    @torch.inference_mode()
    def publishing(self, plan: PublishPlan, line: LineResult) -> Callable[[], PublishResult]:
        """See `runtime.step.Executor`."""
        decided = line.decision
        assert isinstance(decided, Decided) and decided.plan is plan.line, "the line of another commit"
        assert plan.blocks.format == plan.line.blocks.format
        self._check_commit(plan.blocks, move_from=plan.move_from, move_to=plan.move_to, exact_to=plan.exact_to)
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
                put(int64_tensor(plan.exact_to)),
            )
        memory, decision = self._memory_of(plan.blocks.format), decided.decision
        if self.watcher is not None:
            self.watcher.committing(plan, memory, params, decision)

        def write() -> PublishResult:
            with torch.inference_mode():
                copy_exact(memory, params, decision)
                return PublishResult(*self._commit_forms.publish(memory, params, decision))

        return write

    def release(self, page_ids: array[int], blocks: BlockTable | None) -> None:
        self._storage.release_pages(page_ids)
        if blocks is not None and blocks.num_blocks:
            self._storage.blocks(blocks.format).release(blocks.ids)

    def _gate(self, file: str) -> GateWeights:
        """The trained scorer, read when it is first asked for."""
        if file not in self._gates:
            self._gates[file] = load_gate(file, self._storage.device, rotated=self._limits.rotate_values)
        return self._gates[file]

    def _merger(self, file: str) -> MergeWeights:
        if file not in self._mergers:
            rotated = self._limits.rotate_values
            self._mergers[file] = load_merger(file, self._storage.device, rotated=rotated)
        return self._mergers[file]

    def _memory_of(self, block_format: str) -> KvMemory:
        """The arenas of pages and of one block format; "" for steps that read no block, for which none is made.

        Kernels are compiled for a format; those steps use the ones of the engine's own policy.
        """
        memory = self._memory.get(block_format)
        if memory is None:
            storage = self._storage
            arena = storage.blocks(block_format) if block_format else storage.no_blocks(self._own_format)
            memory = KvMemory(storage.pages, storage.seen, arena.raw, arena.score, arena.layout)
            self._memory[block_format] = memory
        return memory

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

    def _fade(self, plan: ProbePlan) -> None:
        """Lowers the scores of committed entries, which keeps their order."""
        blocks, pages = plan.view.blocks, int64_tensor(plan.exact_pages).to(self._storage.device)
        ids = int64_tensor(blocks.ids).to(self._storage.device)
        score = self._storage.blocks(blocks.format).score
        for scores, where in ((score, ids), *((seen, pages) for seen in self._storage.seen if pages.numel())):
            scores.index_copy_(0, where, scores.index_select(0, where).mul_(FADE))

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
