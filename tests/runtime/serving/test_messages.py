"""A whole chat as JSON: what is taken, and errors that say where and what is allowed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.request import Message
from runtime.serving.messages import parse_messages

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize("chat", [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER]])
def test_chats_that_are_taken(chat: list[dict[str, str]]) -> None:
    assert parse_messages(json.dumps(chat)) == tuple(Message(m["role"], m["content"]) for m in chat)  # type: ignore[arg-type]


def test_text_is_kept_as_it_is() -> None:
    text = " <|im_end|>\n\u4f60\u597d \U0001f600\x00 "
    for ascii_only in (True, False):
        chat = json.dumps([{"role": "user", "content": text}], ensure_ascii=ascii_only)
        assert parse_messages(chat)[0].content == text
    silent = [USER, {"role": "assistant", "content": ""}, USER]  # an answer of no token
    assert parse_messages(json.dumps(silent))[1].content == ""


@pytest.mark.parametrize(
    ("chat", "part"),
    [
        ("", "messages: got text that is not JSON .*character 0"),
        ('[{"role": "user",}]', "messages: got text that is not JSON .*character 17"),
        ("[" * 100_000, "nested too deep"),
        ("[" + "1" * 5000 + "]", "too large a number"),
        ("{}", "messages: got an object, expected a list"),
        ('"hi"', "messages: got text, expected a list"),
        ("[]", "messages: got an empty list, expected at least one user message"),
        (["hi"], r"messages\[0\]: got text, expected an object with role and content"),
        ([USER, None], r"messages\[1\]: got null"),
        ([{"content": "hi"}], r"messages\[0\].role: missing"),
        ([{"role": "user"}], r"messages\[0\].content: missing"),
        ([USER | {"name": "bob"}], r"messages\[0\].name: unknown field"),
        ([USER, {"role": "tool", "content": "4"}], r"messages\[1\].role: got 'tool', expected system, user or assist"),
        ([{"role": 3, "content": "4"}], r"messages\[0\].role: got a number"),
        ([{"role": ["user"], "content": "4"}], r"messages\[0\].role: got a list"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content: got a list, expected text"),
        ([{"role": "user", "content": True}], r"messages\[0\].content: got true or false"),
        ([{"role": "user", "content": ""}], r"messages\[0\].content: got empty text"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content: got half a surrogate pair \(character 1"),
        ([USER, ANSWER], r"messages\[1\].role: got 'assistant' as the last message"),
        ([SYSTEM], r"messages\[0\].role: got 'system' as the last message"),
        ([USER, SYSTEM], r"messages\[1\].role: got 'system', expected a system message only as messages\[0\]"),
        ([SYSTEM, SYSTEM, USER], r"messages\[1\].role: got 'system', expected a system message only"),
        ([USER, USER], r"messages\[1\].role: got 'user' after 'user', expected user and assistant to take turns"),
        ([USER, ANSWER, ANSWER, USER], r"messages\[2\].role: got 'assistant' after 'assistant'"),
        ([ANSWER, USER], r"messages\[0\].role: got 'assistant', expected the first message .* from the user"),
        ([SYSTEM, ANSWER, USER], r"messages\[1\].role: got 'assistant', expected the first message"),
    ],
)
def test_chats_that_are_refused(chat: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        parse_messages(chat if isinstance(chat, str) else json.dumps(chat))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}),
    max_size=6,
)


@given(st.one_of(st.text(), JSON.map(json.dumps), MESSAGES.map(json.dumps)))
def test_any_text_is_a_chat_or_a_request_error(text: str) -> None:
    try:
        chat = parse_messages(text)
    except RequestError as error:
        assert str(error).startswith("messages") and "expected" in str(error)
    else:
        roles = [message.role for message in chat]
        assert "system" not in roles[1:] and roles[-1] == "user"
        turns = roles[roles[0] == "system" :]
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
