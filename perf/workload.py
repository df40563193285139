"""Conversations as JSONL, and running one against a server.

A line is {"role": "system" | "user", "content": text}; a user line may add "max_tokens", "protect": [[start, end]]
and "asks": {"fact": name, "expect": [text, ...]}: the answer is right when it holds any of those texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perf.client import Chat, KvState, TurnOptions, TurnResult
from runtime.errors import RequestError

CONVERSATIONS = Path(__file__).resolve().parent / "conversations"
DEFAULT_MAX_TOKENS = 40


@dataclass(frozen=True)
class Ask:
    """A question for a fact that an earlier turn stated."""

    fact: str
    expect: tuple[str, ...]

    def right(self, answer: str) -> bool:
        """Whether the answer holds one of the expected texts, in any case."""
        return any(text.lower() in answer.lower() for text in self.expect)


@dataclass(frozen=True)
class UserTurn:
    text: str
    max_tokens: int = DEFAULT_MAX_TOKENS
    ask: Ask | None = None
    protect: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Conversation:
    name: str
    system: str | None
    turns: tuple[UserTurn, ...]


def load_conversation(path: Path) -> Conversation:
    """Raises RequestError that names the file and line."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"conversation {path}: cannot be read as text ({error}); pass a JSONL file") from error
    system: str | None = None
    turns: list[UserTurn] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["role"] == "system" and number == 1:
                system = str(record["content"])
            elif record["role"] == "user" and record["content"]:
                turns.append(_user_turn(record))
            else:
                raise ValueError('expected role "user" with content, or "system" on the first line')
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"conversation {path}, line {number}: {error}; see perf/workload.py") from error
    if not turns:
        raise RequestError(f"conversation {path}: holds no user turn, expected at least one; see perf/workload.py")
    return Conversation(path.stem, system, tuple(turns))


def _user_turn(record: Mapping[str, Any]) -> UserTurn:
    asks = record.get("asks")
    return UserTurn(
        text=str(record["content"]),
        max_tokens=int(record.get("max_tokens", DEFAULT_MAX_TOKENS)),
        ask=None if asks is None else Ask(str(asks["fact"]), tuple(str(text) for text in asks["expect"])),
        protect=tuple((int(start), int(end)) for start, end in record.get("protect", ())),
    )


@dataclass(frozen=True)
class TurnRecord:
    """One turn as it went.

    kv: after the turn and the think time behind it.   kv_at_answer: when the answer was complete.
    peak_kv_bytes: the most that the conversation held at any moment so far.   think_s: idle time taken.
    right: whether the answer holds the fact that was asked for; None without a question.
    """

    turn: UserTurn
    result: TurnResult
    kv: KvState
    peak_kv_bytes: int
    think_s: float
    right: bool | None

    @property
    def kv_at_answer(self) -> KvState:
        return self.result.kv

    @property
    def tokens(self) -> int:
        """Prompt and answer."""
        return int(self.result.stats["turn"]["prompt_tokens"]) + self.result.generated_tokens


@dataclass(frozen=True)
class ManagerTimes:
    """Milliseconds the engine spent since its start; differences of two make a run's."""

    manager_ms: float
    commit_ms: float
    execute_ms: float
    probe_ms: float

    @classmethod
    def of(cls, engine: Mapping[str, Any]) -> ManagerTimes:
        """From the `engine` part of the server's report."""
        names = ("manager_time_ms", "commit_time_ms", "execute_time_ms", "probe_time_ms")
        return cls(*(float(engine[name]) for name in names))

    def since(self, before: ManagerTimes) -> ManagerTimes:
        return ManagerTimes(
            self.manager_ms - before.manager_ms,
            self.commit_ms - before.commit_ms,
            self.execute_ms - before.execute_ms,
            self.probe_ms - before.probe_ms,
        )

    @property
    def manager_ratio(self) -> float:
        """(planning + settling + commits) / (those + the model's own time on rows)."""
        managing = self.manager_ms + self.commit_ms
        busy = managing + self.execute_ms
        return managing / busy if busy else 0.0


@dataclass(frozen=True)
class Run:
    """One conversation under one policy."""

    policy: str
    records: tuple[TurnRecord, ...]
    times: ManagerTimes
    process: Mapping[str, int]

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)


def run_conversation(
    chat: Chat, conversation: Conversation, think_s: float, on_turn: Callable[[TurnRecord], None] | None = None
) -> Run:
    """Every turn in order, greedy. Between turns the client waits until the engine is idle, `think_s` at most,
    as an agent's tools or a reading user would. Raises TurnError, ServerUnreachableError."""
    chat = replace(chat, system_prompt=conversation.system)
    records: list[TurnRecord] = []
    begun = ManagerTimes.of(chat.server_stats()["engine"])
    report: Mapping[str, Any] = {}
    for turn in conversation.turns:
        result = chat.turn(turn.text, TurnOptions(max_tokens=turn.max_tokens, protect=turn.protect))
        thought = chat.wait_idle(think_s)
        kv, report = chat.state()
        right = None if turn.ask is None else turn.ask.right(result.text)
        record = TurnRecord(turn, result, kv, int(report["conversation"]["peak_kv_bytes"]), thought, right)
        records.append(record)
        if on_turn is not None:
            on_turn(record)
    times = ManagerTimes.of(report["engine"]).since(begun)
    return Run(chat.policy or "default", tuple(records), times, report["process"])
