"""`python -m perf.evaluate`: what a policy costs in quality, against the full cache, per byte it holds.

Conversations of `perf.tasks` are held turn by turn under each policy, with idle time between turns, and without
answers, which would differ from policy to policy; then each question is put to a copy of the conversation. Scores:
accuracy among 4 choices, negative log-likelihood of the right word, KL divergence of the next-word distribution from
the full cache's, and how often both prefer the same word.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from perf.tasks import Question, Task, make_task
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, ConfigError
from runtime.executor_torch import TorchExecutor
from runtime.policy.base import Policy
from runtime.policy.registry import ALL_POLICIES, get_policy
from runtime.request import ErrorEvent, Request, SamplingParams
from runtime.text import EngineTokenizer
from runtime.wiring import load_parts, load_tokenizer

FULL = "full"


@dataclass(frozen=True)
class Score:
    """Means over questions; `*_se`: standard error of the mean. kv_share: bytes over the full cache's in fp16."""

    policy: str
    questions: int
    tokens: float
    kv_share: float
    accuracy: float
    accuracy_se: float
    nll: float
    kl: float
    kl_se: float
    same_word: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Answers:
    """logprobs [num_questions, vocab] fp32; right: ids of the right word; choices [num_questions, 4]."""

    logprobs: torch.Tensor
    choices: torch.Tensor
    kv_bytes: int
    kv_full_bytes: int
    tokens: int
    seconds: float


class Evaluator:
    """One engine, on which the same conversations are held under one policy after the other."""

    def __init__(self, engine_dir: Path, kv_mib: int) -> None:
        parts = load_parts(engine_dir, RuntimeConfig(kv_memory_bytes=kv_mib << 20))
        assert isinstance(parts.executor, TorchExecutor)
        self._executor = parts.executor
        self._engine = Engine(parts)
        self._tokenizer: EngineTokenizer = load_tokenizer(engine_dir, manifests.load(engine_dir, verify=False))

    def answers(self, task: Task, policy: str) -> Answers:
        """Holds the conversation and asks its questions."""
        started = time.monotonic()
        for i, text in enumerate(task.turns):
            self._turn(Request(f"turn-{i}", text, SamplingParams(max_tokens=0), "c", policy=policy))
        kv = self._engine.kv_stats("c")
        logprobs = torch.stack([self._ask(question) for question in task.questions])
        choices = torch.tensor([[self._word(w) for w in question.choices] for question in task.questions])
        self._engine.end_conversation("c")
        self._rest()
        tokens = kv.active + kv.staged + kv.committed + kv.evicted
        return Answers(logprobs, choices, kv.kv_bytes, kv.kv_full_bytes, tokens, time.monotonic() - started)

    def _ask(self, question: Question) -> torch.Tensor:
        logits = self._engine.peek("c", question.text, question.opening, self._executor.logits)
        return torch.log_softmax(logits, dim=-1)

    def _word(self, word: str) -> int:
        """The first token of the word after a space."""
        return self._tokenizer.encode(f" {word}", (0, 0))[0][0]

    def _turn(self, request: Request) -> None:
        self._engine.submit(request)
        self._rest()

    def _rest(self) -> None:
        worked = True
        while worked:
            events, worked = self._engine.step()
            for event in events:
                if isinstance(event, ErrorEvent):
                    raise event.error


def score(policy: str, answers: Sequence[Answers], full: Sequence[Answers]) -> Score:
    """Scores of one policy over all conversations, question by question against the full cache."""
    ours = torch.cat([a.logprobs for a in answers])
    whole = torch.cat([a.logprobs for a in full])
    choices = torch.cat([a.choices for a in answers])
    of_choices = ours.gather(1, choices)
    right = (of_choices.argmax(dim=1) == 0).float()
    kl = (whole.exp() * (whole - ours)).sum(dim=1)
    root = math.sqrt(len(right))
    return Score(
        policy=policy,
        questions=len(right),
        tokens=sum(a.tokens for a in answers) / len(answers),
        kv_share=sum(a.kv_bytes for a in answers) / sum(a.kv_full_bytes for a in answers),
        accuracy=right.mean().item(),
        accuracy_se=right.std().item() / root,
        nll=-of_choices[:, 0].mean().item(),
        kl=kl.mean().item(),
        kl_se=kl.std().item() / root,
        same_word=(ours.argmax(dim=1) == whole.argmax(dim=1)).float().mean().item(),
        seconds=sum(a.seconds for a in answers),
    )


def table(scores: Sequence[Score]) -> str:
    """Markdown."""
    lines = [
        "| policy | KV bytes | accuracy | NLL | KL to full | same word | questions | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in scores:
        lines.append(
            f"| {s.policy} | {s.kv_share:.3f} | {s.accuracy:.2f} ± {s.accuracy_se:.2f} | {s.nll:.2f} "
            f"| {s.kl:.3f} ± {s.kl_se:.3f} | {s.same_word:.2f} | {s.questions} | {s.tokens:.0f} |"
        )
    return "\n".join(lines)


def picture(scores: Sequence[Score], path: Path) -> None:
    """KL against bytes, one point per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for s in scores:
        axes.errorbar(s.kv_share, s.kl, yerr=s.kl_se, fmt="o", capsize=3)
        axes.annotate(s.policy, (s.kv_share, s.kl), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_xlabel("KV bytes / full cache in fp16")
    axes.set_ylabel("KL to the full cache, nats")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.evaluate", description="Quality against bytes, per policy.")
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--reference", type=Path, help="another engine of the same model, whose full cache everything is held "
        "against: the cost of --weight-dtype int8, say (default: --engine)")  # fmt: skip
    add("--policies", default="all", help="names separated by commas (%(default)s)")
    add("--set", action="append", default=[], metavar="FIELD=JSON", help="change a field of the policies but full, "
        "such as absorb_gate=null or budget_ratio=0.5; may be given again")  # fmt: skip
    add("--conversations", type=int, default=6, help="conversations per policy (%(default)s)")
    add("--turns", type=int, default=11, help="turns of each; 11 are about 1,450 tokens (%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "eval", help="(%(default)s)")
    return parser


def varied(policy: Policy, changes: Sequence[str]) -> Policy:
    """`policy` with FIELD=JSON changes, named after them. Raises ConfigError."""
    known = {field.name for field in fields(Policy)} - {"name", "schedule", "protection"}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise ConfigError(f"--set: got {change!r}, expected FIELD=JSON with a field of {', '.join(sorted(known))}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            raise ConfigError(
                f"--set: got {change!r}, expected JSON after '=', such as 0.5, null or \"int8\""
            ) from None
    try:
        return replace(policy, name=f"{policy.name} {' '.join(changes)}", **values) if values else policy
    except TypeError as error:
        raise ConfigError(
            f"--set: got {', '.join(changes)}, expected values of the fields' own types ({error})"
        ) from None


def evaluate(args: argparse.Namespace) -> list[Score]:
    """Raises CommitKVError."""
    for name, least in (("conversations", 1), ("turns", 1), ("kv_mib", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least {least}")
    names = list(ALL_POLICIES) if args.policies == "all" else args.policies.split(",")
    variants = [varied(get_policy(name), args.set) for name in names if name != FULL]
    ALL_POLICIES.update({policy.name: policy for policy in variants})  # of this process, so that requests can name them
    policies = [FULL, *(policy.name for policy in variants)]
    tasks = [make_task(seed, args.turns) for seed in range(args.conversations)]
    held = [(args.engine, policy) for policy in policies]
    if args.reference is not None:
        held.insert(0, (args.reference, FULL))
    answers = hold(held, tasks, args.kv_mib)
    return [score(policy, answers[args.engine, policy], answers[held[0]]) for policy in policies]


def hold(held: Sequence[tuple[Path, str]], tasks: Sequence[Task], kv_mib: int) -> dict[tuple[Path, str], list[Answers]]:
    """Answers of each (engine, policy) to every task, one engine after the other."""
    answers: dict[tuple[Path, str], list[Answers]] = {}
    with tqdm(total=len(held) * len(tasks), unit="conversation", file=sys.stdout) as bar:
        for engine, pairs in groupby(held, key=lambda pair: pair[0]):
            evaluator = Evaluator(engine, kv_mib)
            for pair in pairs:
                bar.set_description(pair[1])
                answers[pair] = []
                for task in tasks:
                    answers[pair].append(evaluator.answers(task, pair[1]))
                    bar.update()
    return answers


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        scores = evaluate(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "quality.json").write_text(
        json.dumps([asdict(s) for s in scores], indent=1) + "\n", encoding="utf-8"
    )
    picture(scores, args.output / "quality.png")
    print(f"\n{table(scores)}\n\nwritten: {args.output}/quality.json, quality.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
