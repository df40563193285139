"""`python -m perf.probe_delay`: how long a new request waits until idle work gives way.

Conversations of about `--context` tokens are held, each without a pause, so that much of it is left to be re-read and
compressed. While that is done, requests of others come at random moments. Their delay is the time from arrival to the
step that runs them.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.bench_engine import BenchText
from perf.serve import DEFAULT_ENGINE
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, ConfigError
from runtime.loop import EngineLoop
from runtime.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams
from runtime.wiring import load_parts

TURN_TOKENS = 1000
LONGEST_PAUSE_S = 0.25  # between a request's end and the next one
IDLE_S = 0.5  # without work for so long: there is none left
PROBE, COMMIT = "probe", "commit"


class Work:
    """What the engine's thread does between steps, as others see it."""

    def __init__(self, engine: Engine) -> None:
        """Watches an engine. It reaches into its parts, which nobody else should see."""
        self.now: str | None = None
        upkeep: Any = engine._upkeep
        upkeep.probe = self._watched(PROBE, upkeep.probe)
        upkeep.commit = self._watched(COMMIT, upkeep.commit)

    def _watched(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            self.now = name
            try:
                call(*args)
            finally:
                self.now = None

        return watched

    def wait(self) -> bool:
        """Waits for idle work; False if none comes."""
        end = time.monotonic() + IDLE_S
        while self.now is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        return True


class Requests:
    """One request at a time through a loop."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._count = 0

    def run(self, text: str, conversation_id: str | None = None) -> float:
        """Runs a turn of one token; milliseconds from its arrival to its first step. Raises CommitKVError."""
        self._count += 1
        request = Request(str(self._count), text, SamplingParams(max_tokens=1), conversation_id)
        self._loop.submit(request, self._events.put)
        while True:
            event = self._events.get()
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, FinishEvent):
                return (event.stats.first_scheduled_ns - event.stats.arrival_ns) / 1e6


def measure(engine_dir: Path, config: RuntimeConfig, context: int, num_requests: int) -> dict[str, list[float]]:
    """Delays in ms by what was going on when a request came. Raises CommitKVError."""
    engine = Engine(load_parts(engine_dir, config, verify=False))
    text, work, chance = BenchText(engine_dir, context), Work(engine), random.Random(0)
    loop = EngineLoop(engine)
    requests = Requests(loop)
    delays: dict[str, list[float]] = {PROBE: [], COMMIT: []}
    held = 0
    try:
        with tqdm(total=num_requests, unit="request", file=sys.stdout) as bar:
            while bar.n < num_requests:
                if not work.wait():
                    hold(requests, text, f"c{held}", context)
                    if held:
                        loop.end_conversation(f"c{held - 1}")
                    held += 1
                    continue
                time.sleep(chance.uniform(0.0, LONGEST_PAUSE_S))
                doing = work.now
                delay = requests.run("Hello.")
                if doing is not None:
                    delays[doing].append(delay)
                    bar.update()
    finally:
        loop.close(grace_s=1.0)
    return delays


def hold(requests: Requests, text: BenchText, name: str, num_tokens: int) -> None:
    """Turns one after the other, up to about `num_tokens`. Raises CommitKVError."""
    for start in range(0, num_tokens - TURN_TOKENS // 2, TURN_TOKENS):
        requests.run(text.piece(start, TURN_TOKENS), name)


def table(delays: dict[str, list[float]]) -> str:
    """Markdown."""
    lines = ["| while | requests | p50, ms | p95, ms | most, ms |", "|---|---|---|---|---|"]
    for name, ms in delays.items():
        if len(ms) > 1:
            p95 = statistics.quantiles(ms, n=20, method="inclusive")[-1]
            lines.append(f"| {name} | {len(ms)} | {statistics.median(ms):.1f} | {p95:.1f} | {max(ms):.1f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.probe_delay", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--context", type=int, default=4096, help="tokens of a conversation (%(default)s)")
    add("--requests", type=int, default=200, help="(%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    add("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")
    args = parser.parse_args(argv)
    try:
        for name in ("context", "requests", "kv_mib"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
        config = RuntimeConfig(kv_memory_bytes=args.kv_mib << 20, num_threads=args.threads)
        delays = measure(args.engine, config, args.context, args.requests)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nconversations of {args.context} tokens, requests at random moments of idle work:\n\n{table(delays)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
