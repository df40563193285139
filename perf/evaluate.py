"""`python -m perf.evaluate`: what each policy costs in quality, per byte it holds.

Conversations of `perf.evaluation.tasks` are held under the full cache and under each policy, then asked about 30 to 60
things each. Results are kept after every conversation: the same command goes on where it was stopped, and what the
output folder holds of other policies is reported beside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.evaluation import report, tasks, words
from perf.evaluation.hold import FULL, PEER_FULL, EngineHolder, Store, hold_baseline, hold_policy
from perf.evaluation.scores import Score, score
from perf.evaluation.tasks import Task, make_task
from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from runtime import manifest as manifests
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.base import Policy
from runtime.policy.registry import ALL_POLICIES, get_policy, policies_for
from runtime.policy.variants import with_changes

REFERENCE = "reference"
QUICK = {"contexts": "1300", "questions": 60, "policies": "commitkv,quantize-int4"}


def make_tasks_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that say which engine and which tasks."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--contexts", default="1300,2000,4000", help="conversation lengths in tokens (%(default)s)")
    add("--questions", type=int, default=500, help="at least so many per length (%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "eval", help="(%(default)s)")
    return parser


def make_parser() -> argparse.ArgumentParser:
    parser = make_tasks_parser("python -m perf.evaluate", "Quality against bytes, per policy.")
    add = parser.add_argument
    add("--reference", type=Path, help="another engine of the same model, whose full cache everything is held "
        "against: the cost of --weight-dtype int8, say (default: --engine)")  # fmt: skip
    add("--policies", default="all", help="names separated by commas; all: each but those that another one chooses by "
        "the conversation's task (%(default)s)")  # fmt: skip
    add("--budgets", default="", help="budget ratios, separated by commas: a point each for the policies that have a "
        "budget (default: each policy's own)")  # fmt: skip
    add("--set", action="append", default=[], metavar="FIELD=JSON", help="change a field of the policies but full, "
        "such as absorb_gate=null or schedule.warmup_tokens=2000; may be given again")  # fmt: skip
    add("--quick", action="store_true", help="one length, few questions, two policies: under three minutes")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    return parser


def varied(policy: Policy, changes: Sequence[str]) -> Policy:
    """`policy` with FIELD=JSON changes, named after them; fields as `with_changes` takes them. Raises ConfigError."""
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError:
            example = 'such as 0.5, null or "int8"' if equals else "such as budget_ratio=0.5"
            raise ConfigError(f"--set: got {change!r}, expected FIELD=JSON, {example}") from None
    return replace(with_changes(policy, values), name=f"{policy.name} {' '.join(changes)}") if values else policy


def chosen_policies(args: argparse.Namespace) -> list[Policy]:
    """Variants to measure besides `full`. Raises ConfigError or UnknownPolicyError."""
    names = args.policies.split(",")
    if args.policies == "all":
        fitting = policies_for(manifests.load(args.engine, verify=False).model)
        chosen_by_task = {special.name for policy in fitting for _, special in policy.by_task}
        names = [policy.name for policy in fitting if policy.name not in chosen_by_task]
    budgets = numbers("--budgets", args.budgets) if args.budgets else []
    chosen: list[Policy] = []
    for policy in (get_policy(name) for name in names if name != FULL):
        for budget in budgets if budgets and policy.has_budget else [None]:
            changes = [*args.set, *([] if budget is None else [f"budget_ratio={budget}"])]
            chosen.append(varied(policy, changes))
    return chosen


def numbers(option: str, text: str) -> list[float]:
    """Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: got {text!r}, expected numbers separated by commas") from None


def make_tasks(contexts: str, num_questions: int, max_tokens: int) -> list[Task]:
    """Tasks of every length, enough of each for `num_questions`. Raises ConfigError for lengths that do not fit."""
    if num_questions < 1:
        raise ConfigError(f"--questions: got {num_questions}, expected at least 1")
    made: list[Task] = []
    for length in (int(number) for number in numbers("--contexts", contexts)):
        longest = int(max_tokens * 0.85)  # the length is aimed at, not kept exactly
        if not tasks.MIN_TOKENS <= length <= longest:
            raise ConfigError(
                f"--contexts: got {length}, expected {tasks.MIN_TOKENS} to {longest}: shorter ones have no room for "
                f"what is told, and this engine was built for {max_tokens} tokens"
            )
        asked = seed = 0
        while asked < num_questions:
            made.append(make_task(seed, length))
            asked += len(made[-1].questions)
            seed += 1
    return made


def measure(args: argparse.Namespace, policies: Sequence[Policy]) -> list[Score]:
    """Measures what the output folder lacks of `policies` and returns all scores. Raises CommitKVError."""
    if args.kv_mib < 1:
        raise ConfigError(f"--kv-mib: got {args.kv_mib}, expected at least 1")
    ALL_POLICIES.update({policy.name: policy for policy in policies})  # of this process, so that requests can name them
    holder = EngineHolder(args.engine, args.kv_mib)
    baseline, base_holder = (FULL, holder)
    names = [policy.name for policy in policies]
    if args.reference is not None:
        baseline, base_holder = REFERENCE, EngineHolder(args.reference, args.kv_mib)
        names = [FULL, *names]
    all_tasks = make_tasks(args.contexts, args.questions, holder.max_tokens)
    store = Store(args.output, result_key(args.engine, args.reference))
    with tqdm(total=(1 + len(names)) * len(all_tasks), unit="conversation", file=sys.stdout) as bar:
        for task in all_tasks:
            bar.set_description(f"{task.num_tokens} tokens, {baseline}")
            whole = hold_baseline(base_holder, store, task, baseline)
            bar.update()
            for name in names:
                bar.set_description(f"{task.num_tokens} tokens, {name}")
                hold_policy(holder, store, task, name, whole)
                bar.update()
    return [*stored_scores(store, all_tasks, (baseline, *names)), *peer_scores(args.output / "peers", all_tasks)]


def stored_scores(store: Store, all_tasks: Sequence[Task], names: Sequence[str]) -> list[Score]:
    """Scores by length: of `names`, the baseline first, then of whatever else the store holds on some of the tasks.

    A policy that was measured on fewer conversations is compared with the baseline on those.
    """
    baseline, scores = names[0], list[Score]()
    for length in sorted({task.num_tokens for task in all_tasks}):
        of_length = [task for task in all_tasks if task.num_tokens == length]
        for name in (*names, *(name for name in store.policies() if name not in names)):
            done = [task for task in of_length if store.get(name, task) is not None]
            if done:
                scores.append(score(store.of(name, done), store.of(baseline, done)))
    return scores


def peer_scores(folder: Path, all_tasks: Sequence[Task]) -> list[Score]:
    """Scores of what `perf.evaluation.peers` has measured on some of these tasks, none without it.

    Peers are held against their own full cache: the same weights in transformers.
    """
    return stored_scores(Store.open(folder), all_tasks, (PEER_FULL,)) if folder.is_dir() else []


def result_key(engine: Path, reference: Path | None) -> str:
    """What results belong to: the engines, and the text of the questions."""
    generator = b"".join(Path(str(module.__file__)).read_bytes() for module in (tasks, words))
    built = [manifests.load(path, verify=False) for path in (engine, reference) if path is not None]
    engines = [
        f"{m.model.name} {m.limits.dtype}/{m.limits.weight_dtype}{' rotated' * m.limits.rotate_values} "
        f"{m.source.sha256[:12]}"
        for m in built
    ]
    return f"{', '.join(engines)}; questions {hashlib.sha256(generator).hexdigest()[:12]}"


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            setattr(args, name, value)
    try:
        scores = measure(args, chosen_policies(args))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.write(scores, args.output, result_key(args.engine, args.reference))
    print(f"\n{report.markdown(scores)}\n\nwritten: {args.output}/index.html, quality.json, quality.md, quality.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
