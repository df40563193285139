"""Measurements of our kernels on a GPU, one row a shape: correctness first, then time beside others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perf import kernel_peers
from perf.kernel_cases import AttendCase, exact_decode, make_attend_case, make_commit_case
from perf.kernel_shapes import CommitShape, KernelShape
from perf.kernel_timing import DefinedRunner, Stopwatch, TimedRunner
from plugins.attend.cuda import CudaAttend
from plugins.attend.params import AttendStep
from plugins.blocks import read_bias, read_keys, read_values
from plugins.commit.cuda import SHARED_BYTES, CudaPublish
from plugins.commit.publish import publish
from plugins.kernel import KernelRunner
from plugins.staging import TableStaging

log = logging.getLogger(__name__)

TOLERANCE = 1e-2
CHECKED_CONVERSATIONS = 2
NO_BULK = (("HW_NO_BULK", 1),)
ELEMENT = torch.bfloat16
ROOM = 0.8  # share of the free memory that one shape may take


@dataclass(frozen=True)
class Bench:
    """What all measurements of one card share.   copy_bytes_per_s: read and written, of the card's own copy."""

    runner: KernelRunner
    sm: str
    stopwatch: Stopwatch
    copy_bytes_per_s: float


@dataclass(frozen=True)
class AttendRow:
    """One decode step of one layer. Seconds; None: not measured. error: largest distance to float64."""

    shape: KernelShape
    error: float
    seconds: float
    plain_copies_s: float | None
    sdpa_s: float | None
    flashinfer_s: float | None


@dataclass(frozen=True)
class CommitRow:
    """One publish of one layer.   difference: see `commit_difference`."""

    shape: CommitShape
    difference: float
    seconds: float
    plain_copies_s: float | None


def fits(num_bytes: int, device: torch.device) -> bool:
    """Whether arenas and a peer's copy of the cache fit the card."""
    torch.cuda.empty_cache()  # what the shape before left in torch's allocator
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes < ROOM * free


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """One layer of decode, its tables on the device already; a call runs it into `out`."""

    case: AttendCase
    attend: CudaAttend
    staging: TableStaging
    step: AttendStep
    out: torch.Tensor

    @classmethod
    def of(cls, runner: KernelRunner, sm: str, case: AttendCase) -> PreparedStep:
        staging = TableStaging(runner.device)
        attend = CudaAttend(runner, staging, case.shape.heads.group_size, sm)
        staging.begin()
        step = attend.begin(case.memory, case.tables, case.scale)
        staging.flush()
        return cls(case, attend, staging, step, torch.full_like(case.q, torch.nan))

    def __call__(self) -> None:
        self.step(0, self.case.q, self.out)

    @property
    def error(self) -> float:
        """Largest difference of `out` to the float64 answer, over a few conversations."""
        chosen = sorted({0, self.case.shape.batch - 1})[:CHECKED_CONVERSATIONS]
        return float((self.out[chosen].double() - exact_decode(self.case, chosen)).abs().max())


def measure_attend(bench: Bench, shape: KernelShape, *, compare_copies: bool) -> AttendRow | None:
    """None where the card has no room for the shape."""
    device, peer_bytes = bench.runner.device, 2 * dataclasses.replace(shape, committed_ratio=0.0).kv_bytes
    if not fits(shape.kv_bytes + peer_bytes, device):
        return None
    case = make_attend_case(shape, ELEMENT, device)
    step = PreparedStep.of(bench.runner, bench.sm, case)
    step()
    error, seconds, plain = step.error, bench.stopwatch.seconds(step), None
    if compare_copies:
        plain = bench.stopwatch.seconds(PreparedStep.of(DefinedRunner(bench.runner, NO_BULK), bench.sm, case))
    del case, step  # the peers need the room
    sdpa, flashinfer = _peers(bench, shape)
    return AttendRow(shape, error, seconds, plain, sdpa, flashinfer)


def _peers(bench: Bench, shape: KernelShape) -> Iterator[float | None]:
    """torch's attention, then FlashInfer, over as many tokens at full precision."""
    yield _peer_seconds(bench, shape, "torch", kernel_peers.sdpa)
    yield _peer_seconds(bench, shape, "FlashInfer", kernel_peers.flashinfer) if kernel_peers.has_flashinfer() else None


def _peer_seconds(bench: Bench, shape: KernelShape, name: str, make: kernel_peers.MakePeer) -> float | None:
    """None, and a line in the log, for a shape that the peer does not take: ours is measured all the same."""
    try:
        return bench.stopwatch.seconds(make(shape, ELEMENT, bench.runner.device))
    except (RuntimeError, ValueError, TypeError) as error:  # out of memory is a RuntimeError of torch
        log.warning("%s, %s: left out (%s)", name, shape.label, error)
        return None


def measure_commit(bench: Bench, shape: CommitShape, *, compare_copies: bool) -> CommitRow:
    """Times the launch alone: the host side of `publish` counts and waits."""
    difference = commit_difference(bench.runner, bench.sm, shape)
    seconds = _commit_seconds(bench, bench.runner, shape)
    plain = _commit_seconds(bench, DefinedRunner(bench.runner, NO_BULK), shape) if compare_copies else None
    return CommitRow(shape, difference, seconds, plain)


def _commit_seconds(bench: Bench, runner: KernelRunner, shape: CommitShape) -> float:
    timed = TimedRunner(runner)
    case = make_commit_case(shape, ELEMENT, runner.device)
    form = CudaPublish(timed, SHARED_BYTES[bench.sm])
    times = []
    for _ in range(bench.stopwatch.rounds + 1):
        bench.stopwatch.flush()
        form(case.memory, case.params, case.decision)
        times.append(timed.take_seconds())
    return sorted(times[1:])[bench.stopwatch.rounds // 2]


def commit_difference(runner: KernelRunner, sm: str, shape: CommitShape) -> float:
    """Share of the numbers in new blocks that lie further than TOLERANCE from what the torch form wrote.

    Not 0: where a number lies between two codes, rounding decides, and the next code may be far.
    """
    held = []
    for form in (CudaPublish(runner, SHARED_BYTES[sm]), publish):
        case = make_commit_case(shape, ELEMENT, runner.device)
        form(case.memory, case.params, case.decision)
        new = case.params.new
        filled = torch.arange(shape.block_entries, device=runner.device) < new.lens[:, None]
        raw = case.memory.blocks[new.ids]
        held.append([read(raw, case.memory.layout)[filled] for read in (read_keys, read_values, read_bias)])
    far = [((a - b).abs() > TOLERANCE).float().mean() for a, b in zip(*held, strict=True)]
    return float(max(far))
