"""Where a step's time goes: `python -m perf.profile_step --context 4096 --policy commitkv`.

A conversation of `--context` tokens is read and, where the policy says so, probed and committed. Then a turn of
`--chunk` tokens comes, whose answer is decoded. The table shows medians over chunks and over decode steps of the time
that each operation took in all layers together; reading the clock adds about 0.1 ms per step.
`--idle 200`: beside so many others that are held, of a few tokens each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from builder.model import DecoderModel, Ops
from builder.recorded_step import Recorder
from perf.serve import DEFAULT_ENGINE
from perf.stepping import step
from perf.workload import CONVERSATIONS, load_conversation
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError
from runtime.executor_torch import TorchExecutor
from runtime.paged_executor import CommitForms
from runtime.request import Request, SamplingParams
from runtime.wiring import load_engine, load_tokenizer

Times = dict[str, float]
"""Operation -> ms."""


class Stopwatch:
    """Adds up the time of named calls."""

    def __init__(self) -> None:
        self._ns: defaultdict[str, int] = defaultdict(int)

    def wrap(self, name: str | Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed under `name`, or under what `name` makes of its arguments."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._ns[name if isinstance(name, str) else name(*args)] += time.perf_counter_ns() - started

        return timed

    def take(self) -> Times:
        """What was added up since the last time."""
        times = {name: ns / 1e6 for name, ns in self._ns.items()}
        self._ns.clear()
        return times


class _TimedOps:
    """`builder.model.Ops` that times every operation of another."""

    def __init__(self, ops: object, watch: Stopwatch) -> None:
        for name in (n for n in dir(Ops) if not n.startswith("_")):
            label: str | Callable[..., str] = name
            if name == "linear":
                label = self._linear_label
            setattr(self, name, watch.wrap(label, getattr(ops, name)))

    @staticmethod
    def _linear_label(_x: object, weight: str, _bias: str | None) -> str:
        return f"linear {weight.split('.')[-2]}"


class _TimedModel(DecoderModel):
    """Operations are timed where they run, or, of a step that is recorded, in what was written down."""

    def __init__(self, model: DecoderModel, watch: Stopwatch) -> None:
        super().__init__(model.spec)
        self._watch = watch

    def run(self, ops: Any) -> Any:
        return super().run(self._timed(ops))

    def hidden(self, ops: Any) -> Any:
        return super().hidden(self._timed(ops))

    def logits(self, ops: Any, hidden: Any) -> Any:
        return super().logits(self._timed(ops), hidden)

    def _timed(self, ops: Any) -> Any:
        if isinstance(ops, _TimedOps):
            return ops
        return (_TimedRecording if isinstance(ops, Recorder) else _TimedOps)(ops, self._watch)


class _TimedRecording(_TimedOps):
    """Puts the stopwatch on the calls that a recorder writes down."""

    def __init__(self, recorder: Recorder, watch: Stopwatch) -> None:
        def labelled(name: str) -> Callable[..., Any]:
            def record(*args: Any) -> Any:
                first = len(recorder.calls)
                result = getattr(recorder, name)(*args)
                label = self._linear_label(*args) if name == "linear" else name
                recorder.calls[first:] = [watch.wrap(label, call) for call in recorder.calls[first:]]
                return result

            return record

        for name in (n for n in dir(Ops) if not n.startswith("_")):
            setattr(self, name, labelled(name))


def watch_engine(engine: Engine) -> Stopwatch:
    """Puts a stopwatch on an engine. It reaches into its parts, which nobody else should see."""
    watch, executor = Stopwatch(), engine._executor
    assert isinstance(executor, TorchExecutor)
    decoder: Any = executor._decoder
    decoder.model = _TimedModel(decoder.model, watch)
    decoder._parts = replace(decoder._parts, model=decoder.model)
    decoder.forward = watch.wrap("model", decoder.forward)
    for name in ("run", "probe"):
        setattr(executor, name, watch.wrap(name, getattr(executor, name)))
    forms = executor._commit_forms
    executor._commit_forms = CommitForms(*(watch.wrap(n, getattr(forms, n)) for n in ("draw_line", "publish")))
    engine.step = watch.wrap("step", engine.step)  # type: ignore[method-assign]
    return watch


def own_shares(times: Times) -> Times:
    """Takes nested times apart: what the model, the executor and the engine add to what they call."""
    inner = {"model", "run", "step"}
    rest = {name: ms for name, ms in times.items() if name not in inner}
    model, run, step = (times.get(name, 0.0) for name in ("model", "run", "step"))
    rest["rotary, calls between operations"] = model - sum(rest.values())
    rest["tables, sampling"] = run - model
    rest["scheduling, settling, text"] = step - run
    rest["total"] = step
    return rest


def run_until_idle(engine: Engine, watch: Stopwatch, request: Request) -> list[tuple[int, Times]]:
    """Runs a turn and the idle work after it. Per engine step: tokens run, and the times."""
    engine.submit(request)
    steps: list[tuple[int, Times]] = []
    tokens = engine.stats().tokens
    while True:
        _, did_something = step(engine)
        before, tokens = tokens, engine.stats().tokens
        steps.append((tokens - before, watch.take()))
        if not did_something and not engine.has_turns():
            return steps


def filler(engine_dir: Path, num_tokens: int) -> str:
    """About `num_tokens` tokens of the demo conversations' text."""
    manifest = manifests.load(engine_dir, target="cpu", verify=False)
    tokenizer = load_tokenizer(engine_dir, manifest)
    paths = sorted(CONVERSATIONS.glob("*.jsonl"))
    text = "\n".join(turn.text for path in paths for turn in load_conversation(path).turns)
    tokens = len(tokenizer.encode(text, (0, 0))[0])
    text *= -(-num_tokens // tokens)
    return text[: len(text) * num_tokens // (tokens * -(-num_tokens // tokens))]


def medians(steps: list[Times]) -> Times:
    """Median of each operation, 0 in steps that lack it."""
    names = {name for step in steps for name in step}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def profile(options: argparse.Namespace) -> str:
    """The table, as text. Raises CommitKVError for an engine or numbers that do not go together."""
    # Commits between steps, or their time would hide among the operations of steps.
    config = RuntimeConfig(tokens_per_step=options.chunk, num_threads=options.threads, background_commits=False)
    engine = load_engine(options.engine, config, verify=False)
    watch = watch_engine(engine)
    history, chunk = (filler(options.engine, n) for n in (options.context, options.chunk))
    sampling = SamplingParams(max_tokens=1)
    for i in range(options.idle):
        run_until_idle(engine, watch, Request(f"idle-{i}", "Hello.", sampling, f"idle-{i}", policy=options.policy))
    first = run_until_idle(engine, watch, Request("history", history, sampling, "c", policy=options.policy))
    held = engine.kv_stats("c")
    sampling = SamplingParams(max_tokens=options.steps)
    second = run_until_idle(engine, watch, Request("turn", chunk, sampling, "c"))
    decode = medians([own_shares(times) for n, times in second if n == 1])
    largest = max(n for n, _ in second)
    prefill = medians([own_shares(times) for n, times in second if n == largest])
    names = sorted(decode, key=lambda name: (name == "total", -decode[name]))
    lines = [
        f"context {held.active + held.staged + held.committed + held.evicted} tokens, policy {options.policy}, "
        f"{held.kv_bytes / 2**20:.1f} MiB of KV; medians in ms",
        f"{'':34}{'decode':>9}{f'{largest} rows':>12}",
        *(f"{name:34}{decode[name]:9.2f}{prefill.get(name, 0.0):12.2f}" for name in names),
        "upkeep, ms per call (calls):",
    ]
    for name in ("probe", "draw_line", "publish"):
        calls = [times[name] for _, times in first + second if name in times]
        if calls:
            lines.append(f"{name:34}{statistics.median(calls):9.2f} ({len(calls)})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.profile_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens read before (%(default)s)")
    parser.add_argument("--policy", default="full", help="policy of the conversation (%(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="rows of a prefill chunk (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="decode steps (%(default)s)")
    parser.add_argument("--idle", type=int, default=0, help="other conversations that are held (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core (%(default)s)")
    options = parser.parse_args()
    for name in ("context", "chunk", "steps"):
        if getattr(options, name) < 2:
            print(f"--{name}: got {getattr(options, name)}, expected at least 2; raise it", file=sys.stderr)
            return 2
    try:
        print(profile(options))
    except CommitKVError as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
