"""`make demo`: one conversation under the full cache and under CommitKV, through a real Triton server, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from perf.client import Chat, server_version
from perf.report import DemoFacts, build_report, page, picture, summary, table
from perf.serve import add_engine_arguments, server_options
from perf.server import REPO_ROOT, TritonServer
from perf.workload import CONVERSATIONS, Conversation, Run, TurnRecord, load_conversation, run_conversation
from runtime.errors import CommitKVError, ConfigError

DEFAULT_CONVERSATION = CONVERSATIONS / "oncall.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.demo", description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--conversation", type=Path, default=DEFAULT_CONVERSATION, help="JSONL file (%(default)s)")
    parser.add_argument("--policy", default="commitkv", help="policy to set against full (%(default)s)")
    parser.add_argument("--think-s", type=float, default=20.0, help="longest wait between turns for idle work, "
                        "as an agent's tools or a reading user would take (%(default)s)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "demo", help="(%(default)s)")
    return parser


def run_policy(args: argparse.Namespace, conversation: Conversation, policy: str) -> tuple[Run, str]:
    """The conversation on a server of its own, so that resident memory is this policy's; also the server's version."""
    log = args.output / f"server-{policy}.log"
    with (
        TritonServer(server_options(args.engine, args.kv_mib, args.threads, policy, log)) as server,
        tqdm(total=len(conversation.turns), desc=f"{policy:>10}", unit="turn", file=sys.stdout) as bar,
    ):

        def on_turn(record: TurnRecord) -> None:
            bar.set_postfix_str(f"KV {record.kv.kv_bytes / 2**20:.1f} MiB")
            bar.update()

        with Chat(server.grpc_url, f"demo-{policy}", policy) as chat:
            run = run_conversation(chat, conversation, args.think_s, on_turn)
        return run, server_version(server.grpc_url)


def _model_name(engine: Path) -> str:
    """The name in the engine's manifest, or that of its directory."""
    try:
        manifest = json.loads((engine / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return engine.name
    model = manifest.get("model", {})
    return str(model.get("name") or engine.name) if isinstance(model, dict) else engine.name


def demo(args: argparse.Namespace) -> None:
    """Raises CommitKVError."""
    if args.think_s < 0:
        raise ConfigError(f"--think-s: got {args.think_s}, expected 0 or more seconds; pass another number")
    conversation = load_conversation(args.conversation)
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"conversation {conversation.name}: {len(conversation.turns)} turns, first with the full cache, then with "
          f"{args.policy}", flush=True)  # fmt: skip
    full, version = run_policy(args, conversation, "full")
    ours, _ = run_policy(args, conversation, args.policy)
    report = build_report(full, ours, DemoFacts(_model_name(args.engine), version, args.think_s))
    png = picture(report)
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (args.output / "kv.png").write_bytes(png)
    (args.output / "report.html").write_text(page(report, [full, ours], conversation, png), encoding="utf-8")
    print(f"\n{table(full, ours)}\n\n{summary(report)}\n\nwritten: {args.output}/report.json, kv.png, report.html")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        demo(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the server is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
