"""Bytes that emulated kernels move, beside the least that the shape needs.

Every copy of keys, values and blocks goes through `hw::copy` or `hw::bulk_store`, which the emulation counts apart;
plain loads and stores are queries, outputs, tables, partial results and the logits kept for recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from perf.kernel_cases import make_attend_case, make_commit_case
from perf.kernel_shapes import HEADS, CommitShape, Heads, KernelShape
from plugins.attend.cuda import CudaAttend
from plugins.commit.cuda import SHARED_BYTES, CudaPublish
from plugins.emulation.runner import EmulatedRunner
from plugins.layout import BlockFormat
from plugins.staging import TableStaging

MOST_RATIO = 1.03
FORMATS: tuple[BlockFormat, ...] = ("int4", "k8v4", "int8")
ELEMENT = torch.bfloat16


@dataclass(frozen=True)
class ByteCount:
    """least: see `perf.kernel_shapes`.   moved: by bulk copies, either way.   other: by plain loads and stores."""

    operation: str
    label: str
    least: int
    moved: int
    other: int

    @property
    def ratio(self) -> float:
        return self.moved / self.least

    def row(self) -> str:
        """One line of the table."""
        cells = (self.operation, self.label, f"{self.least / 1e3:.1f}", f"{self.moved / 1e3:.1f}", f"{self.ratio:.3f}",
                 f"{self.other / 1e3:.1f}")  # fmt: skip
        return "| " + " | ".join(cells) + " |"


TABLE_HEAD = "| operation | shape | least kB | moved kB | ratio | other kB |\n|---|---|---|---|---|---|"


def byte_shapes(models: Iterable[Heads] = HEADS) -> Iterator[KernelShape | CommitShape]:
    """Small ones, since the emulation takes seconds per megabyte: tails in pages, several conversations, a chunk."""
    for heads in models:
        yield KernelShape(heads, 2, 1003)
        for format_ in FORMATS:
            yield KernelShape(heads, 2, 1003, 0.5, format_)
            yield KernelShape(heads, 1, 700, 0.92, format_)
        yield KernelShape(heads, 1, 400, 0.5, rows=50)
        for format_ in FORMATS:
            yield CommitShape(heads, 512, format=format_)


def count_bytes(shape: KernelShape | CommitShape) -> Iterator[ByteCount]:
    """Runs the shape emulated; a chunk gives two rows, without scores and with them."""
    if isinstance(shape, CommitShape):
        yield _count_commit(shape)
    elif shape.rows == 1:
        yield _count_attend("attend", shape, record=True)
    else:
        plain = _count_attend("attend", shape, record=False)
        scored = _count_attend("score", shape, record=True)
        yield plain
        yield replace(scored, least=shape.key_bytes, moved=scored.moved - plain.moved, other=scored.other - plain.other)


def _count_attend(operation: str, shape: KernelShape, *, record: bool) -> ByteCount:
    runner = EmulatedRunner()
    staging = TableStaging(runner.device)
    attend = CudaAttend(runner, staging, shape.heads.group_size)
    case = make_attend_case(shape, ELEMENT, runner.device, record)
    staging.begin()
    step = attend.begin(case.memory, case.tables, case.scale)
    staging.flush()
    step(0, case.q, torch.empty_like(case.q))
    label = shape.label if shape.rows == 1 else f"{shape.label}, {shape.rows} rows"
    counters = runner.counters
    return ByteCount(operation, label, shape.kv_bytes, counters.bulk_read, counters.plain_read + counters.plain_written)


def _count_commit(shape: CommitShape) -> ByteCount:
    runner = EmulatedRunner()
    case = make_commit_case(shape, ELEMENT, runner.device)
    absorbed, _ = CudaPublish(runner, SHARED_BYTES["sm_90a"])(case.memory, case.params, case.decision)
    assert absorbed == 0, "random keys lie far apart; values of absorbed entries would be read too"
    counters = runner.counters
    moved = counters.bulk_read + counters.bulk_written
    return ByteCount("commit", shape.label, shape.kv_bytes, moved, counters.plain_read + counters.plain_written)
