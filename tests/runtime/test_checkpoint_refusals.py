"""What cannot go on from a checkpoint is recomputed or refused, and said, never guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from replicas import TEXTS, WAIT_S, Replica, damage
from simulated_engine import drain

from runtime.checkpoint import KvImage
from runtime.checkpoint_store import StoreLimits
from runtime.errors import LostConversationError, RequestError, StoreUnavailableError
from runtime.policy.registry import ALL_POLICIES
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams


@pytest.mark.parametrize("tear", [False, True])
def test_a_damaged_cache_is_recomputed_from_the_text_and_said(
    replica: Callable[..., Replica], url: str, tear: bool, caplog: pytest.LogCaptureFixture
) -> None:
    here, there, fresh = replica(), replica(), replica()
    here.turn(TEXTS[0], policy="full")
    damage(url, tear=tear)
    answer, end = there.turn(TEXTS[1])
    assert answer == here.turn(TEXTS[1])[0], "recomputing a full cache gives the same answer"
    num_tokens = end.stats.recomputed_tokens
    assert num_tokens > 100 and end.stats.reused_tokens == 0
    assert "do not match their checksum" in end.stats.recomputed_reason
    assert "do not match their checksum" in caplog.text and "computed again from its text" in caplog.text
    assert there.checkpoints.figures().recomputed == 1
    assert fresh.turn(TEXTS[2])[1].stats.recomputed_tokens == 0, "the next checkpoint is whole again"


def test_one_without_readable_text_is_refused_until_it_is_ended(
    replica: Callable[..., Replica], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0])
    damage(url, part=60)
    with pytest.raises(LostConversationError, match="head does not match its checksum"):
        there.turn(TEXTS[1])
    assert "head does not match" in caplog.text and there.checkpoints.figures().refused == 1
    there.engine.end_conversation("ada")
    assert there.store.flush(WAIT_S)
    assert there.turn(TEXTS[1])[1].stats.reused_tokens == 0


def test_a_client_that_sends_the_whole_chat_needs_no_checkpoint(replica: Callable[..., Replica], url: str) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0])
    damage(url, part=60)
    request = Request("one", "", SamplingParams(max_tokens=4), "ada", messages=(Message("user", TEXTS[0]),))
    assert there.checkpoints.find(request) is None


def test_what_another_engine_wrote_is_refused(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica(fingerprint="another")
    here.turn(TEXTS[0])
    with pytest.raises(LostConversationError, match="was written by engine same, expected another"):
        there.turn(TEXTS[1])


def test_a_policy_that_says_something_else_now_costs_the_cache(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, third = replica(), replica(), replica()
    here.turn(TEXTS[0], policy="tiny-int8")
    monkeypatch.setitem(ALL_POLICIES, "tiny-int8", dataclasses.replace(ALL_POLICIES["tiny-int8"], budget_ratio=0.4))
    _, end = there.turn(TEXTS[1])
    assert "its policy tiny-int8 has changed" in end.stats.recomputed_reason and end.stats.recomputed_tokens > 0
    monkeypatch.delitem(ALL_POLICIES, "tiny-int8")
    with pytest.raises(LostConversationError, match="policy 'tiny-int8', which is not known here"):
        third.turn(TEXTS[2])


def test_another_policy_may_not_be_asked_for(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="tiny-int8")
    with pytest.raises(RequestError, match="kv_policy: got 'full'"):
        there.turn(TEXTS[1], policy="full")
    assert there.turn(TEXTS[1], policy="tiny-int8")[1].stats.reused_tokens > 0


def test_idle_caches_make_room_for_one_that_comes_back(replica: Callable[..., Replica]) -> None:
    here = replica()
    there = replica(kv_memory_bytes=60 * here.manager.page_layout.page_bytes)
    here.turn(TEXTS[0] * 3, policy="full")
    for name in ("b", "c"):
        there.turn(TEXTS[0] * 2, name, policy="full")
    answer, end = there.turn(TEXTS[1])
    assert end.stats.recomputed_tokens == 0 and answer == here.turn(TEXTS[1])[0]
    assert there.manager.budget.used_bytes <= there.manager.budget.total_bytes


def test_without_room_its_text_is_recomputed_when_there_is(replica: Callable[..., Replica]) -> None:
    page_bytes = replica().manager.page_layout.page_bytes
    here, there = replica(), replica(kv_memory_bytes=45 * page_bytes)
    here.turn(TEXTS[0] * 3, policy="full")
    running = there.submit(TEXTS[0] * 3, "b", max_tokens=60, policy="full")
    for _ in range(6):
        there.engine.step()
    request_id = there.submit(TEXTS[1])
    there.finish(running)
    _, end = there.finish(request_id)
    assert end.stats.recomputed_tokens > 300 and "no room" in end.stats.recomputed_reason


def test_a_full_queue_keeps_the_conversation_waiting_and_loses_nothing(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = replica(limits=StoreLimits(max_queue_bytes=1)), replica()
    with monkeypatch.context() as patch:
        patch.setattr(here.store, "has_room", lambda num_bytes: False)
        here.finish(here.submit(TEXTS[0]))
        drain(here.engine)
        assert (here.checkpoints.figures().waiting, here.store.counts.written) == (1, 0)
    drain(here.engine)
    assert here.store.flush(WAIT_S) and here.checkpoints.figures().waiting == 0
    assert there.turn(TEXTS[1])[1].stats.recomputed_tokens == 0


def test_one_that_leaves_while_the_queue_is_full_leaves_its_text(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an older checkpoint would be taken for the newest."""
    here, there = replica(max_conversations=1), replica()
    here.turn(TEXTS[0])
    with monkeypatch.context() as patch:
        patch.setattr(here.store, "has_room", lambda num_bytes: False)
        here.finish(here.submit(TEXTS[1]))
        num_tokens = here.state()[0].num_tokens
        here.finish(here.submit(TEXTS[0], "other"))
        assert here.store.flush(WAIT_S)
    _, end = there.turn(TEXTS[2])
    assert end.stats.recomputed_tokens == num_tokens


def test_a_store_that_does_not_answer_refuses_the_turn(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replica()

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(here.store._fs, "ls", fail)
    with pytest.raises(StoreUnavailableError, match="no route"):
        here.turn(TEXTS[0])
    here.engine.submit(request := Request("raw", TEXTS[0], SamplingParams(max_tokens=3)), here.engine.prepare(request))


def test_a_device_that_fails_while_copying_in_costs_the_cache_only(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="full")

    def fail(place: object, image: KvImage) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(there.transfer, "copy_in", fail)
    answer, end = there.turn(TEXTS[1])
    assert answer == here.turn(TEXTS[1])[0] and "device lost" in end.stats.recomputed_reason


def test_what_is_protected_stays_so_when_only_the_text_came_back(replica: Callable[..., Replica], url: str) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], protect=((5, 40),))
    before = here.manager[here.engine.conversation("ada").handle].protected_ranges()
    damage(url)
    there.turn(TEXTS[1])
    after = there.manager[there.engine.conversation("ada").handle].protected_ranges()
    assert set(before) <= set(after) and any(end - start >= 35 for start, end in before)


def test_no_answer_waits_longer_than_it_may_or_for_nothing(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = replica(checkpoint_wait_s=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(here.store, "has_room", lambda num_bytes: False)
        here.submit(TEXTS[0])
        events: list[Event] = []
        while not any(isinstance(event, FinishEvent) for event in events):
            events += here.engine.step()[0]
    assert "not yet written" in caplog.text
    here.finish(here.submit(TEXTS[1], "ends", end_conversation=True))
    here.engine.submit(request := Request("raw", TEXTS[0], SamplingParams(max_tokens=3)), here.engine.prepare(request))
    assert here.finish("raw")[1].reason == "length" and not here.checkpoints.holds
