"""`python -m perf.calibrate --data conversations.jsonl`: chooses a policy's budget on the user's own conversations.

Every conversation is held with the full cache, then with each budget and absorb threshold of the sweep, word for word
the same (see `perf.teacher`). Of every budget the threshold with the lowest divergence counts. On the curve of
divergence against cache bytes the last point before the knee is chosen, and a policy file written that
`builder/build.py --policy FILE` and `python -m perf.serve --policy FILE` take.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.chat_data import Chat, read_chats
from perf.evaluation.scores import EQUIVALENT_KL, clustered_mean
from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from perf.teacher import Teacher, Telling
from runtime.config import ModelSpec, RuntimeConfig
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.policy_file import PolicyFile, add_policy, make_policy_file, write_policy_file
from runtime.policy.registry import ALL_POLICIES, get_policy

BUDGETS = "0.05,0.1,0.15,0.2,0.25,0.35,0.5"
DROP = "none"


@dataclass(frozen=True)
class Point:
    """One setting over all conversations. threshold: `absorb_gate`, None drops.

    kv_share: bytes over the full cache's in fp16, at the end of the conversations.   kl: mean over turns that came
    after a commit, and its standard error.   same_choice, equivalent: shares of those turns (equivalent: KL at most
    0.1 and the same choice).   worst_kl: of a turn.
    """

    budget: float
    threshold: float | None
    kv_share: float
    kl: float
    kl_error: float
    same_choice: float
    equivalent: float
    worst_kl: float
    turns: int


def make_point(budget: float, threshold: float | None, tellings: Sequence[Telling]) -> Point:
    """tellings: of all conversations under this setting."""
    groups = [[score.kl for score in telling.scores] for telling in tellings if telling.scores]
    scores = [score for telling in tellings for score in telling.scores]
    kl = clustered_mean(groups)
    equivalent = [score.kl <= EQUIVALENT_KL and score.same_choice for score in scores]
    return Point(
        budget=budget,
        threshold=threshold,
        kv_share=sum(t.kv.kv_bytes for t in tellings) / sum(t.kv.kv_full_bytes for t in tellings),
        kl=kl.value,
        kl_error=kl.error,
        same_choice=sum(score.same_choice for score in scores) / len(scores),
        equivalent=sum(equivalent) / len(scores),
        worst_kl=max(score.kl for score in scores),
        turns=len(scores),
    )


def best_of_budgets(points: Sequence[Point]) -> list[Point]:
    """Of every budget the threshold with the lowest divergence, and of those none that another beats in both.

    By falling bytes, so that divergence rises.
    """
    chosen: dict[float, Point] = {}
    for point in points:
        if point.budget not in chosen or point.kl < chosen[point.budget].kl:
            chosen[point.budget] = point
    curve: list[Point] = []
    for point in sorted(chosen.values(), key=lambda p: (p.kv_share, p.kl)):
        if not curve or point.kl < curve[-1].kl:
            curve.append(point)
    return curve[::-1]


def knee(curve: Sequence[Point]) -> Point:
    """The last point before divergence takes off, on a curve as `best_of_budgets` gives.

    The point farthest below the chord between both ends, in units of the curve's own ranges (the knee of Satopaa et
    al., Finding a Kneedle in a Haystack, 2011). A straight or bulging curve has none: then its point of most bytes.
    """
    first, last = curve[0], curve[-1]
    width, height = first.kv_share - last.kv_share, last.kl - first.kl
    if width <= 0 or height <= 0:
        return last
    best, best_gap = first, 0.0
    for point in curve:
        along, up = (first.kv_share - point.kv_share) / width, (point.kl - first.kl) / height
        if along - up > best_gap + 1e-9:
            best, best_gap = point, along - up
    return best


def sweep(teacher: Teacher, chats: Sequence[Chat], settings: Sequence[PolicyFile]) -> list[list[Telling]]:
    """Per setting the tellings of all conversations. Raises RequestError naming a line, or ConfigError."""
    tellings: list[list[Telling]] = [[] for _ in settings]
    with tqdm(total=len(chats) * (len(settings) + 1), unit="conversation", file=sys.stdout) as bar:
        for chat in chats:
            bar.set_description(f"{chat.name}, full")
            reference = teacher.refer(chat)
            bar.update()
            for setting, found in zip(settings, tellings, strict=True):
                bar.set_description(f"{chat.name}, {setting.name}")
                found.append(teacher.tell(chat, setting.name, reference))
                bar.update()
    if not any(telling.scores for telling in tellings[0]):
        policy = settings[0].policy
        raise ConfigError(
            f"--data: no turn came after a commit, expected a conversation of more than {policy.schedule.min_tokens} "
            f"tokens (min_tokens of {policy.name}) and another turn behind it; calibrate on longer conversations"
        )
    return tellings


def make_settings(args: argparse.Namespace, spec: ModelSpec) -> list[PolicyFile]:
    """One policy for each pair of a budget and a threshold, known by its name from now on. Raises ConfigError."""
    settings = []
    for budget in args.budgets:
        for threshold in args.thresholds:
            changes = {"budget_ratio": budget, "absorb_gate": threshold}
            shown = DROP if threshold is None else f"{threshold:g}"
            settings.append(make_policy_file(f"{args.name}-{budget:g}-{shown}", spec, args.policy, changes))
    for setting in settings:
        add_policy(setting.policy)
    return settings


def table(points: Sequence[Point], chosen: Point) -> str:
    """Markdown."""
    lines = [
        "| budget | threshold | KV bytes | KL to full | same choice | equivalent turns | worst KL | turns | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        threshold = DROP if p.threshold is None else f"{p.threshold:g}"
        error = "" if math.isnan(p.kl_error) else f" ± {p.kl_error:.4f}"
        lines.append(
            f"| {p.budget:g} | {threshold} | {p.kv_share:.3f} | {p.kl:.4f}{error} | {p.same_choice:.2f} "
            f"| {p.equivalent:.2f} | {p.worst_kl:.3f} | {p.turns} | {'chosen' if p == chosen else ''} |"
        )
    return "\n".join(lines)


def picture(points: Sequence[Point], curve: Sequence[Point], chosen: Point, path: Path) -> None:
    """Divergence against bytes, the curve through the best of every budget, and the choice."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    errors = [0.0 if math.isnan(p.kl_error) else p.kl_error for p in points]
    axes.errorbar([p.kv_share for p in points], [p.kl for p in points], yerr=errors, fmt="o", color="0.6", capsize=3)
    axes.plot([p.kv_share for p in curve], [p.kl for p in curve], color="C0")
    for p in curve:
        axes.annotate(f"{p.budget:g}", (p.kv_share, p.kl), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.plot(
        chosen.kv_share, chosen.kl, "o", color="C3", markersize=9, zorder=5, label=f"chosen: budget {chosen.budget:g}"
    )
    axes.set_xlabel("KV bytes / full cache in fp16")
    axes.set_ylabel("KL to the full cache, nats")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _numbers(text: str, option: str) -> list[float]:
    """Numbers in (0, 1] separated by commas, each once."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0.0 < number <= 1.0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{option}: got {text!r}, expected different numbers above 0 and at most 1, such as 0.1,0.2")
    return numbers


def _thresholds(text: str, option: str) -> list[float | None]:
    """As `_numbers`, and "none" to drop."""
    parts = text.split(",")
    numbers = [part for part in parts if part != DROP]
    if parts.count(DROP) > 1:
        raise ConfigError(f"{option}: got {text!r}, expected {DROP} once at most")
    found: list[float | None] = [*_numbers(",".join(numbers), option)] if numbers else []
    return [*found, *([None] if DROP in parts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.calibrate", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="conversations as JSONL, see perf/chat_data.py")
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--policy", default="commitkv", help="policy whose budget is chosen (%(default)s)")
    add("--budgets", default=BUDGETS, help="shares of the entries to try (%(default)s)")
    add("--thresholds", default="", help="absorb thresholds to try, none to drop, such as none,0.35 (the policy's own)")
    add("--budget", type=float, help="take this budget of the sweep instead of the knee's")
    add("--answer-tokens", type=int, default=8, help="tokens of every answer that are compared (%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    add("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")
    add("--name", default="calibrated", help="of the policy in the file (%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "calibrate", help="folder (%(default)s)")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Parses lists in place. Raises ConfigError or UnknownPolicyError."""
    base = get_policy(args.policy)
    if not base.compresses or base.budget_ratio == 1.0:
        raise ConfigError(
            f"--policy: got {args.policy}, which gives up no entries, expected one with a budget; nothing to choose"
        )
    if base.thresholds is not None or (base.tiers and not base.pools_by_score):
        raise ConfigError(f"--policy: got {args.policy}, whose budget follows from other choices; choose another")
    args.budgets = _numbers(args.budgets, "--budgets")
    if len(args.budgets) < 3:
        raise ConfigError(f"--budgets: got {len(args.budgets)}, expected at least 3, or there is no knee to find")
    if args.thresholds and base.tiers:
        raise ConfigError(f"--thresholds: {args.policy} makes super tokens and absorbs nothing; leave the option out")
    args.thresholds = _thresholds(args.thresholds, "--thresholds") if args.thresholds else [base.absorb_gate]
    if args.budget is not None and args.budget not in args.budgets:
        raise ConfigError(f"--budget: got {args.budget}, expected one of --budgets, or nothing is measured there")
    for name in ("answer_tokens", "kv_mib"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
    if args.name in ALL_POLICIES:
        raise ConfigError(f"--name: got {args.name!r}, which is a policy already, expected a name of its own")


def calibrate(args: argparse.Namespace) -> tuple[list[Point], Point]:
    """All points and the chosen one; writes the results into the folder. Raises CommitKVError."""
    check_arguments(args)
    chats = read_chats(args.data)
    config = RuntimeConfig(kv_memory_bytes=args.kv_mib << 20, num_threads=args.threads)
    teacher = Teacher(args.engine, config, args.answer_tokens)
    for chat in chats:
        teacher.check_length(chat)
    settings = make_settings(args, teacher.spec)
    pairs = [(budget, threshold) for budget in args.budgets for threshold in args.thresholds]
    tellings = sweep(teacher, chats, settings)
    points = [make_point(*pair, found) for pair, found in zip(pairs, tellings, strict=True)]
    if args.budget is None:
        chosen = knee(best_of_budgets(points))
    else:
        chosen = min((p for p in points if p.budget == args.budget), key=lambda p: p.kl)
    write_results(args, teacher.spec, points, chosen)
    return points, chosen


def write_results(args: argparse.Namespace, spec: ModelSpec, points: Sequence[Point], chosen: Point) -> None:
    """policy.json, calibration.json and calibration.png."""
    changes: dict[str, Any] = {"budget_ratio": chosen.budget, "absorb_gate": chosen.threshold}
    file = make_policy_file(args.name, spec, args.policy, changes)
    args.output.mkdir(parents=True, exist_ok=True)
    found = {"data": [str(path) for path in args.data], "answer_tokens": args.answer_tokens, "point": _plain(chosen)}
    write_policy_file(args.output / "policy.json", file, found)
    text = json.dumps({**found, "points": [_plain(point) for point in points]}, indent=1)
    (args.output / "calibration.json").write_text(text + "\n", encoding="utf-8")
    picture(points, best_of_budgets(points), chosen, args.output / "calibration.png")


def _plain(point: Point) -> dict[str, Any]:
    """JSON has no NaN: the error of a single conversation is null."""
    return {name: None if value is not None and math.isnan(value) else value for name, value in asdict(point).items()}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        points, chosen = calibrate(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"\n{table(points, chosen)}\n\nwritten: {args.output}/policy.json, calibration.json, calibration.png")
    print(f"use it: python -m perf.serve --policy {args.output}/policy.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
