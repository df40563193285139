"""`python -m perf.claims`: the figures that the idea was proposed with, each beside what is measured here.

A long conversation (generated tasks of the longest length in perf/results/quality.json) gives accuracy and memory; a
document of 7,000 tokens that is to be summarized gives agreement with the full cache's own summary and memory. Time is
that of decode steps at both lengths, every policy in turn with the full cache; so is the manager's share. Where
attention falls is read from the full cache in transformers. What is measured is kept part by part: the same command
goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.bench_engine import BenchEngine, BenchText, PolicySystem
from perf.chat_data import Chat, ChatTurn
from perf.evaluate import result_key
from perf.evaluation.attention_share import AttentionShare, attention_share
from perf.evaluation.peers import tokenize
from perf.evaluation.tasks import make_task
from perf.peer_model import PeerModel, transformers_model
from perf.serve import DEFAULT_ENGINE
from perf.server import REPO_ROOT
from perf.teacher import Teacher
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.errors import CommitKVError, ConfigError
from runtime.wiring import load_chat_format, load_tokenizer

FULL = "full"
DOCUMENT_TOKENS, PART_TOKENS, SUMMARY_TOKENS = 7000, 500, 64
CONVERSATION_TOKENS = 4000
ASK = "Summarize everything above in a few sentences."
SUMMARY = "document, summary"
CONVERSATION = "conversation"


@dataclass(frozen=True)
class Claim:
    """What was proposed of one kind of policy, in per cent; None: nothing.   policies: ours of that kind."""

    name: str
    policies: tuple[str, ...]
    memory: str
    latency: str
    kept: str


CLAIMS = (
    Claim("full cache", (FULL,), "0", "0", "100"),
    Claim("PyramidKV", ("pyramidkv-pooled", "pyramidkv-layered"), "58", "56", "93"),
    Claim("R-KV", ("rkv-gated", "rkv-redundancy"), "62", "48", "97"),
    Claim("alternating", ("pyramidkv-rkv-alternating",), "65", "61", "95"),
    Claim("CommitKV", ("commitkv", "commitkv-gate"), "40 to 60", "30", "95 of turns unharmed"),
)
OVERHEAD_CLAIM = "5 to 8"


@dataclass(frozen=True)
class Found:
    """Shares, 0 to 1, of one policy in one setting.   kept: of the full cache's accuracy, or of the summary's words.

    kl: to the full cache, nats.   unharmed: turns equivalent to the full cache's, None where not asked.
    manager: share of a turn with its commits.
    """

    policy: str
    setting: str
    tokens: int
    memory_saved: float
    latency_saved: float
    kept: float
    kl: float
    unharmed: float | None
    manager: float


Times = dict[str, tuple[float, float]]


class Parts:
    """What was measured before, in one file of a folder, part by part. Another engine's is forgotten."""

    def __init__(self, folder: Path, title: str) -> None:
        self._file = folder / "parts.json"
        self._parts: dict[str, Any] = {"title": title}
        if self._file.is_file():
            found = json.loads(self._file.read_text(encoding="utf-8"))
            self._parts = found if found.get("title") == title else self._parts

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """A part as JSON gives it back, measured now if it never was."""
        if name not in self._parts:
            self._parts[name] = measure()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._parts, indent=1) + "\n", encoding="utf-8")
        return json.loads(json.dumps(self._parts[name]))


def measure_times(args: argparse.Namespace, policies: list[str], contexts: Sequence[int]) -> dict[str, Times]:
    """By context and policy: share of the full cache's time per decode step that is saved (median of rounds,
    alternated), and the manager's share of a turn. Conversations grow from one context to the next. Raises
    CommitKVError."""
    config = RuntimeConfig(kv_memory_bytes=args.kv_mib << 20)
    bench = BenchEngine(args.engine, config, BenchText(args.engine, max(contexts) + 600))
    systems = [PolicySystem(bench, policy) for policy in policies]
    return {str(context): _times(systems, context, args.rounds) for context in sorted(contexts)}


def _times(systems: list[PolicySystem], context: int, rounds: int) -> Times:
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    shares: dict[str, float] = {}
    for system in tqdm(systems, desc=f"holding {context} tokens", file=sys.stdout):
        system.begin(context, 1)
        shares[system.name] = system.turn_share()
    for _ in range(rounds):
        for system in systems:
            times[system.name].append(statistics.median(system.decode(9, 5.0).step_ms[1:]))
    full = times[FULL]
    return {
        name: (1 - statistics.median(a / b for a, b in zip(ms, full, strict=True)), shares[name])
        for name, ms in times.items()
    }


def document(engine_dir: Path) -> Chat:
    """A document in parts, then the request for a summary, which the full cache answers for itself."""
    text = BenchText(engine_dir, DOCUMENT_TOKENS)
    parts = [text.piece(at, PART_TOKENS) for at in range(0, DOCUMENT_TOKENS - PART_TOKENS + 1, PART_TOKENS)]
    turns = [ChatTurn(f"Part {i + 1} of the document: {part}", "I have read it.", f"part {i + 1}")
             for i, part in enumerate(parts)]  # fmt: skip
    return Chat("document", None, (*turns, ChatTurn(ASK, None, "summary")))


def summarize(engine_dir: Path, policies: list[str], kv_mib: int) -> dict[str, tuple[int, float, float, float]]:
    """Per policy: tokens, memory saved, share of the summary's words kept, KL. Raises CommitKVError."""
    teacher = Teacher(engine_dir, RuntimeConfig(kv_memory_bytes=kv_mib << 20), SUMMARY_TOKENS)
    chat = document(engine_dir)
    teacher.check_length(chat)
    like = teacher.refer(chat)
    tokens = like.kv.active + like.kv.staged + like.kv.committed + like.kv.evicted
    found = {FULL: (tokens, 0.0, 1.0, 0.0)}
    for policy in tqdm([p for p in policies if p != FULL], desc="summaries", file=sys.stdout):
        telling = teacher.tell(chat, policy, like)
        last = telling.scores[-1]
        found[policy] = (tokens, 1 - telling.kv.kv_bytes / telling.kv.kv_full_bytes, last.agreement, last.kl)
    return found


def of_conversation(quality: Path, policies: list[str]) -> dict[str, dict[str, Any]]:
    """Scores of the longest conversations that perf.evaluate measured. Raises ConfigError."""
    try:
        scores = json.loads(quality.read_text(encoding="utf-8"))["scores"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--quality: {quality} cannot be read ({error}), expected scores; run python -m perf.evaluate"
        ) from error
    longest = max(score["num_tokens"] for score in scores)
    found = {score["policy"]: score for score in scores if score["num_tokens"] == longest}
    missing = [policy for policy in policies if policy not in found]
    if missing:
        raise ConfigError(f"--quality: {quality} has no {', '.join(missing)} at {longest} tokens; run perf.evaluate")
    return found


def where_attention_falls(engine_dir: Path) -> AttentionShare:
    """Of one generated conversation under the full cache."""
    manifest = manifests.load(engine_dir, verify=False)
    tokenizer = load_tokenizer(engine_dir, manifest)
    task = tokenize(make_task(0, CONVERSATION_TOKENS), tokenizer, load_chat_format(engine_dir, manifest))
    model = transformers_model(PeerModel(engine_dir, manifest.model, "fp32", (), 0))
    return attention_share(model, task.turns)


def markdown(found: list[Found], attention: AttentionShare) -> str:
    """Both tables."""
    lines = [
        "| proposed as | policy | setting | memory saved, % | latency saved, % | accuracy kept, % | KL | manager, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        overhead = "0" if claim.policies == (FULL,) else OVERHEAD_CLAIM
        lines.append(
            f"| **{claim.name}**, claimed | | | {claim.memory} | {claim.latency} | {claim.kept} | | {overhead} |"
        )
        for f in (f for f in found if f.policy in claim.policies):
            unharmed = "" if f.unharmed is None else f" ({100 * f.unharmed:.0f} of turns unharmed)"
            lines.append(
                f"| | {f.policy} | {f.setting}, {f.tokens:,} tokens | {100 * f.memory_saved:.0f} | "
                f"{100 * f.latency_saved:.0f} | {100 * f.kept:.0f}{unharmed} | {f.kl:.3f} | {100 * f.manager:.1f} |"
            )
    lines += ["", "| where attention falls (full cache) | measured |", "|---|---|",
              f"| weight on the most read 5 % of keys, first token left out | {100 * attention.top:.0f} % |",
              f"| the same with the first token | {100 * attention.top_with_sink:.0f} % |"]  # fmt: skip
    for ((first, last), share), even in zip(attention.by_distance, attention.per_token, strict=True):
        turns = f"{first} to {last} turns" if last < 10**6 else f"more than {first - 1} turns"
        lines.append(
            f"| of the weight on past turns, {turns} back | {100 * share:.0f} % ({even:.2f} of an even share) |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> tuple[list[Found], AttentionShare]:
    """Raises CommitKVError."""
    policies = [policy for claim in CLAIMS for policy in claim.policies]
    held = of_conversation(args.quality, policies)
    parts = Parts(args.output, result_key(args.engine, None))
    attention = AttentionShare(**parts.get("attention", lambda: asdict(where_attention_falls(args.engine))))
    summaries = parts.get("summaries", lambda: summarize(args.engine, policies, args.kv_mib))
    contexts = CONVERSATION_TOKENS, DOCUMENT_TOKENS
    times = parts.get("times", lambda: measure_times(args, policies, contexts))
    found: list[Found] = []
    for policy in policies:
        score, full = held[policy], held[FULL]
        latency, manager = times[str(CONVERSATION_TOKENS)][policy]
        found.append(Found(
            policy, CONVERSATION, round(score["tokens"]), 1 - score["kv_share"], latency,
            score["accuracy"]["value"] / full["accuracy"]["value"], score["kl"]["value"],
            score["equivalent"]["value"], manager,
        ))  # fmt: skip
        tokens, saved, kept, kl = summaries[policy]
        latency, manager = times[str(DOCUMENT_TOKENS)][policy]
        found.append(Found(policy, SUMMARY, tokens, saved, latency, kept, kl, None, manager))
    return found, attention


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.claims", description="Claimed figures beside measured ones.")
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--quality", type=Path, default=REPO_ROOT / "perf" / "results" / "quality.json", help="(%(default)s)")
    add("--output", type=Path, default=REPO_ROOT / "out" / "claims", help="folder (%(default)s)")
    add("--rounds", type=int, default=5, help="rounds of decode steps (%(default)s)")
    add("--kv-mib", type=int, default=2048, help="KV memory in MiB (%(default)s)")
    args = parser.parse_args(argv)
    try:
        for name in ("rounds", "kv_mib"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1")
        found, attention = run(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    table = markdown(found, attention)
    record = {"found": [asdict(f) for f in found], "attention": asdict(attention)}
    (args.output / "claims.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (args.output / "claims.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nwritten: {args.output}/claims.json, claims.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
