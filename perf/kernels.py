"""The kernels' figures: `python -m perf.kernels` on a GPU, `python -m perf.kernels --emulated` without one.

On a GPU: every shape is first compared with float64, then timed (CUDA events, L2 flushed) beside torch's attention over
a contiguous cache and, where installed, FlashInfer; results go to perf/results/<card>.json and .md. Emulated: bytes
that the kernels' own source moves over the least that each shape needs, and how the compiled kernels fill a
multiprocessor. Exit status 1 when something is wrong or moves too much, 2 when there is no GPU to measure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from perf import kernel_bytes, kernel_report
from perf.kernel_report import Session
from perf.kernel_runs import AttendRow, Bench, CommitRow, measure_attend, measure_commit
from perf.kernel_shapes import HEADS, Heads, KernelShape, attend_shapes, commit_shapes
from perf.kernel_timing import Stopwatch
from plugins import occupancy
from plugins.compile import SMS
from plugins.errors import KernelError
from runtime.errors import DeviceError
from runtime.gpu import open_gpu, open_kernels
from runtime.gpu_facts import GpuFacts, read_gpu

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "cuda-python", "nvidia-cuda-nvrtc", "flashinfer-python")
QUICK_TOKENS = 1 << 17
FORMATS_AT = (8, 16384, 0.9)  # batch, tokens, committed share of the comparison of formats


def count_bytes(models: Sequence[Heads]) -> int:
    """Prints the emulated byte counts; 1 if a shape moves more than it may."""
    print(f"### Bytes moved by the emulated kernels (bar: {kernel_bytes.MOST_RATIO} of the least)\n")
    print(kernel_bytes.TABLE_HEAD)
    most = 0.0
    for shape in kernel_bytes.byte_shapes(models):
        for count in kernel_bytes.count_bytes(shape):
            print(count.row(), flush=True)
            most = max(most, count.ratio)
    print(f"\nLargest ratio: {most:.3f}")
    if most > kernel_bytes.MOST_RATIO:
        print(f"kernels: a shape moves {most:.3f} of the least, expected at most {kernel_bytes.MOST_RATIO}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


def print_occupancy(sm: str) -> int:
    """Prints how the compiled kernels fill a multiprocessor; 1 if one misses its plan or nothing can be compiled."""
    print(f"\n### Occupancy on {sm}, bf16 pages (python -m plugins.occupancy prints every instantiation)\n")
    chosen = tuple(geometry for geometry in occupancy.geometries() if geometry.element == "bf16")
    try:
        rows = occupancy.occupancy_rows(sm, chosen)
    except KernelError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    print(occupancy.table(rows))
    return int(any(row.complaint for row in rows))


def measure(models: Sequence[Heads], rounds: int, *, quick: bool) -> Session:
    """Everything that the tables show. Raises DeviceError without a GPU that has kernels."""
    device = open_gpu()
    kernels = open_kernels(device)
    stopwatch = Stopwatch(device, rounds)
    bench = Bench(kernels.runner, kernels.sm, stopwatch, stopwatch.copy_bytes_per_s())
    print(f"{torch.cuda.get_device_name(device)}: copy {bench.copy_bytes_per_s / 1e9:.0f} GB/s", flush=True)
    attend, commit = [], []
    for heads in models:
        for shape in shapes_of(heads, quick=quick):
            row = measure_attend(bench, shape, compare_copies=True)
            if row is None:
                print(f"{shape.label}: left out, no room on this card", flush=True)
                continue
            attend.append(row)
            print(f"{shape.label}: {row.seconds * 1e6:.1f} us", flush=True)
        for staged in commit_shapes(heads):
            commit.append(measure_commit(bench, staged, compare_copies=True))
            print(f"{staged.label}: {commit[-1].seconds * 1e6:.1f} us", flush=True)
    return _session(bench, device, attend, commit)


def shapes_of(heads: Heads, *, quick: bool) -> Iterator[KernelShape]:
    """The grid of contexts, batches and ratios, then every block format at one of its points."""
    for shape in attend_shapes(heads):
        if not quick or shape.batch * shape.tokens <= QUICK_TOKENS:
            yield shape
    batch, tokens, ratio = FORMATS_AT
    for format_ in kernel_bytes.FORMATS:
        if format_ != "k8v4":  # in the grid
            yield KernelShape(heads, batch, tokens, ratio, format_)


def _session(bench: Bench, device: torch.device, attend: list[AttendRow], commit: list[CommitRow]) -> Session:
    versions = []
    for name in PACKAGES:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Session(
        card=_card(device),
        sm=bench.sm,
        copy_bytes_per_s=bench.copy_bytes_per_s,
        read_bytes_per_s=bench.stopwatch.read_bytes_per_s(),
        versions=tuple(versions),
        attend=tuple(attend),
        commit=tuple(commit),
    )


def _card(device: torch.device) -> GpuFacts:
    """What the management library says, or what torch knows where that package is not installed."""
    try:
        return read_gpu(device.index or 0)
    except DeviceError:
        known = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        sm = 10 * known.major + known.minor
        return GpuFacts(known.name, "", sm, total, free, "unknown", 0, None, None, None)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description=(__doc__ or "").split("\n")[0])
    names = [heads.name for heads in HEADS]
    parser.add_argument("--emulated", action="store_true", help="count bytes on the CPU; needs a C++ compiler, no GPU")
    parser.add_argument("--sm", choices=SMS, default="sm_90a", help="of the occupancy table (%(default)s)")
    parser.add_argument("--model", choices=names, action="append", help="one or more (default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds; medians are over them (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only shapes of up to 128k tokens together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    options = parser.parse_args(argv)
    options.models = [heads for heads in HEADS if heads.name in (options.model or names)]
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected 1 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.emulated:
        return max(count_bytes(options.models), print_occupancy(options.sm))
    try:
        session = measure(options.models, options.rounds, quick=options.quick)
    except DeviceError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    print("\n" + kernel_report.tables(session))
    print("\nwrote", *kernel_report.write(session, options.results))
    for label in session.wrong:
        print(f"kernels: {label}: the results are not those of the reference", file=sys.stderr)
    return 1 if session.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
