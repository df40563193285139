"""Chats are found by their longest common beginning, within a tenant, and forgotten with their conversation."""

from __future__ import annotations

from runtime.chat_index import MAX_BEGINNINGS, ChatIndex
from runtime.request import Message

SYSTEM = Message("system", "be kind")


def chat(*texts: str, system: bool = True) -> tuple[Message, ...]:
    turns = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    return (SYSTEM, *turns) if system else tuple(turns)


def test_the_longest_common_beginning_comes_first_then_the_newest() -> None:
    index = ChatIndex()
    index.put(1, "x", chat("a", "b"))
    index.put(2, "x", chat("a", "b", "c", "d"))
    index.put(3, "x", chat("a", "other"))
    index.put(4, "x", chat("a", "b"))
    assert list(index.find("x", chat("a", "b", "c", "d", "e"))) == [(2, 5), (4, 3), (1, 3), (3, 2)]
    assert list(index.find("x", chat("a", "b", "z"))) == [(4, 3), (2, 3), (1, 3), (3, 2)]


def test_a_system_prompt_alone_is_nothing_in_common() -> None:
    index = ChatIndex()
    index.put(1, "x", chat("a", "b"))
    assert list(index.find("x", chat("z"))) == []
    assert list(index.find("x", chat("a", "b", system=False))) == []


def test_roles_and_borders_of_messages_count() -> None:
    index = ChatIndex()
    index.put(1, "x", (Message("user", "ab"), Message("assistant", "c")))
    assert list(index.find("x", (Message("user", "a"), Message("assistant", "bc")))) == []
    assert list(index.find("x", (Message("assistant", "ab"),))) == []


def test_tenants_find_only_their_own() -> None:
    index = ChatIndex()
    index.put(1, "x", chat("a", "b"))
    assert list(index.find("y", chat("a", "b", "c"))) == []


def test_putting_again_replaces_and_forgetting_leaves_nothing() -> None:
    index = ChatIndex()
    index.put(1, "x", chat("a", "b"))
    index.put(1, "x", chat("a", "c"))
    assert list(index.find("x", chat("a", "b"))) == [(1, 2)]
    index.forget(1)
    index.forget(1)
    assert len(index) == 0


def test_only_the_longest_beginnings_of_a_long_chat_are_kept() -> None:
    index = ChatIndex()
    long = chat(*(str(i) for i in range(4 * MAX_BEGINNINGS)))
    index.put(1, "x", long)
    assert len(index) == MAX_BEGINNINGS
    assert list(index.find("x", long[:-10])) == [(1, len(long) - 10)]
    assert list(index.find("x", long[:9])) == []


def test_half_a_surrogate_pair_is_text_too() -> None:
    index = ChatIndex()
    index.put(1, "x", (Message("user", "\ud800"),))
    assert list(index.find("x", (Message("user", "\ud800"),))) == [(1, 1)]
