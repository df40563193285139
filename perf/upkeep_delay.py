"""`python -m perf.upkeep_delay`: who waits for probes and commits, and for how long.

A new request, until idle work gives way: conversations of about `--context` tokens are held, each without a pause, so
that much of it is left to be re-read and compressed. While that is done, requests of others come at random moments.
Their delay is the time from arrival to the step that runs them.

The tokens of others, beside a commit: while one conversation answers, others end their turns, and each is committed as
a whole, by quantizing it, which writes most. The longest pause between two tokens of the answer around such an end is
compared with that where nothing is committed.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.bench_engine import BenchText
from perf.serve import DEFAULT_ENGINE
from perf.stepping import rest, step
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, ConfigError
from runtime.loop import EngineLoop
from runtime.policy.policy_file import add_policy
from runtime.policy.registry import get_policy
from runtime.policy.variants import with_changes
from runtime.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams
from runtime.wiring import load_parts

TURN_TOKENS = 1000
SHORT_TURN = 64
LONGEST_PAUSE_S = 0.25  # between a request's end and the next one
IDLE_S = 0.5  # without work for so long: there is none left
PROBE, COMMIT = "probe", "commit"
FULL, BETWEEN, ASIDE = "nothing is committed", "written between steps", "written by another thread"
TOKENS_AFTER = 8  # of the answer, behind a turn's end: a commit begins within them


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


def measure_delays(engine_dir: Path, config: RuntimeConfig, context: int, num_requests: int) -> dict[str, list[float]]:
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


class Answering:
    """One conversation that answers for as long as it is stepped, and others that end turns beside it."""

    def __init__(self, engine_dir: Path, config: RuntimeConfig, context: int, num_turns: int, commits: bool) -> None:
        """Holds the others, one turn away from `context` tokens. Raises CommitKVError."""
        self._engine = Engine(load_parts(engine_dir, config, verify=False))
        self._engine._eos = ()  # the answer goes on for as long as it is measured
        self._text = BenchText(engine_dir, context + 2 * SHORT_TURN)
        self._context = context
        changes = {"schedule.min_tokens": context}
        committed = replace(with_changes(get_policy("quantize-int8"), changes), name="upkeep-delay")
        add_policy(committed)
        self._policy = committed.name if commits else "full"
        for number in range(num_turns):
            self._turn(f"c{number}", self._text.piece(0, context - SHORT_TURN))
            rest(self._engine)

    def pauses(self, num_turns: int) -> list[float]:
        """Longest pause in ms between two tokens of the answer, around the end of each of the others' turns."""
        sampling = SamplingParams(max_tokens=num_turns * 10 * TOKENS_AFTER)
        self._engine.submit(Request("answer", "Tell me everything.", sampling, "answer", policy="full"))
        found = []
        for number in range(num_turns):
            self._turn(f"c{number}", self._text.piece(self._context - SHORT_TURN, 2 * SHORT_TURN))
            while not any(isinstance(event, FinishEvent) for event in step(self._engine)[0]):
                pass
            ends = [time.perf_counter()]
            while len(ends) <= TOKENS_AFTER:
                before = self._engine.stats().generated_tokens
                step(self._engine)
                if self._engine.stats().generated_tokens > before:
                    ends.append(time.perf_counter())
            found.append(1e3 * max(b - a for a, b in pairwise(ends)))
        return found

    def close(self) -> None:
        self._engine.close(1.0)

    def _turn(self, name: str, text: str) -> None:
        request = Request(f"{name} {len(text)}", text, SamplingParams(max_tokens=1), name, policy=self._policy)
        self._engine.submit(request)


def measure_pauses(engine_dir: Path, config: RuntimeConfig, context: int, num_turns: int) -> dict[str, list[float]]:
    """Pauses in ms by what happens to the others' caches. Raises CommitKVError."""
    found = {}
    for name in tqdm((FULL, BETWEEN, ASIDE), unit="engine", file=sys.stdout):
        chosen = replace(config, background_commits=name == ASIDE)
        answering = Answering(engine_dir, chosen, context, num_turns, commits=name != FULL)
        found[name] = answering.pauses(num_turns)
        answering.close()
    return found


def table(what: str, times: dict[str, list[float]]) -> str:
    """Markdown."""
    lines = [f"| {what} | times | p50, ms | p95, ms | most, ms |", "|---|---|---|---|---|"]
    for name, ms in times.items():
        if ms:
            p95 = ms[0] if len(ms) == 1 else statistics.quantiles(ms, n=20, method="inclusive")[-1]
            lines.append(f"| {name} | {len(ms)} | {statistics.median(ms):.1f} | {p95:.1f} | {max(ms):.1f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.upkeep_delay", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--context", type=int, default=4096, help="tokens of a conversation (%(default)s)")
    add("--requests", type=int, default=200, help="during idle work (%(default)s)")
    add("--turns", type=int, default=8, help="that end beside an answer (%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    add("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")
    args = parser.parse_args(argv)
    try:
        for name in ("context", "requests", "turns", "kv_mib"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
        config = RuntimeConfig(kv_memory_bytes=args.kv_mib << 20, num_threads=args.threads)
        delays = measure_delays(args.engine, config, args.context, args.requests)
        pauses = measure_pauses(args.engine, config, args.context, args.turns)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nconversations of {args.context} tokens\n\n{table('a new request while there is a', delays)}")
    print(f"\n{table('longest pause of an answer while of another conversation', pauses)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
