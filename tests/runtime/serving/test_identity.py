"""Ids that a server signs: its own are taken, everything else is refused alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError, UnknownConversationError
from runtime.serving.identity import SignedIds, read_salt

SALT = b"0123456789abcdef"
IDS = SignedIds(SALT)


def refused(tenant: str, conversation_id: str) -> str:
    with pytest.raises(UnknownConversationError) as caught:
        IDS.check(tenant, conversation_id)
    return str(caught.value).replace(repr(conversation_id), "")


def test_replicas_with_the_same_salt_take_each_others_ids() -> None:
    drawn = IDS.new_id("acme")
    SignedIds(SALT).check("acme", drawn)
    assert drawn.isprintable() and len(drawn) < 64
    assert len({IDS.new_id("acme") for _ in range(100)}) == 100


def test_an_id_opens_nothing_for_another_tenant_or_under_another_salt() -> None:
    drawn = IDS.new_id("acme")
    # One message for all: it must not tell a stolen id from one that was never drawn.
    assert refused("other", drawn) == refused("acme", "guess") == refused("", drawn)
    with pytest.raises(UnknownConversationError):
        SignedIds(b"another salt 123").check("acme", drawn)


def test_tenant_and_nonce_cannot_be_shifted_into_each_other() -> None:
    nonce, _, signature = IDS.new_id("ab").rpartition(".")
    refused("a", f"b{nonce}.{signature}")
    refused("", f"ab{nonce}.{signature}")


@given(st.text(max_size=80), st.integers(0, 43), st.text(min_size=1, max_size=1))
def test_made_up_and_altered_ids_are_refused(guess: str, place: int, letter: str) -> None:
    refused("acme", guess)
    drawn = IDS.new_id("acme")
    altered = drawn[:place] + letter + drawn[place + 1 :]
    if altered != drawn:
        refused("acme", altered)


def test_the_salt_is_read_and_short_or_missing_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_salt(path)
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match=r"holds 5 bytes, expected at least 16"):
        read_salt(path)
    path.write_bytes(SALT + b"\n")
    assert read_salt(path) == SALT
