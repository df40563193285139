"""`python -m perf.load.soak --minutes 10`: random clients against one server; nothing may break, grow or stay.

Exit code 0 only if no client saw an error that it did not provoke, the resident memory of the last third of the time is
within 3 % of the second third's, and at the end, with every conversation ended, the KV memory is empty.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from perf.load.command import add_server_arguments, exit_code, host_and_port, own_server, target_of, verdict
from perf.load.soak_actions import SoakClient
from perf.load.turn_stream import Requests, Target
from perf.server import REPO_ROOT
from runtime.errors import ConfigError

MIB = 2**20
RSS_TOLERANCE = 0.03
MOST_PROBLEMS = 50
IDLE_WAIT_S = 120.0


@dataclass(frozen=True)
class SoakOptions:
    """seconds: how long clients act.   server_pid: of a server on this machine, whose own memory counts too."""

    seconds: float
    clients: int = 8
    seed: int = 1
    sample_s: float = 1.0
    server_pid: int | None = None


@dataclass(frozen=True)
class Memory:
    """At `at_s`: resident bytes of the model's process and of the server, and the KV bytes that conversations hold."""

    at_s: float
    model_bytes: int
    server_bytes: int
    kv_bytes: int

    @property
    def resident_bytes(self) -> int:
        return self.model_bytes + self.server_bytes


@dataclass(frozen=True)
class SoakReport:
    """problems: what clients saw without having provoked it, the first of them.   left_behind: at the end, by name."""

    seconds: float
    actions: Mapping[str, int]
    num_problems: int
    problems: tuple[str, ...]
    second_third_mib: float
    last_third_mib: float
    left_behind: Mapping[str, int]

    @property
    def growth_ratio(self) -> float:
        return self.last_third_mib / self.second_third_mib - 1 if self.second_third_mib else 0.0

    @property
    def failures(self) -> tuple[str, ...]:
        """What the run has to be refused for."""
        found = []
        if self.num_problems:
            found.append(f"{self.num_problems} errors that no client provoked")
        if abs(self.growth_ratio) > RSS_TOLERANCE:
            found.append(f"resident memory changed by {self.growth_ratio:+.1%} from the second third to the last")
        found += [f"left behind: {count} {name}" for name, count in self.left_behind.items() if count]
        return tuple(found)


async def soak(target: Target, options: SoakOptions, http: tuple[str, int] | None) -> tuple[SoakReport, list[Memory]]:
    """Clients for `options.seconds`, then every conversation is ended and the server looked at."""
    async with Requests(target) as requests:
        clients = [SoakClient(requests, f"soak-{n}", options.seed, http) for n in range(options.clients)]
        memory: list[Memory] = []
        sampling = asyncio.create_task(_sample(requests, options, memory))
        begin = time.monotonic()
        found = await asyncio.gather(*(_live(client, begin + options.seconds) for client in clients))
        seconds = time.monotonic() - begin
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        left_behind = await end_and_look(requests, {name for client in clients for name in client.begun})
    problems = [problem for one in found for problem in one]
    report = SoakReport(
        seconds=seconds,
        actions=dict(sum((client.counts for client in clients), Counter[str]())),
        num_problems=len(problems),
        problems=tuple(problems[:MOST_PROBLEMS]),
        second_third_mib=_mean_mib(memory, seconds / 3, 2 * seconds / 3),
        last_third_mib=_mean_mib(memory, 2 * seconds / 3, seconds),
        left_behind=left_behind,
    )
    return report, memory


async def _live(client: SoakClient, until_s: float) -> list[str]:
    problems: list[str] = []
    while time.monotonic() < until_s and len(problems) < MOST_PROBLEMS:
        problems += await client.act()
    return problems


async def _sample(requests: Requests, options: SoakOptions, into: list[Memory]) -> None:
    begin = time.monotonic()
    server = None if options.server_pid is None else psutil.Process(options.server_pid)
    while True:
        report = (await requests.stats()).stats
        if report:
            own = 0 if server is None else int(server.memory_info().rss)
            model, kv_bytes = int(report["process"]["rss_bytes"]), int(report["engine"]["kv"]["used_bytes"])
            into.append(Memory(time.monotonic() - begin, model, own, kv_bytes))
        await asyncio.sleep(options.sample_s)


async def end_and_look(requests: Requests, conversations: Sequence[str] | set[str]) -> dict[str, int]:
    """Ends `conversations`, waits until the engine rests, and tells what it still holds; all zero is right."""
    await asyncio.gather(*(requests.end(name) for name in conversations))
    deadline = time.monotonic() + IDLE_WAIT_S
    engine: Mapping[str, Any] = {}
    while time.monotonic() < deadline:
        engine = (await requests.stats()).stats.get("engine", {})
        if engine and engine["idle"] and not engine["conversations"] and not engine["kv"]["used_bytes"]:
            break
        await asyncio.sleep(0.1)
    if not engine:
        return {"servers that report nothing": 1}
    return {
        "KV bytes": int(engine["kv"]["used_bytes"]),
        "conversations": int(engine["conversations"]),
        "running turns": int(engine["running"]),
        "waiting turns": int(engine["waiting"]),
    }


def _mean_mib(memory: Sequence[Memory], first_s: float, last_s: float) -> float:
    values = [sample.resident_bytes for sample in memory if first_s <= sample.at_s < last_s]
    return sum(values) / len(values) / MIB if values else 0.0


def text_of(report: SoakReport) -> str:
    """The report in lines."""
    actions = ", ".join(f"{count} {name}" for name, count in sorted(report.actions.items()))
    lines = [
        f"{report.seconds:.0f} s, {sum(report.actions.values())} actions: {actions}",
        f"errors that nobody provoked: {report.num_problems}",
        f"resident memory, MiB: second third {report.second_third_mib:.1f}, last third {report.last_third_mib:.1f} "
        f"({report.growth_ratio:+.2%})",
        "left behind: " + ", ".join(f"{count} {name}" for name, count in report.left_behind.items()),
        *(f"  {problem}" for problem in report.problems),
    ]
    return "\n".join(lines)


def _plot(path: Path, memory: Sequence[Memory]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    at_s = [sample.at_s for sample in memory]
    axes.plot(at_s, [sample.resident_bytes / MIB for sample in memory], label="resident memory, model and server")
    axes.plot(at_s, [sample.kv_bytes / MIB for sample in memory], label="KV held")
    axes.set_xlabel("s")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.load.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what clients do (%(default)s)")
    add_server_arguments(parser, kv_mib=512)
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "soak", help="(%(default)s)")
    return parser


def _report(args: argparse.Namespace) -> tuple[SoakReport, list[Memory]]:
    options = SoakOptions(60 * args.minutes, args.clients, args.seed)
    if args.url:
        http = host_and_port(args.http_url) if args.http_url else None
        return asyncio.run(soak(target_of(args.url, args), options, http))
    with own_server(args) as server:
        options = replace(options, server_pid=server.pid)
        return asyncio.run(soak(target_of(server.grpc_url, args), options, host_and_port(server.http_url)))


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises CommitKVError."""
    if not 0 < args.minutes < float("inf") or args.clients < 1:
        raise ConfigError(f"--minutes, --clients: got {args.minutes:g} and {args.clients}, expected more than 0")
    args.output.mkdir(parents=True, exist_ok=True)
    report, memory = _report(args)
    (args.output / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    _plot(args.output / "memory.png", memory)
    return verdict("soak", f"{text_of(report)}\nwritten: {args.output}/report.json, memory.png", report.failures)


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
