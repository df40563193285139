"""`python -m perf.choices`: what each of commitkv's choices is worth.

One choice is changed at a time, the rest stays as shipped; conversations and questions are those of `perf.evaluate`.
Results are kept after every conversation: the same command goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from perf.evaluate import make_tasks_parser, measure, result_key, varied
from perf.evaluation.scores import Mean, Score
from perf.server import REPO_ROOT
from runtime import manifest as manifests
from runtime.errors import CommitKVError
from runtime.policy.base import Policy
from runtime.policy.registry import get_policy


@dataclass(frozen=True)
class Choice:
    """Changes of one kind.   settings: each as `perf.evaluate --set` takes them, separated by blanks."""

    about: str
    settings: tuple[str, ...]


_POOLED = "absorb_gate=null tiers="
_NEVER_ANEW = "schedule.renew=false"

CHOICES = (
    Choice("budget", ("budget_ratio=0.45", "budget_ratio=0.2", "budget_ratio=0.15")),
    Choice("score", ('score="probe"', 'score="both"', 'score="seen"', 'score="sum"', 'score="window"')),
    Choice("neighbours and redundancy", ("smooth=5", "redundancy=0.9")),
    Choice("what competes", ('share="layer"', 'share="layer" layer_beta=2', 'share="head"', "floor_entries=0",
                             "floor_entries=64")),
    Choice("what fell", ("absorb_gate=null", "absorb_gate=0.2", "absorb_gate=0.6")),
    Choice("super tokens", (
        *(f'{_POOLED}[[0,{size},"weighted"]]' for size in (5, 10, 20, 50)),
        f'{_POOLED}[[0,5,"weighted"]] pool_bias="root"',
        f'{_POOLED}[[0,5,"weighted"]] pool_bias="none"',
        f'{_POOLED}[[0,10,"pca",2]]',
        f'{_POOLED}[[0,5,"learned"]]',
        f'{_POOLED}[[0,5,"weighted"],[600,20,"weighted"]]',
    )),
    Choice("precision", (
        *(f'block_format="{name}"' for name in ("kv", "int8", "k84v4", "int4")),
        *(f"exact_entries={count}" for count in (16, 64)),
        *(f'block_format="int4" exact_entries={count}' for count in (16, 64)),
    )),
    Choice("what is drawn anew", (_NEVER_ANEW, f"{_NEVER_ANEW} schedule.reread_growth=0",
                                  f"{_NEVER_ANEW} schedule.reread_growth=0 redraw=false")),
    Choice("when", ("schedule.recent_tokens=128", "schedule.recent_tokens=64", "schedule.recent_tokens=16",
                    "schedule.min_tokens=500", "schedule.warmup_tokens=500 schedule.warmup_every=100",
                    "schedule.at_turn_end=false")),
    Choice("signals", ("signals.attention=1", "signals.entropy=1", "signals.boundary=1", "signals.jump=1",
                       "signals.attention=1 signals.entropy=1 signals.boundary=1 signals.jump=1")),
)  # fmt: skip


LAYER_SLOPES = ((1.5, 0.5), (0.5, 1.5))
"""Factors on the scores of the first and of the last layer; those between lie on a line."""


def variants(base: Policy, num_layers: int) -> dict[str, tuple[Policy, str, str]]:
    """What is measured, the base first, by name: the policy, what its change is about, and the change."""
    found = {base.name: (base, "", "nothing")}
    for choice in CHOICES:
        for setting in choice.settings:
            policy = varied(base, setting.split(" "))
            found[policy.name] = (policy, choice.about, f"`{setting}`")
    for first, last in LAYER_SLOPES:
        scale = [round(first + (last - first) * i / max(1, num_layers - 1), 3) for i in range(num_layers)]
        policy = varied(base, [f"layer_scale={json.dumps(scale)}"])
        found[policy.name] = (policy, "layers", f"`layer_scale=[{scale[0]}, ..., {scale[-1]}]`")
    return found


def markdown(scores: Sequence[Score], measured: dict[str, tuple[Policy, str, str]]) -> str:
    """One table, in the order of the choices; the full cache is left out."""
    lines = ["| choice | changed | KV bytes | KL to full | worst | equivalent | accuracy change |", "|---" * 7 + "|"]
    before = ""
    for score in (s for s in scores if s.policy in measured):
        _, about, change = measured[score.policy]
        lines.append(
            f"| {'' if about == before else about} | {change} | {score.kv_share:.3f} | {_shown(score.kl)} | "
            f"{score.worst_kl:.2f} | {_shown(score.equivalent)} | {_shown(score.accuracy_change, '+')} |"
        )
        before = about
    return "\n".join(lines)


def _shown(mean: Mean, sign: str = "") -> str:
    return f"{mean.value:{sign}.3f} ± {mean.error:.3f}"


def main(argv: list[str] | None = None) -> int:
    parser = make_tasks_parser("python -m perf.choices", "What each of commitkv's choices is worth.")
    parser.add_argument("--policy", default="commitkv", help="whose choices (%(default)s)")
    parser.add_argument("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")
    parser.set_defaults(contexts="1300", questions=90, output=REPO_ROOT / "out" / "choices", reference=None)
    args = parser.parse_args(argv)
    try:
        model = manifests.load(args.engine, verify=False).model
        measured = variants(get_policy(args.policy), model.num_layers)
        scores = measure(args, [policy for policy, _, _ in measured.values()])
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = markdown(scores, measured)
    records = {"title": result_key(args.engine, None), "scores": [dataclasses.asdict(score) for score in scores]}
    (args.output / "choices.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (args.output / "choices.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nwritten: {args.output}/choices.json, choices.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
