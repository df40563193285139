"""`python -m perf.ending_together`: what it helps to commit the turns that end together as one batch.

Conversations of about `--context` tokens end a turn in the same step, each its first that is long enough to be
compressed, while another conversation answers. Their commits begin at once, or one after the other as with batches of
one; both take turns, round by round. Timed from the turns' end until the last commit is settled: commits per second,
step boundaries, and what the answer loses: the time of its steps beyond what they take with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from perf.bench_engine import BenchEngine, BenchText
from perf.serve import DEFAULT_ENGINE
from runtime import maintenance
from runtime.config import RuntimeConfig
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.policy_file import add_policy
from runtime.policy.registry import get_policy
from runtime.policy.variants import with_changes

LAST_TURN = 64
ALONE_STEPS = 20
SOURCE, ANSWER = "source", "answer"


@dataclass(frozen=True)
class Round:
    """boundaries: steps until all was settled.   step_ms: of each of them.   alone_ms: of a step with nothing else."""

    seconds: float
    step_ms: tuple[float, ...]
    alone_ms: float

    @property
    def boundaries(self) -> int:
        return len(self.step_ms)

    @property
    def lost_ms(self) -> float:
        return sum(self.step_ms) - self.alone_ms * len(self.step_ms)


class Together:
    """An engine with one conversation that answers and one that is copied for every round."""

    def __init__(self, engine_dir: Path, config: RuntimeConfig, policy: str, context: int) -> None:
        """Raises CommitKVError."""
        self._context = context
        self._bench = BenchEngine(engine_dir, config, BenchText(engine_dir, context + LAST_TURN))
        late = replace(with_changes(get_policy(policy), {"schedule.min_tokens": context}), name="ending-together")
        if late.probe:
            raise ConfigError(f"--policy: {policy} re-reads text before it commits it, expected one that does not")
        add_policy(late)
        self._bench.grow(SOURCE, late.name, context - LAST_TURN)
        self._bench.grow(ANSWER, "full", LAST_TURN)

    def round(self, num_conversations: int, most_commits: int) -> Round:
        """Raises CommitKVError."""
        names = [f"c{i}" for i in range(num_conversations)]
        for name in names:
            self._bench.clone(SOURCE, name)
        answer, _, _ = self._bench.begin_turns([ANSWER], "Tell me everything.")
        alone_ms = statistics.median(_step_ms(self._bench.step) for _ in range(ALONE_STEPS))
        maintenance.MOST_COMMITS, before = most_commits, maintenance.MOST_COMMITS
        self._bench.end_turns(names, self._bench.message(2 * LAST_TURN))
        num_commits, times = self._bench.stats().commits, []
        while self._bench.stats().commits < num_commits + num_conversations:
            times.append(_step_ms(self._bench.step))
        maintenance.MOST_COMMITS = before
        self._bench.undo(answer)
        for name in names:
            self._bench.end(name)
        return Round(sum(times) / 1e3, tuple(times), alone_ms)


def _step_ms(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - started)


def table(found: dict[int, list[Round]], num_conversations: int) -> str:
    """Markdown, medians over rounds; the last column is the batch over one by one."""
    rows: list[tuple[str, Callable[[Round], float]]] = [
        ("commits per second", lambda r: num_conversations / r.seconds),
        ("step boundaries", lambda r: r.boundaries),
        ("step with nothing else, ms", lambda r: r.alone_ms),
        ("step meanwhile, ms", lambda r: statistics.median(r.step_ms)),
        ("longest step, ms", lambda r: max(r.step_ms)),
        ("lost by the answer per commit, ms", lambda r: r.lost_ms / num_conversations),
    ]
    names = ["one by one" if most == 1 else f"at once, up to {most}" for most in found]
    lines = [f"| {num_conversations} turns end together | {' | '.join(names)} | ratio |", "|---|---:|---:|---:|"]
    for name, figure in rows:
        values = [statistics.median(map(figure, rounds)) for rounds in found.values()]
        ratio = f"{values[-1] / values[0]:.2f}" if values[0] > 0 else ""
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} | {ratio} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.ending_together", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--policy", default="snapkv", help="that commits at turn end without probes (%(default)s)")
    add("--context", type=int, default=2048, help="tokens of a conversation (%(default)s)")
    add("--conversations", type=int, default=6, help="that end turns together (%(default)s)")
    add("--rounds", type=int, default=5, help="of each kind (%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    add("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")
    args = parser.parse_args(argv)
    try:
        for name, least in (("context", 4 * LAST_TURN), ("conversations", 2), ("rounds", 1), ("kv_mib", 1)):
            if getattr(args, name) < least:
                given = name.replace("_", "-")
                raise ConfigError(f"--{given}: got {getattr(args, name)}, expected at least {least}; raise it")
        tokens = 4 * LAST_TURN * args.conversations  # the turns are read in one step, so that they end in one
        config = RuntimeConfig(args.kv_mib << 20, num_threads=args.threads, tokens_per_step=tokens)
        together = Together(args.engine, config, args.policy, args.context)
        found: dict[int, list[Round]] = {1: [], maintenance.MOST_COMMITS: []}
        for _ in tqdm(range(args.rounds), unit="round", file=sys.stdout):
            for most, rounds in found.items():
                rounds.append(together.round(args.conversations, most))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{args.policy}, conversations of {args.context} tokens, {args.rounds} rounds\n")
    print(table(found, args.conversations))
    return 0


if __name__ == "__main__":
    sys.exit(main())
