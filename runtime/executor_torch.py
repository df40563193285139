"""The device half on torch: turns the rows of a step into flat tables and runs the decoder over paged storage."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from plugins.append.cpu import TorchAppend
from plugins.append.params import AppendForm, AppendStep, Rotary
from plugins.attend.cpu import TorchAttend
from plugins.attend.params import RECORD_SUM, AttendForm, AttendStep
from plugins.bound import can_bind
from plugins.commit.line import draw_line
from plugins.commit.publish import publish
from plugins.memory import KvMemory
from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec
from runtime.kv_storage import KvStorage
from runtime.paged_executor import CommitForms, LineForm, PagedExecutor, PublishForm
from runtime.signal_watch import HiddenStates, StepWatch
from runtime.step import SignalResult, int32
from runtime.step_tables import StepRows, TableBuilder, int32_tensor, int64_tensor

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    """`KvStep` over the arenas, for the rows of one step.   watch: None where no sequence is watched."""

    def __init__(
        self, append: AppendForm, slots: torch.Tensor, memory: KvMemory, groups: list[_Group], watch: StepWatch | None
    ) -> None:
        self._append, self._slots, self._memory, self._groups, self._watch = append, slots, memory, groups, watch
        self._begun: AppendStep | None = None

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        if self._begun is None:
            self._begun = self._append.begin(self._slots, rotary, self._memory)
        return self._begun(layer, q, k, v)

    def hidden(self, x: torch.Tensor) -> None:
        if self._watch is not None:
            self._watch.hidden(x)

    def bind(
        self, qkv: Heads, rotary: Rotary, rotated: torch.Tensor, out: torch.Tensor
    ) -> tuple[Callable[[int], object], Callable[[int], object]] | None:
        """See `builder.recorded_step.BindsKv`; not while a sequence is watched, nor where the forms cannot."""
        if self._watch is not None:
            return None
        append = can_bind(self._append.begin(self._slots, rotary, self._memory))
        attends = [can_bind(group.attend) for group in self._groups]
        if append is None or None in attends:
            return None
        bound = [
            attend(rotated[group.rows], out[group.rows])
            for attend, group in zip(attends, self._groups, strict=True)
            if attend is not None
        ]
        return append(*qkv, rotated), bound[0] if len(bound) == 1 else partial(_for_each, bound)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if self._watch is not None:
            self._watch.attend(layer, q)
        out = torch.empty_like(q)
        if len(self._groups) == 1:
            self._groups[0].attend(layer, q, out)
            return out
        for group in self._groups:
            group.attend(layer, q[group.rows], out[group.rows])
        return out


def _for_each(calls: list[Callable[[int], object]], layer: int) -> None:
    for call in calls:
        call(layer)


@dataclass(frozen=True, eq=False)
class _Step:
    """What a decoder reads.   token_ids, positions [rows], logit_rows [n]: int64, int32 on a device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv: _PagedStep
    logit_rows: torch.Tensor


class TorchExecutor(PagedExecutor):
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
        super().__init__(spec, limits, storage, CommitForms(forms.draw_line, forms.publish), staging)
        self._decoder, self._forms = decoder, forms
        self._scale, self._num_layers = spec.head_dim**-0.5, spec.num_layers
        self._tables = TableBuilder(spec)
        self._states = HiddenStates()
        self._watch: StepWatch | None = None  # of the step that runs

    def _forward(
        self, sequences: list[StepRows], logit_rows: array[int], interrupted: Callable[[], bool] | None
    ) -> torch.Tensor | None:
        step = self._prepare(sequences, logit_rows)
        return self._decoder.forward(step.token_ids, step.positions, step.kv, step.logit_rows, interrupted)

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
        self._watch = self._watch_of(sequences)
        kv = _PagedStep(self._forms.append, indices[2], self._memory_of(""), groups, self._watch)
        return _Step(indices[0], indices[1], kv, indices[3])

    def _watch_of(self, sequences: list[StepRows]) -> StepWatch | None:
        watch, first_row = StepWatch(self._states, self._num_layers, self._scale), 0
        for rows in sequences:
            if rows.watch:
                blocks = rows.view.blocks
                memory = self._memory_of(blocks.format if blocks.num_blocks else "")
                watch.add(rows, first_row, memory, self._tables.build([rows]).to(self._storage.device))
            first_row += len(rows.token_ids)
        return watch if any(rows.watch for rows in sequences) else None

    def _signals(self) -> tuple[SignalResult, ...]:
        watch, self._watch = self._watch, None
        return () if watch is None else watch.results()

    def _index(self, values: array[int]) -> torch.Tensor:
        """int32 for kernels, int64 for the forms of a CPU."""
        return int64_tensor(values) if self._staging is None else int32_tensor(values)

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
            memory = self._memory_of(block_format)
            form, tables = self._forms.attend, self._tables.build(members)
            # Sums of weights, and keys of two widths, are what kernels and native forms do not know.
            if memory.layout.mixed or any(RECORD_SUM in rows.record for rows in members):
                form, tables = TORCH_FORMS.attend, tables.to(self._storage.device)
            attend = form.begin(memory, tables, self._scale)
            yield _Group(slice(first_row, end_row), attend)
            first, first_row = last, end_row
