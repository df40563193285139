"""Logs are one JSON object a line and never quote what was said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from runtime.errors import ConfigError, RequestError, UnknownConversationError
from runtime.request import FinishEvent, KvStats, Request, TurnStats
from runtime.serving import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The root logger as it is afterwards again: pytest has handlers of its own there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    text = io.StringIO()
    yield text
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_turn_is_one_line_with_its_ids_and_no_text(stream: io.StringIO) -> None:
    logs.configure("info", stream)
    request = Request("r#1", "the secret is xyzzy", conversation_id="ada", system_prompt="xyzzy too", tenant="acme")
    logs.turn_arrived(request)
    stats = TurnStats(1_000_000, 3_000_000, 5_000_000, 9_000_000, 7, 3, 4, kv=KvStats(kv_bytes=50, kv_full_bytes=100))
    logs.turn_ended(request, FinishEvent("r#1", "stop", "xyzzy", stats))
    [line] = lines(stream)
    assert "xyzzy" not in stream.getvalue()
    assert line["event"] == "turn ended" and line["level"] == "info"
    assert (line["request_id"], line["conversation_id"], line["tenant"]) == ("r#1", "ada", "acme")
    assert (line["queue_ms"], line["first_token_ms"], line["turn_ms"]) == (2.0, 4.0, 8.0)
    assert (line["prompt_tokens"], line["generated_tokens"], line["kv_bytes"]) == (7, 4, 50)
    assert "recomputed_reason" not in line
    assert str(line["time"]).endswith("Z")


def test_debug_also_tells_when_a_turn_arrives(stream: io.StringIO) -> None:
    logs.configure("debug", stream)
    logs.turn_arrived(Request("r", "hello"))
    assert [line["event"] for line in lines(stream)] == ["turn arrived"]


def test_a_refusal_says_what_it_is_about_and_quotes_nothing(stream: io.StringIO) -> None:
    logs.configure("info", stream)
    logs.refused("r", "ada", UnknownConversationError("conversation_id: got 'xyzzy', expected"), "unknown_conversation")
    logs.refused("r", None, RequestError("xyzzy is all of it"), "invalid")
    first, second = lines(stream)
    assert "xyzzy" not in stream.getvalue()
    assert (first["about"], first["reason"]) == ("conversation_id", "unknown_conversation")
    assert "about" not in second and "conversation_id" not in second


def test_records_of_others_and_tracebacks_stay_on_one_line(stream: io.StringIO) -> None:
    logs.configure("warning", stream)
    logging.getLogger("else").info("not this")
    try:
        raise ValueError("broke\nhere")
    except ValueError:
        logging.getLogger("else").exception("it %s", "broke")
    [line] = lines(stream)
    assert (line["event"], line["logger"], line["level"]) == ("it broke", "else", "error")
    assert "ValueError" in str(line["traceback"]) and line["error"] == "ValueError('broke\\nhere')"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_level: got 'loud', expected one of debug, info"):
        logs.configure("loud")
