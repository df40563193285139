"""`python -m perf.bench`: decode and prefill over context, batch and policy, beside what else a CPU user could run.

Conversations are held turn by turn, committed while idle, then measured; every system takes its turn in every round.
Peers: transformers with DynamicCache and QuantizedCache on the engine's own weights, torch's attention alone, and
llama.cpp on the GGUF (`make peers` installs what it needs). Written to out/bench: bench.json, bench.md, two plots.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from builder.default_model import GGUF_NAME
from perf.bench_engine import BenchEngine, BenchText, Decoded, PolicySystem
from perf.bench_peers import (
    LlamaCppSystem,
    SdpaSystem,
    System,
    TransformersSystem,
)
from perf.bench_report import Machine, Report, Row, fits, markdown, plots, ratio_of_rounds, slopes
from perf.peer_model import PeerMissingError, PeerModel, transformers_model
from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from runtime.config import RuntimeConfig
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.registry import get_policy

FULL = "full"
POLICIES = ("full", "commitkv", "quantize-int8")
SPIN_SETTING = "GOMP_SPINCOUNT"
PREFILL_TOKENS = 512
ROOM_TOKENS = 600  # beyond the longest context: for the turns that are measured
PEERS_PYTHON = REPO_ROOT / ".venv-peers" / "bin" / "python"


@dataclass(frozen=True)
class Grid:
    """What is measured.

    budget_s: bound on one system's decode steps in one round.   peer_batch: most conversations that peers run.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    steps: int
    budget_s: float
    prefill_rounds: int
    peer_batch: int = 1 << 10


QUICK = Grid((512, 4096), (1, 8), rounds=3, steps=7, budget_s=1.5, prefill_rounds=1, peer_batch=1)
WHOLE = Grid((512, 2048, 4096, 7000), (1, 4, 8, 16), rounds=5, steps=9, budget_s=3.0, prefill_rounds=3)


class Bandwidth:
    """Bytes per second that torch's sum reads from memory; the best of many, since other work only takes from it."""

    def __init__(self, num_bytes: int = 128 << 20) -> None:
        self._memory = torch.ones(num_bytes // 4)
        self.samples: list[float] = []

    def sample(self) -> None:
        for _ in range(8):
            begin = time.perf_counter()
            self._memory.sum()
            self.samples.append(self._memory.nbytes / (time.perf_counter() - begin))

    @property
    def bytes_per_s(self) -> float:
        return max(self.samples)


@dataclass(frozen=True)
class Measured:
    """One system at one point, round by round; the first step of a round only warms up."""

    system: System
    decoded: list[Decoded]
    prefill: list[float]
    turn_share: list[float]

    @property
    def round_ms(self) -> list[float]:
        return [statistics.median(d.step_ms[1:]) for d in self.decoded]

    def row(self, context: int, batch: int, full: Measured | None) -> Row:
        system = self.system
        busy = sum(d.busy_ms for d in self.decoded)
        comparable = full is not None and not system.only_attention
        return Row(
            system=system.name,
            context=context,
            batch=batch,
            step_ms=statistics.median(self.round_ms),
            to_full=ratio_of_rounds(self.round_ms, full.round_ms) if full is not None and comparable else None,
            prefill_tokens_per_s=statistics.median(self.prefill) if self.prefill else None,
            kv_bytes=system.kv_bytes,
            weight_bytes=system.weight_bytes,
            manager_ratio=sum(d.manager_ms for d in self.decoded) / busy if busy else None,
            commit_ratio=self.turn_share[0] if self.turn_share else None,
            only_attention=system.only_attention,
        )


def measure(systems: Sequence[System], context: int, batch: int, grid: Grid, memory: Bandwidth) -> list[Row]:
    """Rows of one context and batch."""
    own = [system for system in systems if isinstance(system, PolicySystem) or batch <= grid.peer_batch]
    here = [Measured(system, [], [], []) for system in own if system.holds(context, batch)]
    for m in here:
        m.system.begin(context, batch)
    for number in range(grid.rounds):
        memory.sample()
        for m in here:
            m.decoded.append(m.system.decode(grid.steps, grid.budget_s))
        for m in here if number < grid.prefill_rounds else ():
            rate = m.system.prefill(PREFILL_TOKENS)
            if rate is not None:
                m.prefill.append(rate)
    for m in here:
        if batch == 1 and isinstance(m.system, PolicySystem):
            m.turn_share.append(m.system.turn_share())
    full = next((m for m in here if m.system.name == FULL), None)
    rows = [m.row(context, batch, full) for m in here]
    for m in here:
        m.system.end()
    return rows


def make_peers(model: PeerModel, gguf: Path, quick: bool) -> tuple[list[System], list[str]]:
    """The peers that run here, and why the others do not."""
    systems: list[System] = [SdpaSystem(model)]
    skipped: list[str] = []
    makers: list[Callable[[], System]] = []
    try:
        decoder = transformers_model(model)
        makers.append(lambda: TransformersSystem(model, decoder))
        if not quick:
            makers.append(lambda: TransformersSystem(model, decoder, "quanto"))
    except PeerMissingError as error:
        skipped.append(str(error))
    makers.append(lambda: LlamaCppSystem(model, PEERS_PYTHON, gguf, "f16"))
    if not quick:
        makers.append(lambda: LlamaCppSystem(model, PEERS_PYTHON, gguf, "q8_0"))
    for make in makers:
        try:
            systems.append(make())
        except PeerMissingError as error:
            skipped += [str(error)] if str(error) not in skipped else []
    if quick:
        skipped.append("--quick leaves out transformers' QuantizedCache and llama.cpp with q8_0 KV")
    return systems, skipped


def bench(args: argparse.Namespace) -> Report:
    """Raises CommitKVError."""
    grid, policies = _grid(args), [get_policy(name).name for name in args.policies.split(",")]
    started, load_before = time.monotonic(), os.getloadavg()[0]
    text = BenchText(args.engine, max(grid.contexts) + ROOM_TOKENS)
    # Only what is written takes memory, and nothing should be committed because of a bound on it.
    config = RuntimeConfig(kv_memory_bytes=args.kv_mib << 20, num_threads=args.threads)
    engine = BenchEngine(args.engine, config, text)
    model = PeerModel(args.engine, engine.spec, engine.limits.dtype, text.tokens, engine.num_threads)
    if max(grid.contexts) + ROOM_TOKENS > engine.limits.max_seq_len:
        raise ConfigError(
            f"--contexts: got {max(grid.contexts)}, expected at most {engine.limits.max_seq_len - ROOM_TOKENS} for "
            f"this engine; shorten it"
        )
    peers, skipped = ([], []) if args.no_peers else make_peers(model, args.gguf, args.quick)
    systems: list[System] = [*(PolicySystem(engine, policy) for policy in policies), *peers]
    memory, rows = Bandwidth(), list[Row]()
    try:
        with tqdm(total=len(grid.contexts) * len(grid.batches), unit="point", file=sys.stdout) as bar:
            for context in grid.contexts:
                for batch in grid.batches:
                    bar.set_description(f"context {context}, batch {batch}")
                    rows += measure(systems, context, batch, grid, memory)
                    bar.update()
    finally:
        for system in systems:
            system.close()
    cores = len(os.sched_getaffinity(0))
    machine = Machine(
        _processor(), cores, engine.num_threads, memory.bytes_per_s / 1e9,
        load_before, os.getloadavg()[0], time.monotonic() - started,
    )  # fmt: skip
    versions = {system.name: system.version for system in peers if isinstance(system, LlamaCppSystem)}
    name = f"{engine.spec.name}, {engine.limits.dtype}"
    return Report(name, machine, tuple(rows), slopes(rows, FULL), fits(rows), tuple(skipped), versions)


def _grid(args: argparse.Namespace) -> Grid:
    grid = QUICK if args.quick else WHOLE

    def numbers(name: str, default: tuple[int, ...], least: int) -> tuple[int, ...]:
        value = getattr(args, name)
        try:
            found = tuple(sorted({int(part) for part in value.split(",")})) if value else default
        except ValueError:
            found = (least - 1,)
        if found[0] < least:
            raise ConfigError(f"--{name}: got {value!r}, expected whole numbers of at least {least} between commas")
        return found

    contexts, batches = numbers("contexts", grid.contexts, 64), numbers("batches", grid.batches, 1)
    return replace(grid, contexts=contexts, batches=batches)


def _processor() -> str:
    """Its name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.bench", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--quick", action="store_true", help="fewer contexts, batches, rounds and peers: a few minutes")
    add("--contexts", help=f"tokens, between commas ({','.join(map(str, WHOLE.contexts))})")
    add("--batches", help=f"between commas ({','.join(map(str, WHOLE.batches))})")
    add("--policies", default=",".join(POLICIES), help="between commas (%(default)s)")
    add("--gguf", type=Path, default=REPO_ROOT / "models" / GGUF_NAME, help="for llama.cpp (%(default)s)")
    add("--no-peers", action="store_true", help="our engine only")
    add("--kv-mib", type=int, default=8192, help="bound on KV memory, taken only as it is used (%(default)s)")
    add("--threads", type=int, default=0, help="of every system; 0: one per core (%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "bench", help="(%(default)s)")
    return parser


def write(report: Report, directory: Path) -> list[Path]:
    """bench.json, bench.md and the plots."""
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = asdict(report)
    for row, values in zip(report.rows, data["rows"], strict=True):
        bytes_per_s = 1e9 * report.machine.read_gb_per_s
        floor = {"floor_ms": row.floor_ms(bytes_per_s), "distance": row.distance(bytes_per_s)}
        values |= {"tokens_per_s": row.tokens_per_s, **floor}
    (directory / "bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (directory / "bench.md").write_text(markdown(report) + "\n", encoding="utf-8")
    return [directory / "bench.json", directory / "bench.md", *plots(report, directory)]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        report = bench(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    written = write(report, args.output)
    print(f"\n{markdown(report)}\n\nwritten: {', '.join(map(str, written))}")
    return 0


def let_threads_sleep() -> None:
    """Starts this command again with OpenMP's waiting threads soon asleep, as our server runs, unless the user chose.

    On a shared machine a thread that spins takes the core that the other one needs: transformers then took 2.3 s per
    step instead of 0.12 s. OpenMP reads the setting when torch is imported, so it has to be there before. PATH gets
    the environment's programs: the QuantizedCache backend looks for ninja there.
    """
    if SPIN_SETTING not in os.environ:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, SPIN_SETTING: "1000", "PATH": path}
        os.execve(sys.executable, [sys.executable, "-m", "perf.bench", *sys.argv[1:]], environment)


if __name__ == "__main__":
    let_threads_sleep()
    sys.exit(main())
