"""`python -m perf.grouping`: would short and long conversations decode better in steps of their own?

They decode in one step (mixed), then the short ones alone, `--short-steps` times, then the long ones alone; and again.
(short + long) / mixed is the price of a token for everybody in two steps. out/grouping/grouping.json has every round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from perf.bench_engine import LEAST_TURN_TOKENS, SHORT_MESSAGE, BenchEngine, BenchText
from perf.bench_report import ratio_of_rounds
from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from runtime.config import RuntimeConfig
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.registry import get_policy

ROOM_TOKENS = 600  # beyond the conversations: for the turns that are measured
ROUNDS, CYCLES = 5, 6  # cycles of a round, besides the first, which warms up
KV_BYTES = 8 << 30  # taken only as it is used: nothing should be committed because of a bound on it
Group = tuple[int, int]  # so many conversations of so many tokens each


@dataclass(frozen=True)
class Row:
    """One policy. Milliseconds of a decode step, a median per round.   short_steps: for each step of the long ones."""

    policy: str
    short_steps: int
    mixed_ms: tuple[float, ...]
    short_ms: tuple[float, ...]
    long_ms: tuple[float, ...]

    @property
    def cost(self) -> float:
        """Time in which everybody gets one token: in two steps over in one, median of rounds."""
        return ratio_of_rounds([s + n for s, n in zip(self.short_ms, self.long_ms, strict=True)], self.mixed_ms)


def group_of(name: str, text: str) -> Group:
    """From COUNTxTOKENS. Raises ConfigError."""
    found = re.fullmatch(r"([1-9]\d{0,3})x(\d{2,6})", text)
    if found is None or int(found[2]) < LEAST_TURN_TOKENS:
        raise ConfigError(f"--{name}: got {text!r}, expected COUNTxTOKENS, at least 1x{LEAST_TURN_TOKENS}; write it so")
    return int(found[1]), int(found[2])


def step_ms(engine: BenchEngine, names: list[str]) -> float:
    """Of one decode step in which just these take part."""
    engine.choose(names)
    before, begin = engine.stats().tokens, time.perf_counter()
    engine.step()
    taken = 1e3 * (time.perf_counter() - begin)
    assert engine.stats().tokens - before == len(names), "a step that was not one token for each"
    return taken


def measure(engine: BenchEngine, policy: str, groups: tuple[Group, Group], short_steps: int) -> Row:
    """One policy; its conversations are ended."""
    short, long = ([f"{policy}, {tokens}, {index}" for index in range(count)] for count, tokens in groups)
    for names, (_, tokens) in zip((short, long), groups, strict=True):
        engine.grow(names[0], policy, tokens)
        for name in names[1:]:
            engine.clone(names[0], name)
    rounds = []
    for _ in tqdm(range(ROUNDS), desc=policy, unit="round", file=sys.stdout):
        ids, _, _ = engine.begin_turns(short + long, SHORT_MESSAGE)
        mixed, alone, longer = list[float](), list[float](), list[float]()
        for _ in range(CYCLES + 1):
            mixed.append(step_ms(engine, short + long))
            alone += [step_ms(engine, short) for _ in range(short_steps)]
            longer.append(step_ms(engine, long))
        engine.choose(short + long)
        engine.undo(ids)
        rounds.append([statistics.median(times) for times in (mixed[1:], alone[short_steps:], longer[1:])])
    for name in short + long:
        engine.end(name)
    return Row(policy, short_steps, *(tuple(column) for column in zip(*rounds, strict=True)))


def markdown(rows: Sequence[Row], groups: tuple[Group, Group]) -> str:
    """One row per policy."""
    (short, long), turns = (f"{count} x {tokens}" for count, tokens in groups), f"{rows[0].short_steps} : 1"
    lines = [
        f"| ms, medians | mixed: between tokens of all | {short} alone | {long} alone | (short + long) / mixed "
        f"| between tokens of the short, {turns} | of the long, {turns} |",
        "|---|" + "---:|" * 6,
    ]
    for row in rows:
        steps = [statistics.median(times) for times in (row.mixed_ms, row.short_ms, row.long_ms)]
        cycle = row.short_steps * steps[1] + steps[2]
        cells = (*(f"{ms:.1f}" for ms in steps), f"{row.cost:.2f}", f"{cycle / row.short_steps:.1f}", f"{cycle:.1f}")
        lines.append(f"| {row.policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Raises CommitKVError."""
    groups = (group_of("short", args.short), group_of("long", args.long))
    policies = [get_policy(name).name for name in args.policies.split(",")]
    if args.short_steps < 1 or groups[0][1] >= groups[1][1]:
        raise ConfigError(f"--short, --long, --short-steps: got {args.short}, {args.long}, {args.short_steps}; "
                          "expected fewer tokens for the short ones, and 1 step or more; correct them")  # fmt: skip
    count, longest = groups[0][0] + groups[1][0], groups[1][1]
    config = RuntimeConfig(kv_memory_bytes=KV_BYTES, num_threads=args.threads)
    engine = BenchEngine(args.engine, config, BenchText(args.engine, longest + ROOM_TOKENS))
    most, most_tokens = engine.limits.max_batch_size, engine.limits.max_seq_len - ROOM_TOKENS
    if count > most or longest > most_tokens:
        raise ConfigError(f"--short, --long: got {count} conversations of up to {longest} tokens, expected at most "
                          f"{most} of {most_tokens} for this engine; ask for less")  # fmt: skip
    rows = [measure(engine, policy, groups, args.short_steps) for policy in policies]
    name = f"{engine.spec.name}, {engine.limits.dtype}, threads: {engine.num_threads}"
    report = {"engine": name, "groups": groups, "rows": [asdict(row) | {"cost": row.cost} for row in rows]}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "grouping.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{name}\n\n{markdown(rows, groups)}\n\nwritten: {args.output}/grouping.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.grouping", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--policies", default="full,commitkv", help="between commas (%(default)s)")
    add("--short", default="4x512", help="conversations x tokens (%(default)s)")
    add("--long", default="4x4096", help="conversations x tokens (%(default)s)")
    add("--short-steps", type=int, default=1, help="of the short ones for each of the long ones (%(default)s)")
    add("--threads", type=int, default=0, help="0: one per core (%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "grouping", help="(%(default)s)")
    try:
        run(parser.parse_args(argv))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
