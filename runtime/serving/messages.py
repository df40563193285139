"""The input tensor `messages`: a whole chat as JSON, [{"role": ..., "content": ...}, ...]."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeGuard

from runtime.errors import RequestError
from runtime.request import Message

_ROLES = ("system", "user", "assistant")
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'


def parse_messages(text: str) -> tuple[Message, ...]:
    """The chat, the newest user message last.

    A system message may come first; then user and assistant take turns. Raises RequestError that names the index and
    the field.
    """
    messages = [_message(f"messages[{i}]", item) for i, item in enumerate(_items(text))]
    first = 1 if messages and messages[0].role == "system" else 0
    for i, message in enumerate(messages):
        _check_order(messages, i, "user" if (i - first) % 2 == 0 else "assistant", starts=i <= first)
        _check_text(f"messages[{i}]", message)
    if len(messages) <= first or messages[-1].role != "user":
        last = len(messages) - 1
        raise RequestError(
            f"messages[{last}].role: got {messages[last].role!r} as the last message, expected the user's newest one, "
            f"which the answer follows; append it"
        )
    return tuple(messages)


def _items(text: str) -> list[Any]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"messages: got text that is not JSON ({error.msg} at character {error.pos}), expected a list like "
            f"{_EXAMPLE}; correct it"
        ) from error
    except (RecursionError, ValueError) as error:
        raise RequestError(
            f"messages: got JSON that is nested too deep or holds too large a number, expected a list like {_EXAMPLE}; "
            f"send only role and content"
        ) from error
    if not isinstance(items, list):
        raise RequestError(f"messages: got {_kind(items)}, expected a list like {_EXAMPLE}; put it in a list")
    if not items:
        raise RequestError("messages: got an empty list, expected at least one user message; add it")
    return items


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, dict):
        raise RequestError(f"{where}: got {_kind(item)}, expected an object with role and content; correct it")
    unknown = sorted(set(item) - {"role", "content"})
    if unknown:
        raise RequestError(f"{where}.{unknown[0][:40]}: unknown field, expected role and content only; leave it out")
    for name in ("role", "content"):
        if name not in item:
            raise RequestError(f"{where}.{name}: missing, expected text; add it")
    role, content = item["role"], item["content"]
    if not _is_role(role):
        got = repr(role[:40]) if isinstance(role, str) else _kind(role)
        raise RequestError(
            f"{where}.role: got {got}, expected system, user or assistant; give what tools return in a user message"
        )
    if not isinstance(content, str):
        raise RequestError(f"{where}.content: got {_kind(content)}, expected text; join its parts into one text")
    return Message(role, content)


def _check_order(messages: list[Message], index: int, expected: str, *, starts: bool) -> None:
    role = messages[index].role
    if role == expected or (role == "system" and index == 0):
        return
    where = f"messages[{index}].role: got {role!r}"
    if role == "system":
        raise RequestError(f"{where}, expected a system message only as messages[0]; move it to the front")
    if starts:
        raise RequestError(
            f"{where}, expected the first message (after the system's, if any) from the user; begin with theirs"
        )
    raise RequestError(
        f"{where} after {messages[index - 1].role!r}, expected user and assistant to take turns; "
        f"join the two messages into one"
    )


def _check_text(where: str, message: Message) -> None:
    if not message.content and message.role == "user":
        raise RequestError(f"{where}.content: got empty text, expected the user's message; send some text")
    try:
        message.content.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise RequestError(
            f"{where}.content: got half a surrogate pair (character {error.start}), expected text that UTF-8 can "
            f"write; send whole characters"
        ) from error


def _is_role(role: Any) -> TypeGuard[Literal["system", "user", "assistant"]]:
    return isinstance(role, str) and role in _ROLES


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")
