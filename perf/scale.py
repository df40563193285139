"""`python -m perf.scale`: two servers behind a real proxy; one is killed, comes back, and is killed again.

Conversations take turns all the while. The table says what became of them: whether each went on from its last turn,
with its KV where it was, restored from a checkpoint by the other server, or recomputed; and whether a turn was lost
although its client asked again. The same turns are then taken without any failure, and the answers compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from perf.load.turn_stream import Answer, Requests, Target, turn_values
from perf.many import message
from perf.ports import free_ports
from perf.proxy import HOST, Proxy, ProxyKind, Replica
from perf.serve import add_engine_arguments, server_options
from perf.server import REPO_ROOT, ServerOptions, TritonServer
from runtime import manifest
from runtime.errors import CommitKVError, ConfigError
from runtime.retelling import NOTE

RETRY_S = 0.25
MAX_TRIES = 120
WRITTEN_S = 10.0  # most that the end of an answer waits for its checkpoint
NOTICE_S = 6.0  # until a proxy tries a replica again that had failed

# How a turn found the conversation. kept: the server held it.   restored: from a checkpoint, KV and all.
# recomputed: its text was there, its KV was not.   cut: without the newest of what the client has seen.
# retold: the turn had been taken, its answer was lost on the way and is told again.
Way = Literal["new", "kept", "retold", "restored", "recomputed", "cut"]
WORDS: dict[Way, str] = {
    "kept": "conversations that stayed where their KV was",
    "retold": "conversations whose turn was over, and its answer lost on the way and told again",
    "restored": "conversations that moved, KV restored from the checkpoint",
    "recomputed": "conversations that moved, KV recomputed from the text",
    "cut": "conversations that lost a turn they had had",
}
WAYS = tuple(WORDS)


@dataclass(frozen=True)
class Plan:
    """turns: of each conversation in each of the four parts.   think_s: between an answer and the next turn."""

    conversations: int = 10
    turns: int = 2
    message_words: int = 40
    answer_tokens: int = 48
    think_s: float = 0.5


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one conversation.   tries: 1 when the first was answered.   text: None when none was.

    history_tokens: what the conversation held before, as the turn before said.
    """

    conversation: int
    turn: int
    tries: int
    text: str | None
    way: Way
    seconds: float
    history_tokens: int


@dataclass(frozen=True)
class Part:
    """What happened in one part of the run. Turns, then conversations by the way in which they were found."""

    name: str
    turns: int
    lost: int
    retried: int
    longest_s: float
    conversations: dict[Way, int]


@dataclass(frozen=True)
class Report:
    """same_answers, compared: turns whose answer is that of the run without failures, of all."""

    plan: Plan
    proxy: str
    policy: str
    parts: tuple[Part, ...]
    same_answers: int
    compared: int

    @property
    def lost(self) -> int:
        return sum(part.lost for part in self.parts)

    def found(self, way: Way) -> int:
        """Conversations found in this way, over the four parts."""
        return sum(part.conversations[way] for part in self.parts)


def way_of(answer: Answer, history_tokens: int) -> Way:
    """How a turn found its conversation; see `Way`."""
    turn = answer.turn
    held = int(turn["reused_tokens"]) + int(turn["recomputed_tokens"])
    if history_tokens == 0:
        return "new"
    if held < history_tokens:
        return "cut"
    if NOTE in turn["recomputed_reason"]:
        return "retold"
    if turn["recomputed_tokens"]:
        return "recomputed"
    return "restored" if "restored from a checkpoint" in turn["recomputed_reason"] else "kept"


def must_retry(answer: Answer) -> bool:
    """Whether the connection broke or the server was not to be had: asking again is safe and may help."""
    broke = answer.error.startswith("INTERNAL: ") and "RST_STREAM" in answer.error
    return answer.status in ("unreachable", "unanswered") or broke or answer.busy


class Talk:
    """One conversation: its texts are drawn from its number, and it remembers how much it should be holding."""

    def __init__(self, index: int, plan: Plan, prefix: str, token_bytes: int) -> None:
        self.index = index
        self._plan = plan
        self._name = f"{prefix}-{index}"
        self._token_bytes = token_bytes
        self._turn = 0
        self._history_tokens = 0

    async def take_turn(self, requests: Requests) -> TurnRecord:
        """Asks until the answer is whole."""
        text = message(1000 * self.index + self._turn, self._plan.message_words)
        values = turn_values(text, self._name, self._plan.answer_tokens, turn_id=str(self._turn))
        begin, history = time.monotonic(), self._history_tokens
        for tries in range(1, MAX_TRIES + 1):
            answer = await requests.ask(values, f"{self._name}/{self._turn}/{tries}")
            if not must_retry(answer):
                break
            await asyncio.sleep(RETRY_S)
        turn, self._turn = self._turn, self._turn + 1
        seconds = time.monotonic() - begin
        if answer.status != "ok":
            return TurnRecord(self.index, turn, tries, None, "cut", seconds, history)
        self._history_tokens = answer.kv["kv_full_bytes"] // self._token_bytes
        return TurnRecord(self.index, turn, tries, answer.text, way_of(answer, history), seconds, history)

    async def take_turns(self, requests: Requests) -> list[TurnRecord]:
        records = []
        for _ in range(self._plan.turns):
            records.append(await self.take_turn(requests))
            await asyncio.sleep(self._plan.think_s)
        return records


def part_of(name: str, records: Sequence[TurnRecord]) -> Part:
    """A conversation counts once, by the worst way in which one of its turns found it."""
    order: tuple[Way, ...] = ("new", *WAYS)
    worst: dict[int, Way] = {}
    for record in records:
        worst[record.conversation] = max(worst.get(record.conversation, "new"), record.way, key=order.index)
    counts = Counter(worst.values())
    return Part(
        name=name,
        turns=len(records),
        lost=sum(record.text is None for record in records),
        retried=sum(record.tries > 1 for record in records),
        longest_s=max(record.seconds for record in records),
        conversations={way: counts[way] for way in WAYS},
    )


class Cluster:
    """Two servers with one folder of checkpoints, behind a proxy. An asynchronous context manager."""

    def __init__(self, options: ServerOptions, proxy: ProxyKind) -> None:
        ports = free_ports(HOST, 6)
        self._options = [
            replace(options, http_port=h, grpc_port=g, metrics_port=m)
            for h, g, m in zip(ports[::3], ports[1::3], ports[2::3], strict=True)
        ]
        self.servers = [TritonServer(one) for one in self._options]
        self._kind = proxy
        self._proxy: Proxy | None = None

    @property
    def url(self) -> str:
        assert self._proxy is not None
        return self._proxy.grpc_url

    async def __aenter__(self) -> Cluster:
        try:
            await asyncio.gather(*(asyncio.to_thread(server.start) for server in self.servers))
            self._proxy = Proxy(self._kind, [Replica(one.grpc_url, one.http_url) for one in self.servers]).start()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
        for server in self.servers:
            server.stop(grace_s=0.0)

    def kill(self, index: int) -> None:
        """SIGKILL to the server and its model, as if the machine had gone."""
        os.killpg(self.servers[index].pid, signal.SIGKILL)
        self.servers[index].wait()

    async def start_again(self, index: int) -> None:
        """On the same ports, with nothing in memory; returns when the proxy may send it turns again."""
        self.servers[index].stop(grace_s=0.0)
        self.servers[index] = TritonServer(self._options[index])
        await asyncio.to_thread(self.servers[index].start)
        await asyncio.sleep(NOTICE_S)

    async def busiest(self) -> int:
        """The server that holds most conversations."""
        held = []
        for server in self.servers:
            async with Requests(Target(server.grpc_url)) as direct:
                held.append(int((await direct.stats()).stats["engine"]["conversations"]))
        return held.index(max(held))

    async def wait_busy(self, index: int, timeout_s: float = 20.0) -> None:
        """Until a server runs a turn, so that a kill meets it in the middle."""
        async with Requests(Target(self.servers[index].grpc_url)) as direct:
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                answer = await direct.stats()
                if answer.status != "ok" or answer.stats["engine"]["running"]:
                    return


async def run_parts(cluster: Cluster, plan: Plan, token_bytes: int) -> AsyncIterator[tuple[Part, list[TurnRecord]]]:
    """The four parts, each as soon as it is over."""
    talks = [Talk(index, plan, "scale", token_bytes) for index in range(plan.conversations)]
    victim = 0
    async with Requests(Target(cluster.url)) as requests:
        for name in ("both up", "one killed", "it is back", "killed again"):
            if name == "one killed":
                victim = await cluster.busiest()
            if name == "it is back":
                await cluster.start_again(victim)
            turns = asyncio.gather(*(talk.take_turns(requests) for talk in talks))
            if "killed" in name:
                await cluster.wait_busy(victim)
                cluster.kill(victim)
            records = [record for of_talk in await turns for record in of_talk]
            yield part_of(name, records), records


async def undisturbed(url: str, plan: Plan, token_bytes: int, num_parts: int) -> dict[tuple[int, int], str | None]:
    """Answers of the same conversations on one server that nothing happens to, by conversation and turn."""
    talks = [Talk(index, replace(plan, think_s=0.0), "calm", token_bytes) for index in range(plan.conversations)]
    texts: dict[tuple[int, int], str | None] = {}
    async with Requests(Target(url)) as requests:
        for _ in range(num_parts):
            for records in await asyncio.gather(*(talk.take_turns(requests) for talk in talks)):
                texts |= {(record.conversation, record.turn): record.text for record in records}
    return texts


async def run_scale(options: ServerOptions, plan: Plan, proxy: ProxyKind = "nginx") -> Report:
    """The whole run. `options` name an engine; checkpoints go to a folder of their own. Raises CommitKVError."""
    model = manifest.load(Path(options.parameters["engine_dir"])).model
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2  # K and V in fp16
    with tempfile.TemporaryDirectory(prefix="commitkv-checkpoints-") as folder:
        # No client hears that its turn is over before it is written: then a kill loses nothing that was answered.
        written = {"checkpoint_url": folder, "checkpoint_wait_s": str(WRITTEN_S)}
        kept = replace(options, parameters={**options.parameters, **written})
        parts: list[Part] = []
        answers: dict[tuple[int, int], str | None] = {}
        async with Cluster(kept, proxy) as cluster:
            async for part, records in run_parts(cluster, plan, token_bytes):
                print(f"  {part.name}: {part.turns - part.lost} of {part.turns} turns answered", flush=True)
                parts.append(part)
                answers |= {(record.conversation, record.turn): record.text for record in records}
            alive = next(server for server in cluster.servers if server.returncode is None)
            calm = await undisturbed(alive.grpc_url, plan, token_bytes, len(parts))
    same = sum(calm[key] is not None and calm[key] == text for key, text in answers.items())
    policy = options.parameters.get("default_policy", "the engine's own")
    return Report(plan, proxy, policy, tuple(parts), same, len(answers))


def markdown(report: Report) -> str:
    """The report as a Markdown table, one column per part."""
    rows: list[tuple[str, list[str]]] = [
        ("turns", [str(part.turns) for part in report.parts]),
        ("turns lost after retry", [str(part.lost) for part in report.parts]),
        ("turns whose client had to retry", [str(part.retried) for part in report.parts]),
        ("longest turn, retries included, s", [f"{part.longest_s:.1f}" for part in report.parts]),
        *((WORDS[way], [str(part.conversations[way]) for part in report.parts]) for way in WAYS),
    ]
    head = f"| {report.plan.conversations} conversations | {' | '.join(part.name for part in report.parts)} |"
    table = [head, "|---|" + "---:|" * len(report.parts), *(f"| {n} | {' | '.join(v)} |" for n, v in rows)]
    same = f"Answers as in a run without failures: {report.same_answers} of {report.compared} (policy {report.policy})."
    if report.policy != "full":
        same += "\nOther policies compress while a conversation waits, and answer by what they had time for."
    return "\n".join([*table, "", same])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.scale", description=__doc__)
    add_engine_arguments(parser)
    parser.set_defaults(kv_mib=512, threads=1)
    plan = Plan()
    parser.add_argument("--proxy", choices=("nginx", "envoy"), default="nginx", help="(%(default)s)")
    parser.add_argument("--policy", help="policy of the conversations (the engine's own)")
    parser.add_argument("--conversations", type=int, default=plan.conversations, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=plan.turns, help="of each, in each of four parts (%(default)s)")
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "scale", help="(%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        for name in ("conversations", "turns"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(args, name)}, expected at least 1; pass a larger number")
        options = server_options(args.engine, args.kv_mib, args.threads, args.policy)
        plan = Plan(args.conversations, args.turns)
        print(f"starting two servers behind {args.proxy} ...", flush=True)
        report = asyncio.run(run_scale(options, plan, args.proxy))
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        (args.output / "report.md").write_text(markdown(report) + "\n", encoding="utf-8")
        print(f"\n{markdown(report)}\n\nwritten: {args.output}/report.json, report.md")
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the servers are stopped", file=sys.stderr)
        return 130
    return 1 if report.lost or report.found("cut") else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
