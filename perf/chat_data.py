"""A user's own conversations, as JSONL, for calibration.

One conversation a file, a message a line: {"role": "system" | "user" | "assistant", "content": text}, as in
perf/conversations; or one a line: {"messages": [message, ...]}. A system message comes first if at all; then users and
assistants take turns, beginning with a user. Missing answers are fine. Other fields are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import RequestError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatTurn:
    """user: the message.   answer: what was answered then, or None.   where: file and line, for errors."""

    user: str
    answer: str | None
    where: str


@dataclass(frozen=True)
class Chat:
    name: str
    system: str | None
    turns: tuple[ChatTurn, ...]


def read_chats(paths: Sequence[Path]) -> list[Chat]:
    """Every conversation of the files. Raises RequestError naming file and line."""
    return [chat for path in paths for chat in _read_file(path)]


def _read_file(path: Path) -> list[Chat]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--data: {path} cannot be read as text ({error}), expected a JSONL file") from error
    records = [(f"{path}, line {i}", _record(line, f"{path}, line {i}")) for i, line in _lines(text)]
    if not records:
        raise RequestError(f"--data: {path} is empty, expected a conversation; see perf/chat_data.py")
    per_line = ["messages" in record for _, record in records]
    if any(per_line) and not all(per_line):
        where = records[per_line.index(not per_line[0])][0]
        raise RequestError(
            f"--data: {where}: got messages and whole conversations in one file, expected one kind of line"
        )
    if not per_line[0]:
        return [_chat(path.stem, records)]
    return [
        _chat(f"{path.stem}:{number}", [(where, message) for message in _messages(record, where)])
        for number, (where, record) in enumerate(records, 1)
    ]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered from 1; blank ones left out."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(f"--data: {where}: {error}, expected a line of JSON") from error
    if not isinstance(record, dict):
        raise RequestError(f"--data: {where}: got {type(record).__name__}, expected a JSON object")
    return record


def _messages(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RequestError(f"--data: {where}: messages is no list of objects, expected role and content in each")
    return messages


def _chat(name: str, messages: Sequence[tuple[str, dict[str, Any]]]) -> Chat:
    system: str | None = None
    turns: list[ChatTurn] = []
    for number, (where, message) in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(f"--data: {where}: role {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str) or not content:
            raise RequestError(f"--data: {where}: content {content!r:.60}, expected text of one character or more")
        if role == "system":
            if number:
                raise RequestError(f"--data: {where}: a system message after others, expected it first or not at all")
            system = content
        elif role == "user":
            turns.append(ChatTurn(content, None, where))
        elif not turns or turns[-1].answer is not None:
            raise RequestError(f"--data: {where}: an answer without a user's message before it")
        else:
            turns[-1] = ChatTurn(turns[-1].user, content, turns[-1].where)
    if not turns:
        raise RequestError(f"--data: {messages[0][0]}: no user's message follows, expected at least one")
    return Chat(name, system, tuple(turns))
