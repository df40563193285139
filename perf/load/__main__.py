"""`python -m perf.load`: the same sessions against a full cache and CommitKV at equal KV memory, or against --url.

Two servers run one after the other with the same plan (see perf/load/plan.py); figures are of the time after all
sessions have arrived. With --url the plan runs once against a server that is up already.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.load.command import add_target_arguments, exit_code, target_of
from perf.load.driver import Driver, DriverOptions
from perf.load.outcomes import Bound, RunRecord, TurnOutcome, summarize
from perf.load.plan import Plan, Workload, make_plan
from perf.load.report import markdown, plot, write_figures, write_run
from perf.load.turn_stream import Target
from perf.serve import DEFAULT_ENGINE, server_options
from perf.server import REPO_ROOT, TritonServer

DEFAULT_KV_MIB = 112


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.load", description=__doc__)
    parser.add_argument("--url", help="HOST:PORT of a server's gRPC endpoint (start own servers)")
    add_target_arguments(parser)
    parser.add_argument("--policies", default="full,commitkv", help="one own server each (%(default)s)")
    parser.add_argument("--policy", help="with --url: policy of the sessions (the server's own)")
    parser.add_argument("--engine", type=Path, default=DEFAULT_ENGINE, help="engine of own servers (%(default)s)")
    parser.add_argument("--kv-mib", type=int, default=DEFAULT_KV_MIB, help="KV memory of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")
    for field in fields(Workload):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default,
                            help=f"see perf/load/plan.py ({field.default})")  # fmt: skip
    parser.add_argument("--ttft-s", type=float, default=Bound.ttft_s, help="of a good turn, at most (%(default)s)")
    parser.add_argument("--itl-ms", type=float, default=1e3 * Bound.itl_s, help="mean, at most (%(default)s)")
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "load", help="(%(default)s)")
    return parser


def _run(plan: Plan, options: DriverOptions, target: Target) -> RunRecord:
    total = plan.workload.duration_s
    with tqdm(total=total, desc=f"{options.label:>12}", unit="s", bar_format="{l_bar}{bar}| {postfix}",
              file=sys.stdout) as bar:  # fmt: skip
        counts: dict[str, int] = {}

        def on_turn(turn: TurnOutcome) -> None:
            counts[turn.outcome] = counts.get(turn.outcome, 0) + 1
            bar.update(max(0.0, min(turn.end_s, total) - bar.n))
            bar.set_postfix_str(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))

        return asyncio.run(Driver(plan, options, on_turn).run(target))


def _run_own(args: argparse.Namespace, plan: Plan, policy: str) -> RunRecord:
    log = args.output / f"server-{policy}.log"
    with TritonServer(server_options(args.engine, args.kv_mib, args.threads, policy, log)) as server:
        return _run(plan, DriverOptions(label=policy, end_sessions=False), target_of(server.grpc_url, args))


def _write(args: argparse.Namespace, plan: Plan, runs: list[RunRecord], bound: Bound) -> str:
    settings: Mapping[str, Any] = {
        "workload": asdict(plan.workload),
        "plan": plan.digest,
        "bound": asdict(bound),
        "kv_mib": None if args.url else args.kv_mib,
        "url": args.url,
    }
    summaries = [summarize(run, bound) for run in runs]
    memory = "as deployed" if args.url else f"{args.kv_mib} MiB of KV"
    table = markdown(summaries, f"{plan.workload.sessions} sessions, {memory}, plan {plan.digest}")
    for run in runs:
        write_run(args.output, run)
    write_figures(args.output / "report.json", summaries, settings)
    (args.output / "report.md").write_text(table + "\n", encoding="utf-8")
    plot(args.output / "report.png", runs, bound)
    errors = [f"{summary.label}: {error}" for summary in summaries for error in summary.errors]
    return "\n".join([table, *(f"error in {error}" for error in errors)])


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises CommitKVError."""
    plan = make_plan(Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)}))
    bound = Bound(args.ttft_s, args.itl_ms / 1e3)
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"plan {plan.digest}: {len(plan.sessions)} sessions, {plan.workload.duration_s:g} s per run", flush=True)
    if args.url:
        label = args.policy or args.url
        runs = [_run(plan, DriverOptions(label=label, policy=args.policy), target_of(args.url, args))]
    else:
        runs = [_run_own(args, plan, policy) for policy in args.policies.split(",")]
    print(f"\n{_write(args, plan, runs, bound)}\n\nwritten: {args.output}/report.json, report.md, report.png, *.csv")
    if not any(turn.outcome == "ok" for run in runs for turn in run.turns):
        print("error: no turn was answered", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv), stopped="own servers are stopped")


if __name__ == "__main__":
    sys.exit(main())
