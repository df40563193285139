"""`python -m perf.load.aiperf`: NVIDIA's aiperf over conversations of several turns, streamed over HTTP.

Its template endpoint turns each turn into our tensors: the text of the turn alone, with aiperf's own session id as the
conversation id, so that the server keeps the history. Figures are aiperf's. `make load-tools` installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.load.command import ToolError, check_tool, exit_code, own_server, verdict
from perf.load.plan import Workload, make_plan
from perf.serve import add_engine_arguments
from perf.server import MODEL_NAME, REPO_ROOT
from runtime.errors import ConfigError

BINARY = REPO_ROOT / ".venv-aiperf" / "bin" / "aiperf"
# A conversation of one run must not go on in the next, so the session's id of this run is used, not the dataset's.
TEMPLATE = """{
  "text_input": {{ text|tojson }},
  "conversation_id": {{ request_info.x_correlation_id|tojson }},
  "streaming": true,
  "sampling_param_max_tokens": MAX_TOKENS
}
"""
ROWS = {
    "request_latency": "whole turn, ms",
    "time_to_first_token": "time to first token, ms",
    "inter_token_latency": "between tokens, mean of a turn, ms",
    "request_throughput": "turns/s",
    "output_token_throughput": "answer tokens/s, by aiperf's count",
}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
STATISTICS = ("avg", "p50", "p95", "p99")


@dataclass(frozen=True)
class Figures:
    """metrics: {name: {statistic: value}} as aiperf wrote them.   turns, errors: requests that ended so."""

    metrics: Mapping[str, Mapping[str, float]]
    turns: int
    errors: int


def dataset(sessions: int, turns: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """The first turns of a plan's sessions in aiperf's form, one record per session; delays in milliseconds."""
    workload = Workload(sessions=sessions, ramp_s=1.0, duration_s=600.0, tokens=tokens, cancel_share=0.0, seed=seed)
    records = []
    for session in make_plan(workload).sessions:
        chosen = session.turns[:turns]
        texts = [{"text": turn.text, "delay": round(1000 * turn.think_s)} for turn in chosen]
        records.append({"session_id": session.session_id, "turns": texts})
    return records


def command(args: argparse.Namespace, url: str) -> list[str]:
    """aiperf's command line; files are written to `args.output` before."""
    lines = (json.dumps(record) for record in dataset(args.sessions, args.turns, args.tokens, args.seed))
    (args.output / "sessions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    template = args.output / "payload.jinja"
    template.write_text(TEMPLATE.replace("MAX_TOKENS", str(args.max_tokens)), encoding="utf-8")
    extra = {"payload_template": str(template.resolve()), "response_field": "text_output"}
    return [
        str(args.binary), "profile", "--model", MODEL_NAME, "--url", f"http://{url}",
        "--custom-endpoint", f"/v2/models/{MODEL_NAME}/generate_stream", "--endpoint-type", "template", "--streaming",
        "--input-file", str(args.output / "sessions.jsonl"), "--custom-dataset-type", "multi_turn",
        "--tokenizer", str(tokenizer_folder(args)), "--concurrency", str(args.concurrency),
        "--num-sessions", str(args.sessions), "--random-seed", str(args.seed), "--ui", "none",
        "--workers-max", "1", "--no-server-metrics", "--no-gpu-telemetry",
        "--output-artifact-dir", str(args.output / "artifacts"),
        *(word for name, value in extra.items() for word in ("--extra-inputs", f"{name}:{value}")),
    ]  # fmt: skip


def tokenizer_file(args: argparse.Namespace) -> Path:
    """The tokenizer that aiperf counts tokens with. Raises ConfigError."""
    file = Path(args.tokenizer or args.engine) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"--tokenizer: {file.parent} holds no tokenizer.json, expected an engine's or a model's folder; pass one"
        )
    return file


def tokenizer_folder(args: argparse.Namespace) -> Path:
    """A folder from which transformers loads it: an engine's lacks the configuration that names its class."""
    folder = Path(args.output) / "tokenizer"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(tokenizer_file(args), folder / "tokenizer.json")
    configuration = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(configuration, encoding="utf-8")
    return folder


def run_tool(args: argparse.Namespace, url: str) -> Figures:
    """One run of aiperf. Raises ToolError."""
    shutil.rmtree(args.output / "artifacts", ignore_errors=True)
    # Told to stay offline, aiperf looks a folder up as if it were the name of a cached model.
    environment = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    log = args.output / "aiperf.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command(args, url), stdout=file, stderr=file, env=environment, timeout=args.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"aiperf: no end within {args.timeout_s:g} s; ask for fewer sessions, see {log}") from error
    found = sorted((args.output / "artifacts").rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        raise ToolError(f"aiperf: ended with code {done.returncode} and {len(found)} reports; see {log}")
    return read_figures(json.loads(found[0].read_text(encoding="utf-8")))


def read_figures(report: Mapping[str, Any]) -> Figures:
    """From aiperf's own report."""
    metrics = {
        name: {key: float(value) for key in STATISTICS if isinstance(value := report[name].get(key), int | float)}
        for name in ROWS
        if isinstance(report.get(name), dict)
    }

    def count(name: str) -> int:
        return round(float((report.get(name) or {}).get("avg") or 0))

    return Figures(metrics, count("request_count"), count("error_request_count"))


def markdown(figures: Figures) -> str:
    """One row per metric."""
    head = f"| {figures.turns} turns, {figures.errors} errors | {' | '.join(STATISTICS)} |"
    lines = [head, "|---|" + "---:|" * len(STATISTICS)]
    for name, label in ROWS.items():
        values = figures.metrics.get(name, {})
        cells = (f"{values[key]:.1f}" if key in values else "-" for key in STATISTICS)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.load.aiperf", description=__doc__)
    parser.add_argument("--http-url", help="HOST:PORT of a server's HTTP endpoint (start an own one)")
    add_engine_arguments(parser)
    parser.add_argument("--sessions", type=int, default=6, help="conversations (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=600, help="of each at its end, about (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=3, help="conversations at once (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (the engine's)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="(%(default)s)")
    parser.add_argument("--binary", type=Path, default=BINARY, help="(%(default)s)")
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "aiperf", help="(%(default)s)")
    return parser


def _figures(args: argparse.Namespace) -> Figures:
    if args.http_url:
        return run_tool(args, args.http_url)
    with own_server(args) as server:
        return run_tool(args, server.http_url)


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises CommitKVError."""
    check_tool("aiperf", args.binary)
    tokenizer_file(args)
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    figures = _figures(args)
    table = markdown(figures)
    (args.output / "report.md").write_text(table + "\n", encoding="utf-8")
    failures = [f"{figures.turns} turns, {figures.errors} errors"] if figures.errors or not figures.turns else []
    text = f"\n{table}\n\nwritten: {args.output}/report.md, aiperf's own files under artifacts/"
    return verdict("aiperf", text, failures)


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
