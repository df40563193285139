"""Conversations by handle, by id within a tenant, by request; what is remembered of those that the server ended."""

from __future__ import annotations

import pytest

from runtime import conversation_table
from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.errors import UnknownConversationError
from runtime.policy.registry import get_policy


def hold(table: ConversationTable, name: str | None, tenant: str = "") -> Conversation:
    conversation = Conversation(table.take_handle(), name, get_policy("full"), tenant)
    table.add(conversation)
    table.idle[conversation.handle] = conversation
    return conversation


def test_one_id_in_two_tenants_is_two_conversations() -> None:
    table = ConversationTable()
    mine, theirs = hold(table, "c", "a"), hold(table, "c", "b")
    assert table.known("a", "c") is mine and table.known("b", "c") is theirs
    assert list(table.of_tenant("b")) == [theirs] and len(table) == 2
    with pytest.raises(UnknownConversationError, match="'c'"):
        table.known("", "c")


def test_an_ended_id_is_free_at_once_though_the_conversation_is_still_held() -> None:
    table = ConversationTable()
    old = hold(table, "c")
    table.ask_end(old)
    assert list(table.ending.values()) == [old]
    new = hold(table, "c")
    table.remove(old)
    assert not table.ending and table.known("", "c") is new
    assert list(table) == [new] and list(table.idle.values()) == [new]


def test_the_reason_of_an_ending_is_told_within_the_tenant_until_the_id_is_taken_again() -> None:
    table = ConversationTable()
    table.forget_id(hold(table, "c", "a"), "ended after 600 s idle")
    for _ in range(2):
        with pytest.raises(UnknownConversationError, match=r"'c' was ended after 600 s idle; send the whole chat"):
            table.check_not_ended("a", "c")
    table.check_not_ended("b", "c")
    hold(table, "c", "a")
    table.check_not_ended("a", "c")
    assert table.take_ending("a", "c") is None


def test_an_ending_can_be_taken_note_of() -> None:
    table = ConversationTable()
    table.forget_id(hold(table, "c"), "ended after 1 s idle")
    assert table.take_ending("", "c") == "ended after 1 s idle"
    table.check_not_ended("", "c")


def test_endings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_table, "MAX_ENDINGS", 3)
    table = ConversationTable()
    for i in range(5):
        table.forget_id(hold(table, f"c{i}"), "ended")
    assert [table.take_ending("", f"c{i}") for i in range(5)] == [None, None, "ended", "ended", "ended"]
    table.forget_id(hold(table, None), "ended")  # nobody could ask for it
    assert not table._endings
