"""Ids that a server signs: its own are taken, everything else is refused alike."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_engine import make_engine

from runtime.config import RuntimeConfig
from runtime.errors import ConfigError, UnknownConversationError
from runtime.loop import EngineLoop
from runtime.serving.contract import INPUTS
from runtime.serving.identity import SignedIds, read_salt
from runtime.serving.responses import OutputTensor
from runtime.serving.tensors import InputTensor, Value
from runtime.serving.turns import Turns

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


class LastResponse:
    """Keeps the final outputs by name, or the error."""

    def __init__(self) -> None:
        self.outputs: dict[str, tuple[Value, ...]] = {}
        self.error = ""
        self.done = threading.Event()

    def send(self, outputs: tuple[OutputTensor, ...], final: bool) -> None:
        self.outputs |= {o.name: o.values for o in outputs}
        if final:
            self.done.set()

    def fail(self, code: str, message: str) -> None:
        self.error = code
        self.done.set()

    def is_cancelled(self) -> bool:
        return False


def test_with_a_salt_a_server_opens_conversations_only_by_ids_that_it_gave_out() -> None:
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
    turns = Turns(EngineLoop(engine), None, lambda _: None, SignedIds(SALT))

    def call(tenant: str, **values: Value) -> LastResponse:
        tensors = [InputTensor(name, INPUTS[name].dtype, (1,), [value]) for name, value in values.items()]
        sink = LastResponse()
        turns.handle(tensors, "", sink, {"commitkv_tenant": tenant})
        assert sink.done.wait(30)
        return sink

    try:
        begun = call("acme", text_input=b"the password is plover", conversation_id=b"", sampling_param_max_tokens=2)
        (drawn,) = begun.outputs["conversation_id"]
        assert isinstance(drawn, bytes)
        for tenant, name in (("other", drawn), ("acme", b"mine"), ("acme", drawn[:-1])):
            for what in ({"text_input": b"what is it?"}, {"stats": True}, {"conversation_end": True}):
                assert call(tenant, conversation_id=name, **what).error == "NOT_FOUND"
        going_on = call("acme", text_input=b"what is it?", conversation_id=drawn, sampling_param_max_tokens=2)
        assert going_on.error == "" and engine.stats().conversations == 1
        assert call("acme", conversation_id=drawn, conversation_end=True).error == ""
    finally:
        turns.close(0.0)
