import json
from pathlib import Path

import pytest

from perf.chat import protected_ranges
from perf.workload import CONVERSATIONS, Ask, ManagerTimes, load_conversation
from runtime.errors import RequestError


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted(CONVERSATIONS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_shipped_conversations_state_each_fact_before_it_is_asked(path: Path) -> None:
    conversation = load_conversation(path)
    asked = [(number, turn) for number, turn in enumerate(conversation.turns) if turn.ask]
    assert len(conversation.turns) >= 20
    assert len(asked) >= 5
    for number, turn in asked:
        assert turn.ask is not None
        stated = [n for n, t in enumerate(conversation.turns) if any(e in t.text for e in turn.ask.expect)]
        assert stated and min(stated) < number, f"turn {number + 1} asks for {turn.ask.fact} before it is said"
        assert not turn.ask.right(turn.text), f"turn {number + 1} gives {turn.ask.fact} away"


def test_demo_conversation_is_long() -> None:
    conversation = load_conversation(CONVERSATIONS / "oncall.jsonl")
    assert len(conversation.turns) >= 24
    assert sum(len(turn.text) for turn in conversation.turns) > 10_000


def test_an_answer_is_right_in_any_case() -> None:
    ask = Ask("tree", ("Birch", "birch tree"))
    assert ask.right("It is called BIRCH.")
    assert not ask.right("It is called Beech.")


@pytest.mark.parametrize(
    ("records", "part"),
    [
        ([], "line 1"),
        ([{"role": "system", "content": "a"}], "no user turn"),
        ([{"role": "assistant", "content": "x"}], "line 1"),
        ([{"role": "user", "content": ""}], "line 1"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "late"}], "line 2"),
        ([{"role": "user", "content": "a", "max_tokens": "many"}], "line 1"),
        ([{"role": "user", "content": "a", "asks": {"fact": "f"}}], "expect"),
        ([3], "line 1"),
    ],
)
def test_bad_conversations_name_the_line(tmp_path: Path, records: list[object], part: str) -> None:
    with pytest.raises(RequestError, match=part):
        load_conversation(write(tmp_path, *records))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        load_conversation(tmp_path / "none.jsonl")
    (tmp_path / "raw.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read"):
        load_conversation(tmp_path / "raw.jsonl")


def test_manager_ratio_is_of_the_difference() -> None:
    before = ManagerTimes(10.0, 0.0, 100.0, 5.0)
    run = ManagerTimes(20.0, 10.0, 280.0, 9.0).since(before)
    assert run == ManagerTimes(10.0, 10.0, 180.0, 4.0)
    assert run.manager_ratio == pytest.approx(20 / 200)
    assert ManagerTimes(0, 0, 0, 0).manager_ratio == 0.0


def test_protected_ranges_find_every_occurrence() -> None:
    text = "key 17, and again key 17"
    assert protected_ranges(text, ["key 17"]) == ((0, 6), (18, 24))
    assert protected_ranges(text, ["none"]) == ()
