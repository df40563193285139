"""The kernels' figures without a GPU: counted bytes, float64 answers, reports; and what is said where there is none."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from perf import kernel_bytes, kernel_timing, kernels
from perf.kernel_cases import exact_decode, make_attend_case
from perf.kernel_report import Session, tables, write
from perf.kernel_runs import (
    ELEMENT,
    NO_BULK,
    AttendRow,
    Bench,
    CommitRow,
    PreparedStep,
    commit_difference,
    measure_attend,
    measure_commit,
)
from perf.kernel_shapes import HEADS, CommitShape, Heads, KernelShape
from perf.kernel_timing import DefinedRunner
from plugins.attend import reference
from plugins.attend.params import AttendParams
from plugins.emulation.runner import EmulatedRunner
from plugins.native_build import find_compiler
from runtime.gpu_facts import GpuFacts

CPU = torch.device("cpu")
SMOL = HEADS[0]
SMALL = Heads("small", 2, 2, 2, 64)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")


@pytest.mark.parametrize(("ratio", "format_"), [(0.0, "int8"), (0.7, "int8"), (0.7, "k8v4"), (1.0, "int4")])
def test_exact_answers_are_the_reference(ratio: float, format_: str) -> None:
    shape = KernelShape(SMALL, 2, 192, ratio, format_)  # type: ignore[arg-type]
    case = make_attend_case(shape, torch.float16, CPU)
    memory = case.memory
    params = AttendParams(
        case.q, torch.empty_like(case.q), memory.pages[0], memory.seen[0], memory.blocks, memory.score, memory.layout,
        case.tables.layer(0), case.scale,
    )  # fmt: skip
    torch.testing.assert_close(exact_decode(case, [0, 1]), reference.attend(params)[0], atol=1e-12, rtol=1e-12)


@needs_compiler
def test_kernels_move_each_byte_once_and_answer_as_float64() -> None:
    shape = KernelShape(SMALL, 2, 333, 0.5)
    (count,) = kernel_bytes.count_bytes(shape)
    assert 1.0 <= count.ratio <= kernel_bytes.MOST_RATIO and count.least == shape.kv_bytes
    runner = EmulatedRunner()
    case = make_attend_case(shape, ELEMENT, CPU)
    for variant in (runner, DefinedRunner(runner, NO_BULK)):
        step = PreparedStep.of(variant, "sm_90a", case)
        assert not step.error <= 1e-2, "nothing was run yet"
        step()
        assert step.error <= 1e-2


@needs_compiler
def test_commits_move_each_byte_once_and_write_what_torch_writes() -> None:
    shape = CommitShape(SMALL, 200)
    (count,) = kernel_bytes.count_bytes(shape)
    assert 1.0 <= count.ratio <= kernel_bytes.MOST_RATIO
    assert commit_difference(EmulatedRunner(), "sm_90a", shape) <= 1e-3


def test_a_kernel_that_reads_twice_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_bytes, "byte_shapes", lambda models: [KernelShape(SMALL, 1, 64)])
    for moved, status in ((1000, 0), (1030, 0), (1031, 1), (2000, 1)):
        count = kernel_bytes.ByteCount("attend", "x", 1000, moved, 0)
        monkeypatch.setattr(kernel_bytes, "count_bytes", lambda shape, count=count: [count])
        assert kernels.count_bytes([SMALL]) == status
    assert "expected at most 1.03" in capsys.readouterr().err


def test_shapes_cover_every_format_and_operation() -> None:
    shapes = list(kernel_bytes.byte_shapes([SMOL]))
    assert {s.format for s in shapes if s.label} >= set(kernel_bytes.FORMATS)
    assert any(isinstance(s, CommitShape) for s in shapes)
    assert any(isinstance(s, KernelShape) and s.rows > 1 for s in shapes)
    grid = list(kernels.shapes_of(SMOL, quick=False))
    assert {4096, 131072} <= {s.tokens for s in grid} and {1, 64} <= {s.batch for s in grid}
    assert len(list(kernels.shapes_of(SMOL, quick=True))) < len(grid)


CARD = GpuFacts("NVIDIA Test-1", "GPU-1", 90, 1 << 36, 1 << 35, "580.1", 13000, 3.35e12, 1980, 700.0)


def session(error: float = 1e-3, difference: float = 0.0) -> Session:
    """Rows of 80 % and 90 % of a copy bandwidth of 1 TB/s."""
    long, short = KernelShape(SMOL, 8, 16384), KernelShape(SMOL, 1, 4096)
    attend = [
        AttendRow(shape, error, shape.kv_bytes / share / 1e12, None, 1e-3, None)
        for shape, share in ((long, 0.9), (KernelShape(SMOL, 4, 65536), 0.8), (short, 0.1))
    ]
    commit = CommitShape(SMOL, 4096)
    rows = (CommitRow(commit, difference, commit.kv_bytes / 0.75e12, 1e-3),)
    return Session(CARD, "sm_90a", 1e12, 1.1e12, (("torch", "2.13.0"),), tuple(attend), rows)


def test_reports_name_the_bars_and_how_far_they_were_reached(tmp_path: Path) -> None:
    text = tables(session())
    assert "attend, from 64k active tokens in flight: 80% to 90% of the measured copy bandwidth; 1 of 2 shapes" in text
    assert "commit: 75% to 75% of the measured copy bandwidth; 1 of 1 shapes reach 70%" in text
    data, page = write(session(), tmp_path / "results")
    assert data.name == "nvidia-test-1.json" and page.read_text(encoding="utf-8").strip() == text
    stored = json.loads(data.read_text(encoding="utf-8"))
    assert stored["card"]["name"] == "NVIDIA Test-1" and len(stored["attend"]) == 3
    assert stored["attend"][0]["kv_bytes"] == KernelShape(SMOL, 8, 16384).kv_bytes


def test_wrong_results_are_named() -> None:
    assert session().wrong == []
    assert len(session(error=0.02).wrong) == 3 and len(session(error=float("nan")).wrong) == 3
    assert session(difference=0.5).wrong == [CommitShape(SMOL, 4096).label]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert kernels.main(["--results", str(tmp_path)]) == 2
    assert "device: got cuda, but" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        kernels.main(["--rounds", "0"])


class CpuEvent:
    """Stands in for a CUDA event, which needs a GPU: the time of the host's clock."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: CpuEvent) -> float:
        return 1e3 * (end.at - self.at)


@needs_compiler
def test_the_measuring_code_with_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the clock and the card is what runs on a GPU; the emulated kernels take their time."""
    monkeypatch.setattr(kernel_timing, "_event", CpuEvent)
    monkeypatch.setattr(kernel_timing, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(kernel_timing, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(kernel_timing, "WARM_UPS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 30))
    stopwatch = kernel_timing.Stopwatch(CPU, rounds=1)
    bench = Bench(EmulatedRunner(), "sm_90a", stopwatch, stopwatch.copy_bytes_per_s())
    assert bench.copy_bytes_per_s > 0 and stopwatch.read_bytes_per_s() > 0
    row = measure_attend(bench, KernelShape(SMALL, 2, 333, 0.5), compare_copies=True)
    assert row is not None and row.error <= 1e-2 and row.seconds > 0
    assert row.plain_copies_s is not None and row.sdpa_s is not None and row.flashinfer_s is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 10, 1 << 30))
    assert measure_attend(bench, KernelShape(SMALL, 2, 333, 0.5), compare_copies=False) is None, "no room"
    commit = measure_commit(bench, CommitShape(SMALL, 200), compare_copies=True)
    assert commit.difference <= 1e-3 and commit.seconds > 0 and commit.plain_copies_s is not None
    assert not Session(CARD, "sm_90a", 1e12, 1e12, (), (row,), (commit,)).wrong
