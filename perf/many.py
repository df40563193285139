"""`python -m perf.many`: many conversations at once, `full` against a policy: throughput, memory, KV bytes."""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.client import Chat, TurnOptions, TurnResult, engine_stats, wait_idle
from perf.serve import add_engine_arguments, server_options
from perf.server import REPO_ROOT, TritonServer
from runtime.errors import CommitKVError, ConfigError

MIB = 2**20
WORD_TEXT = (
    "alder anchor arrow basin beacon birch bridge bronze candle canyon cedar chart cliff clock cloud copper coral "
    "cotton crane delta ember engine falcon fern ferry field flint forest garden gate glacier granite harbor hazel "
    "hill island ivory jasper kettle lake lantern ledger lemon linen lotus maple marble meadow mill mirror moss "
    "needle north oak ocean olive orchard otter paper pearl pine planet pond poplar quarry quartz raven ribbon river "
    "saddle sail salt sand shore silver slate spruce stone storm summer temple thistle timber tower valley velvet "
    "violet walnut water willow winter yard"
)
WORDS = WORD_TEXT.split()


@dataclass(frozen=True)
class ManyRun:
    """What a policy took for the same conversations. Bytes are of all conversations together.

    kv_bytes_peak, rss_bytes_peak: highest of samples taken while the turns ran; kv_bytes_end: after idle work.
    """

    policy: str
    conversations: int
    tokens_each: float
    seconds: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    kv_bytes_peak: int
    kv_bytes_end: int
    kv_full_bytes: int
    rss_bytes_start: int
    rss_bytes_peak: int
    rss_bytes_end: int
    manager_time_ratio: float


def message(seed: int, num_words: int) -> str:
    """A report-like message of plain words; the same seed gives the same text."""
    words = random.Random(seed)
    sentences = []
    while num_words > 0:
        length = min(num_words, words.randint(7, 14))
        sentences.append(" ".join(words.choice(WORDS) for _ in range(length)).capitalize() + ".")
        num_words -= length
    return " ".join(sentences) + " What comes to mind?"


class Sampler:
    """Asks the server for its state a few times a second, and keeps the highest figures."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.kv_bytes = 0
        self.rss_bytes = 0

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            try:
                report = engine_stats(self._url)
            except CommitKVError:
                return
            self.kv_bytes = max(self.kv_bytes, int(report["engine"]["total_kv_bytes"]))
            self.rss_bytes = max(self.rss_bytes, int(report["process"]["rss_bytes"]))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Load:
    """turn_tokens: prompt and answer of one turn, about."""

    conversations: int
    tokens: int
    turn_tokens: int = 500
    answer_tokens: int = 40

    @property
    def turns(self) -> int:
        return max(1, round(self.tokens / self.turn_tokens))


def _talk(url: str, policy: str, index: int, load: Load, bar: tqdm[Any]) -> tuple[Chat, list[TurnResult]]:
    chat = Chat(url, f"many-{policy}-{index}", policy)
    results = []
    # One word of the list is about 1.24 tokens, punctuation included.
    num_words = round((load.tokens / load.turns - load.answer_tokens) / 1.24)
    for turn in range(load.turns):
        text = message(1000 * index + turn, num_words)
        results.append(chat.turn(text, TurnOptions(max_tokens=load.answer_tokens)))
        bar.update()
    return chat, results


def run_many(args: argparse.Namespace, policy: str, load: Load) -> ManyRun:
    """All conversations at once on a fresh server. Raises CommitKVError."""
    log = args.output / f"server-{policy}.log"
    with TritonServer(server_options(args.engine, args.kv_mib, args.threads, policy, log)) as server:
        url = server.grpc_url
        start = engine_stats(url)
        with (
            tqdm(total=load.conversations * load.turns, desc=f"{policy:>10}", unit="turn", file=sys.stdout) as bar,
            Sampler(url) as peak,
            ThreadPoolExecutor(load.conversations) as pool,
        ):
            begin = time.monotonic()
            talks = [pool.submit(_talk, url, policy, index, load, bar) for index in range(load.conversations)]
            done = [talk.result() for talk in talks]
            seconds = time.monotonic() - begin
        wait_idle(url, args.think_s)
        end = engine_stats(url)
        turns = [result.stats["turn"] for _, results in done for result in results]
    return _figures(policy, load, seconds, turns, (start, end, peak))


def _figures(
    policy: str,
    load: Load,
    seconds: float,
    turns: list[Mapping[str, Any]],
    states: tuple[Mapping[str, Any], Mapping[str, Any], Sampler],
) -> ManyRun:
    start, end, peak = states
    prompt = sum(int(turn["prompt_tokens"]) for turn in turns)
    generated = sum(int(turn["generated_tokens"]) for turn in turns)
    return ManyRun(
        policy=policy,
        conversations=load.conversations,
        tokens_each=(prompt + generated) / load.conversations,
        seconds=seconds,
        prompt_tokens_per_s=prompt / seconds,
        generated_tokens_per_s=generated / seconds,
        kv_bytes_peak=max(peak.kv_bytes, int(end["engine"]["total_kv_bytes"])),
        kv_bytes_end=int(end["engine"]["total_kv_bytes"]),
        kv_full_bytes=int(end["engine"]["full_kv_bytes"]),
        rss_bytes_start=int(start["process"]["rss_bytes"]),
        rss_bytes_peak=max(peak.rss_bytes, int(end["process"]["rss_bytes"])),
        rss_bytes_end=int(end["process"]["rss_bytes"]),
        manager_time_ratio=float(end["engine"]["manager_time_ratio"]),
    )


def markdown(runs: list[ManyRun]) -> str:
    """The comparison as a Markdown table, one column per policy."""
    rows: list[tuple[str, list[str]]] = [
        ("tokens per conversation", [f"{run.tokens_each:.0f}" for run in runs]),
        ("seconds", [f"{run.seconds:.0f}" for run in runs]),
        (
            "tokens/s, prompt + generated",
            [f"{run.prompt_tokens_per_s + run.generated_tokens_per_s:.1f}" for run in runs],
        ),
        ("generated tokens/s", [f"{run.generated_tokens_per_s:.1f}" for run in runs]),
        ("KV at the peak, MiB", [f"{run.kv_bytes_peak / MIB:.1f}" for run in runs]),
        ("KV at the end, MiB", [f"{run.kv_bytes_end / MIB:.1f}" for run in runs]),
        ("resident memory before, MiB", [f"{run.rss_bytes_start / MIB:.0f}" for run in runs]),
        ("resident memory at the peak, MiB", [f"{run.rss_bytes_peak / MIB:.0f}" for run in runs]),
        ("resident memory at the end, MiB", [f"{run.rss_bytes_end / MIB:.0f}" for run in runs]),
        ("manager's share of busy time", [f"{run.manager_time_ratio:.1%}" for run in runs]),
    ]
    head = f"| {runs[0].conversations} conversations at once | {' | '.join(run.policy for run in runs)} |"
    lines = [head, "|---|" + "---:|" * len(runs)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in rows)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.many", description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--conversations", type=int, default=8, help="at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=3000, help="of each conversation, about (%(default)s)")
    parser.add_argument("--policy", default="commitkv", help="policy to set against full (%(default)s)")
    parser.add_argument(
        "--think-s", type=float, default=120.0, help="longest wait for idle work at the end (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "many", help="(%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        for name, low in (("conversations", 1), ("tokens", 100)):
            if getattr(args, name) < low:
                raise ConfigError(f"--{name}: got {getattr(args, name)}, expected at least {low}; pass a larger number")
        load = Load(args.conversations, args.tokens)
        args.output.mkdir(parents=True, exist_ok=True)
        runs = [run_many(args, policy, load) for policy in ("full", args.policy)]
        (args.output / "report.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", "utf-8")
        (args.output / "report.md").write_text(markdown(runs) + "\n", encoding="utf-8")
        print(f"\n{markdown(runs)}\n\nwritten: {args.output}/report.json, report.md")
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the server is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
