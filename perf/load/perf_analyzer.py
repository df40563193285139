"""`python -m perf.load.perf_analyzer`: NVIDIA's perf_analyzer over single turns, whole and streamed.

Each point (a number of requests at once, or a rate of them) is one run of perf_analyzer. Latencies and throughput are
its own, from its CSV; times to the first token and between tokens come from the requests that it exports. Turns are
raw prompts: it knows no conversations. `make load-tools` installs it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.load.command import ToolError, check_tool, exit_code, own_server
from perf.load.outcomes import Quantiles, quantiles_ms
from perf.load.texts import user_message
from perf.serve import add_engine_arguments
from perf.server import MODEL_NAME, REPO_ROOT, TritonInstall, find_triton
from runtime.errors import ConfigError

BINARY = REPO_ROOT / ".venv-perf-analyzer" / "bin" / "perf_analyzer"
NUM_PROMPTS = 32
# What its binary needs and only the server's wheel has, under names with a hash in them.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


@dataclass(frozen=True)
class Point:
    """One load: `value` requests at once, or per second. streamed: one response per piece of text."""

    mode: str
    value: float
    streamed: bool

    @property
    def label(self) -> str:
        what = f"{self.value:g} at once" if self.mode == "concurrency" else f"{self.value:g} per s"
        return f"{what}, {'streamed' if self.streamed else 'whole'}"

    @property
    def arguments(self) -> list[str]:
        if self.mode == "concurrency":
            return [f"--concurrency-range={self.value:g}"]
        # With a start alone, its end is 1: a range of several rates where the start is lower.
        return [f"--request-rate-range={self.value:g}:{self.value:g}", "--request-distribution=poisson"]


@dataclass(frozen=True)
class Measured:
    """What perf_analyzer found at one point. The first two fields of times are its own, the rest from its export."""

    point: Point
    requests: int
    requests_per_s: float
    latency_ms: Mapping[str, float]
    ttft_ms: Quantiles
    itl_ms: Quantiles


def input_data(num_words: int, max_tokens: int, streamed: bool, seed: int) -> dict[str, Any]:
    """Requests in perf_analyzer's JSON: prompts by the seed, the optional inputs that are needed and no others."""
    rng = random.Random(seed)
    common = {
        "streaming": {"content": [streamed], "shape": [1]},
        "sampling_param_max_tokens": {"content": [max_tokens], "shape": [1]},
    }
    prompts = [user_message(rng, num_words) for _ in range(NUM_PROMPTS)]
    return {"data": [{"text_input": {"content": [prompt], "shape": [1]}, **common} for prompt in prompts]}


@contextlib.contextmanager
def library_path(install: TritonInstall) -> Iterator[str]:
    """Value of LD_LIBRARY_PATH with which the binary starts; "" for a server that is installed as a whole."""
    if install.wheel_root is None:
        yield ""
        return
    source = install.wheel_root / "nvidia_pytriton.libs"
    with tempfile.TemporaryDirectory(prefix="commitkv-libs-") as directory:
        for name, pattern in LIBRARIES.items():
            found = sorted(source.glob(pattern))
            if not found:
                raise ToolError(f"perf_analyzer: no {pattern} in {source}; install nvidia-pytriton==0.7.0")
            (Path(directory) / name).symlink_to(found[0])
        yield os.pathsep.join([directory, str(source)])


def call(binary: Path, arguments: Sequence[str], timeout_s: float = 600.0) -> str:
    """Its output. Raises ToolError when it is not there, fails, or takes too long."""
    check_tool("perf_analyzer", binary)
    with library_path(find_triton()) as libraries:
        environment = {**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}
        try:
            done = subprocess.run(
                [str(binary), *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"perf_analyzer: no end within {timeout_s:g} s; ask for fewer requests") from error
    if done.returncode:
        said = (done.stderr + done.stdout).strip()  # what is wrong comes first, then all of its usage
        raise ToolError(f"perf_analyzer: ended with code {done.returncode}: {said[:800]}")
    return done.stdout


def measure(args: argparse.Namespace, url: str, point: Point) -> Measured:
    """One run. Raises ToolError."""
    name = point.label.replace(" ", "_").replace(",", "")
    data, table, export = (args.output / f"{name}.{end}" for end in ("input.json", "csv", "export.json"))
    content = input_data(args.words, args.max_tokens, point.streamed, args.seed)
    data.write_text(json.dumps(content), encoding="utf-8")
    arguments = [
        "-m", MODEL_NAME, "-i", "grpc", "-u", url, "--async", "--streaming", f"--input-data={data}",
        f"--request-count={args.requests}", "-f", str(table), f"--profile-export-file={export}", *point.arguments,
    ]  # fmt: skip
    export.unlink(missing_ok=True)  # an earlier run's would be refused
    call(args.binary, arguments, args.timeout_s)
    return read_point(point, table, export)


def read_point(point: Point, table: Path, export: Path) -> Measured:
    """From perf_analyzer's CSV (microseconds) and its export (nanoseconds). Raises ToolError for other files."""
    try:
        [row] = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
        latency = {name: float(row[f"{name} latency"]) / 1e3 for name in ("p50", "p95", "p99")}
        [experiment] = json.loads(export.read_text(encoding="utf-8"))["experiments"]
        requests = experiment["requests"]
        rate = float(row["Inferences/Second"])
    except (OSError, ValueError, KeyError) as error:
        raise ToolError(f"perf_analyzer: cannot read {table} and {export} ({error!r}); was it version 2.51?") from error
    first, between = token_times(requests, point.streamed)
    return Measured(point, len(requests), rate, latency, quantiles_ms(first), quantiles_ms(between))


def token_times(requests: Sequence[Mapping[str, Any]], streamed: bool) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each request, and between tokens of all. The last response of a stream carries
    no text, only the counts; an answer that comes whole has one response."""
    first: list[float] = []
    between: list[float] = []
    for request in requests:
        times = [time / 1e9 for time in request["response_timestamps"]]
        texts = times[:-1] if streamed else times[:1]
        if texts:
            first.append(texts[0] - request["timestamp"] / 1e9)
            between += [later - earlier for earlier, later in itertools.pairwise(texts)]
    return first, between


def markdown(points: Sequence[Measured]) -> str:
    """One row per point."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    lines = [
        "| load | requests/s | turn p50 / p95 / p99, ms | first token p50 / p95, ms | between tokens p50 / p95, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in points:
        latency = " / ".join(ms(one.latency_ms[name]) for name in ("p50", "p95", "p99"))
        first, between = (f"{ms(q.p50)} / {ms(q.p95)}" for q in (one.ttft_ms, one.itl_ms))
        lines.append(f"| {one.point.label} | {one.requests_per_s:.2f} | {latency} | {first} | {between} |")
    return "\n".join(lines)


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [-1.0]
    if any(not 0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{name}: got {text!r}, expected numbers above 0 with commas between; correct it")
    return numbers


def points_of(args: argparse.Namespace) -> list[Point]:
    """Every load, whole and streamed. Raises ConfigError."""
    loads = [("concurrency", value) for value in _numbers("--concurrency", args.concurrency)]
    loads += [("request_rate", value) for value in _numbers("--rates", args.rates)]
    return [Point(mode, value, streamed) for streamed in (False, True) for mode, value in loads]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.load.perf_analyzer", description=__doc__)
    parser.add_argument("--url", help="HOST:PORT of a server's gRPC endpoint (start an own one)")
    add_engine_arguments(parser)
    parser.add_argument("--concurrency", default="1,2,4", help="requests at once (%(default)s)")
    parser.add_argument("--rates", default="0.5,1", help="requests per second, Poisson (%(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="of each point (%(default)s)")
    parser.add_argument("--words", type=int, default=100, help="of a prompt, about (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each point (%(default)s)")
    parser.add_argument("--binary", type=Path, default=BINARY, help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="print its version and end")
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "perf_analyzer", help="(%(default)s)")
    return parser


def _measure_all(args: argparse.Namespace, url: str, points: Sequence[Point]) -> list[Measured]:
    measured = []
    for point in points:
        measured.append(measure(args, url, point))
        print(f"{point.label}: {measured[-1].requests_per_s:.2f} requests/s", flush=True)
    return measured


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises CommitKVError."""
    if args.check:
        print(call(args.binary, ["--version"]).strip())
        return 0
    points = points_of(args)
    args.output.mkdir(parents=True, exist_ok=True)
    call(args.binary, ["--version"])  # before a server is started for nothing
    if args.url:
        measured = _measure_all(args, args.url, points)
    else:
        with own_server(args) as server:
            measured = _measure_all(args, server.grpc_url, points)
    table = markdown(measured)
    (args.output / "report.json").write_text(json.dumps([asdict(m) for m in measured], indent=1) + "\n", "utf-8")
    (args.output / "report.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nwritten: {args.output}/report.json, report.md, and perf_analyzer's own files")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
