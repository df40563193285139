"""A checkpoint's format: what is written is read, and damage costs no more than what it hit."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint import ChatText, Checkpoint, KvImage, KvPart, KvTables, PageTable, PolicyRef, decode, encode
from runtime.errors import LostConversationError
from runtime.history import HeldMessage

TABLES = KvTables(
    pages=(PageTable((0, 1, 2, 7), "active", True), PageTable((8, 9), "staged", False)),
    block_format="int4",
    block_starts=(0, 1, 1, 2, 2),
    block_lens=(16, 3),
    counts={"active": 16, "staged": 8, "committed": 19, "evictable": 0, "gone": 1},
    num_tokens=11,
    committed_tokens=5,
    num_commits=2,
    peak_bytes=4096,
    unprobed=((8, 10),),
    whole=True,
    reread=((2, 6),),
    reread_at=9,
)
IMAGE = KvImage(bytes(range(64)), b"\x01" * 16, b"\x02" * 96, memoryview(b"\x03" * 32))
WHOLE = Checkpoint(
    engine="e" * 64,
    tenant="täglich",
    conversation_id="a/../b\x00\ud800",
    policy=PolicyRef("commitkv", "", "d" * 64),
    text=ChatText(
        tokens=tuple(range(100, 112)),
        ended=True,
        messages=(HeldMessage("user", "grüß 😀", 0, 8), HeldMessage("assistant", "ja", 8, 12, True)),
        system_tokens=3,
        num_computed=11,
        protected=((0, 4),),
    ),
    kv=KvPart(TABLES, IMAGE),
)


def written(checkpoint: Checkpoint = WHOLE) -> bytes:
    return b"".join(encode(checkpoint))


def part_spans(data: bytes) -> dict[str, tuple[int, int]]:
    """Where each part lies; the preamble is 48 bytes."""
    head_bytes = int.from_bytes(data[12:16], "little")
    at = 48 + head_bytes
    spans = {"preamble": (0, 48), "head": (48, at)}
    for part in json.loads(data[48:at])["parts"]:
        spans[part["name"]] = (at, at + part["bytes"])
        at += part["bytes"]
    assert at == len(data)
    return spans


def test_what_is_written_is_read() -> None:
    found = decode(written())
    assert dataclasses.asdict(dataclasses.replace(found, kv=None)) == dataclasses.asdict(
        dataclasses.replace(WHOLE, kv=None)
    )
    assert found.kv is not None and found.kv.tables == TABLES
    for name in ("pages", "seen", "blocks", "score"):
        assert bytes(getattr(found.kv.image, name)) == bytes(getattr(IMAGE, name)), name
    assert found.damage == ""


def test_text_alone_is_read_as_such() -> None:
    found = decode(written(dataclasses.replace(WHOLE, kv=None)))
    assert found.kv is None and found.text == WHOLE.text and "without" in found.damage


@pytest.mark.parametrize("name", ["tables", "pages", "seen", "blocks", "score"])
def test_a_damaged_cache_leaves_the_text(name: str) -> None:
    data = bytearray(written())
    data[part_spans(bytes(data))[name][0]] ^= 1
    found = decode(data)
    assert found.kv is None and found.text == WHOLE.text
    assert f"its {name} do not match" in found.damage


@pytest.mark.parametrize("name", ["preamble", "head", "text"])
def test_without_readable_text_it_is_refused(name: str) -> None:
    data = bytearray(written())
    data[part_spans(bytes(data))[name][0]] ^= 1
    with pytest.raises(LostConversationError, match="cannot be read"):
        decode(data)


def test_another_format_version_is_refused_by_number() -> None:
    data = bytearray(written())
    data[8] = 9
    with pytest.raises(LostConversationError, match="format version 9, expected 1"):
        decode(data)


def test_a_torn_object_gives_its_text_if_that_is_whole() -> None:
    data = written()
    end_of_text = part_spans(data)["text"][1]
    assert decode(data[: end_of_text + 5]).text == WHOLE.text
    with pytest.raises(LostConversationError):
        decode(data[: end_of_text - 1])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(written()) - 1), value=st.integers(1, 255))
def test_no_flipped_byte_is_taken_for_truth(at: int, value: int) -> None:
    data = bytearray(written())
    data[at] ^= value
    try:
        found = decode(data)
    except LostConversationError:
        return
    assert found.text == WHOLE.text and found.conversation_id == WHOLE.conversation_id and found.kv is None


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(LostConversationError):
        decode(data)
