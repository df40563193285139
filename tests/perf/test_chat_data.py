"""Reading a user's conversations: both forms, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf.chat_data import read_chats
from perf.workload import CONVERSATIONS
from runtime.errors import RequestError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def test_one_conversation_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", SYSTEM, user("a"), answer("b"), "", user("c"), user("d"), answer("e"))
    [chat] = read_chats([path])
    assert (chat.name, chat.system) == ("talk", "Be brief.")
    assert [(turn.user, turn.answer) for turn in chat.turns] == [("a", "b"), ("c", None), ("d", "e")]
    assert chat.turns[1].where == f"{path}, line 5"


def test_one_conversation_a_line(tmp_path: Path) -> None:
    first = {"messages": [SYSTEM, user("a"), answer("b")], "id": 7}
    chats = read_chats([write(tmp_path / "all.jsonl", first, {"messages": [user("c")]})])
    assert [(chat.name, chat.system, len(chat.turns)) for chat in chats] == [
        ("all:1", "Be brief.", 1),
        ("all:2", None, 1),
    ]


def test_the_shipped_conversations(tmp_path: Path) -> None:
    chats = read_chats(sorted(CONVERSATIONS.glob("*.jsonl")))
    assert len(chats) == 4 and all(len(chat.turns) > 20 for chat in chats)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["", " "], "is empty"),
        ([user("a"), "not json"], "line 2: Expecting value"),
        ([user("a"), "[1]"], "line 2: got list"),
        ([user("a"), {"role": "tool", "content": "x"}], "line 2: role 'tool', expected one of system, user, assistant"),
        ([{"content": "x"}], "line 1: role None"),
        ([user("a"), user("")], "line 2: content ''"),
        ([user("a"), {"role": "user", "content": 5}], "line 2: content 5"),
        ([user("a"), SYSTEM], "line 2: a system message after others"),
        ([answer("a")], "line 1: an answer without"),
        ([user("a"), answer("b"), answer("c")], "line 3: an answer without"),
        ([SYSTEM], "line 1: no user's message"),
        ([{"messages": []}], "line 1: messages is no list"),
        ([{"messages": [1]}], "line 1: messages is no list"),
        ([{"messages": [user("a")]}, {"messages": [{"role": "bot", "content": "x"}]}], "line 2: role 'bot'"),
        ([{"messages": [user("a")]}, user("b")], "line 2: got messages and whole conversations"),
        ([user("a"), {"messages": [user("b")]}], "line 2: got messages and whole conversations"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(RequestError) as caught:
        read_chats([path])
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes.jsonl", tmp_path / "absent.jsonl"):
        with pytest.raises(RequestError, match="cannot be read as text"):
            read_chats([path])
