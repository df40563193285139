"""Conversations go on elsewhere as if they had never stopped."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_engine import SPEC
from replicas import TEXTS, WAIT_S, Replica
from simulated_engine import drain, last_of, text_of

from runtime.checkpoint import ChatText
from runtime.checkpoints import find_policy, policy_ref
from runtime.conversation import Conversation
from runtime.errors import UnknownConversationError
from runtime.kv_state import ConversationKv
from runtime.policy.registry import ALL_POLICIES, policies_for
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams

EVERY_POLICY = sorted(policy.name for policy in policies_for(SPEC))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_it_goes_on_elsewhere_as_if_it_had_never_stopped(replica: Callable[..., Replica], policy: str) -> None:
    """Same bytes, tables and answers, after idle work was done and blocks were committed."""
    here, there = replica(), replica()
    for text in TEXTS[:2]:
        here.turn(text, policy=policy)
    before = here.state()
    answer, end = there.turn(TEXTS[2])
    again, _ = here.turn(TEXTS[2])
    assert answer == again
    assert here.state() == there.state()
    num_tokens = before[0].num_tokens
    assert end.stats.recomputed_reason == f"kv restored from a checkpoint of {num_tokens} tokens"
    assert end.stats.recomputed_tokens == 0
    assert end.stats.reused_tokens == before[0].num_tokens > 200
    if ALL_POLICIES[policy].compresses:
        assert before[0].num_commits > 0 and before[1]["blocks"], "the test is to cross a commit"
    assert there.turn(TEXTS[3])[0] == here.turn(TEXTS[3])[0]
    assert here.state() == there.state()
    assert there.checkpoints.figures().restored == 1


@pytest.mark.parametrize("policy", ["commitkv", "tiny-int8", "full"])
def test_it_goes_on_from_the_end_of_a_turn_before_any_idle_work(replica: Callable[..., Replica], policy: str) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy=policy)
    here.finish(here.submit(TEXTS[1]))
    here.write()
    if policy != "full":
        assert any(page.state == "staged" for page in here.state()[0].pages), "the test is to cross staged pages"
    ours, theirs = here.submit(TEXTS[2]), there.submit(TEXTS[2])
    assert here.finish(ours)[0] == there.finish(theirs)[0]
    assert here.state() == there.state()
    here.settle()
    there.settle()
    assert here.state() == there.state()


def test_nothing_of_other_conversations_is_written(replica: Callable[..., Replica], url: str) -> None:
    """Pages and blocks are reused, so what a conversation does not fill may hold another tenant's keys."""
    here = replica()
    here.turn(TEXTS[0] * 2, "first", tenant="a", policy="tiny-k8v4")
    here.engine.end_conversation("first", "a")
    here.turn(TEXTS[0], "second", tenant="b", policy="tiny-k8v4")
    tables, parts = here.state("second", "b")
    size, length = here.limits.page_tokens, SPEC.head_dim
    pages = torch.frombuffer(bytearray(parts["pages"]), dtype=torch.float32)
    pages = pages.view(SPEC.num_layers, len(tables.pages), SPEC.num_kv_heads, 2, size, length)
    assert pages.isfinite().all(), "poison of free memory came along"
    unfilled = [(i, len(page.positions)) for i, page in enumerate(tables.pages) if len(page.positions) < size]
    assert unfilled and all(not pages[:, i, :, :, filled:].any() for i, filled in unfilled)


def test_tenants_do_not_see_each_other(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], tenant="a")
    _, end = there.turn(TEXTS[1], tenant="b")
    assert end.stats.reused_tokens == 0 and there.checkpoints.figures().restored == 0
    with pytest.raises(UnknownConversationError):
        there.engine.end_conversation("ada", "c")
    assert there.turn(TEXTS[1], tenant="a")[1].stats.reused_tokens > 0


def test_the_default_of_a_server_is_for_conversations_that_begin(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="tiny-int8", default_policy="full")
    there.turn(TEXTS[1], default_policy="full")
    assert there.engine.conversation("ada").policy.name == "tiny-int8"
    there.turn(TEXTS[1], "new", default_policy="full")
    assert there.engine.conversation("new").policy.name == "full"


def test_ending_removes_the_checkpoint_wherever_it_is_asked_for(replica: Callable[..., Replica], url: str) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0])
    here.engine.end_conversation("ada")
    here.settle()
    assert not list(Path(url).glob("*/*"))
    here.turn(TEXTS[0])
    there.engine.end_conversation("ada")  # which does not hold it
    assert there.store.flush(WAIT_S) and not list(Path(url).glob("*/*"))
    here.turn(TEXTS[1], end_conversation=True)
    assert not list(Path(url).glob("*/*"))
    with pytest.raises(UnknownConversationError):
        here.engine.end_conversation("ada")


def test_a_turn_cancelled_elsewhere_leaves_what_was_restored(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    for text in TEXTS[:2]:
        here.turn(text)
    before = here.state()
    request_id = there.submit(TEXTS[2], max_tokens=200)
    there.engine.cancel(request_id)
    assert there.finish(request_id)[1].reason == "cancelled"
    assert there.state() == before
    assert there.turn(TEXTS[2])[0] == here.turn(TEXTS[2])[0]


def test_a_turn_cancelled_between_two_copies_does_not_lose_the_last_one(replica: Callable[..., Replica]) -> None:
    """The turn before was not copied out yet when the next one came and went."""
    here, there = replica(), replica()
    here.finish(here.submit(TEXTS[0]))
    here.engine.cancel(here.submit(TEXTS[1]))
    here.settle()
    assert there.turn(TEXTS[1])[1].stats.reused_tokens == here.state()[0].num_tokens


def test_a_conversation_that_makes_way_comes_back_with_its_cache(replica: Callable[..., Replica]) -> None:
    """More conversations than places: the store takes those that the engine ends."""
    here, other = replica(max_conversations=2), replica()
    for name in "abc":
        here.turn(TEXTS[0] + name, name)
        other.turn(TEXTS[0] + name, f"{name}-whole")
    assert len(here.engine._table) == 2
    for name in "abc":  # each comes back in the place of the next one
        answer, end = here.turn(TEXTS[2], name)
        assert answer == other.turn(TEXTS[2], f"{name}-whole")[0]
        assert end.stats.recomputed_tokens == 0
    assert here.checkpoints.figures().restored == 3


def test_stopping_writes_what_waits(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    for name in ("a", "b", "c"):
        here.finish(here.submit(TEXTS[0], name))
    here.engine.close(WAIT_S)
    for name in ("a", "b", "c"):
        assert there.turn(TEXTS[1], name)[1].stats.reused_tokens > 100


def test_an_answer_may_wait_until_it_is_written(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then whatever a client was told is in the store, whenever the server dies."""
    here, there = replica(checkpoint_wait_s=WAIT_S), replica()
    slow = threading.Event()
    write = here.store._do

    def write_later(job: Any) -> None:
        assert slow.wait(WAIT_S)
        write(job)

    monkeypatch.setattr(here.store, "_do", write_later)
    request_id = here.submit(TEXTS[0])
    events: list[Event] = []
    while not here.checkpoints.holds:
        events += here.engine.step()[0]
    events += drain(here.engine)
    assert len(text_of(events, request_id)) > 0, "pieces of an answer do not wait"
    assert not any(isinstance(event, FinishEvent) for event in events) and here.engine.has_turns()
    slow.set()
    while here.engine.has_turns():
        here.engine.wait_for_work(WAIT_S)  # which the writer ends
        events += here.engine.step()[0]
    assert isinstance(last_of(events, request_id), FinishEvent)
    assert there.turn(TEXTS[1])[1].stats.recomputed_tokens == 0


def test_its_system_prompt_is_shared_again(replica: Callable[..., Replica]) -> None:
    """Pages that another conversation here holds already are stored once."""
    here, there = replica(kv_memory_bytes=16 << 20), replica(kv_memory_bytes=16 << 20)  # both have room for twins
    system = "You keep the logbook of a small harbour and answer in few words. " * 2
    here.turn(TEXTS[0], system_prompt=system)
    there.turn(TEXTS[2], "other", system_prompt=system)
    assert there.turn(TEXTS[1])[0] == here.turn(TEXTS[1])[0]
    shared = [there.engine.kv_stats(name).shared_kv_bytes for name in ("ada", "other")]
    assert shared[0] == shared[1] >= 4 * there.manager.page_layout.page_bytes
    tables = [dataclasses.replace(one.state()[0], peak_bytes=0) for one in (here, there)]  # what is shared counts once
    assert tables[0] == tables[1]


def test_history_may_be_edited_after_it_came_back(replica: Callable[..., Replica]) -> None:
    """What the client's chat departs from is rolled back, on either server alike."""
    here, there = replica(), replica()
    first, _ = here.turn(TEXTS[0], policy="full")
    here.turn(TEXTS[1])
    chat = (Message("user", TEXTS[0]), Message("assistant", first), Message("user", TEXTS[2]))
    answer, end = there.turn("", messages=chat)
    assert answer == here.turn("", messages=chat)[0]
    assert here.state() == there.state()
    assert end.stats.reused_tokens > 100 and "restored" in end.stats.recomputed_reason


def test_a_raw_prompt_is_not_kept(replica: Callable[..., Replica], url: str) -> None:
    here = replica()
    request = Request("raw", TEXTS[0], SamplingParams(max_tokens=3))
    here.engine.submit(request, here.engine.prepare(request))
    here.settle()
    assert not list(Path(url).glob("*/*"))


def test_a_policy_chosen_by_task_is_found_again() -> None:
    pooled = ALL_POLICIES["pyramidkv-pooled"]
    assert pooled.by_task
    for task, _ in pooled.by_task:
        chosen = pooled.for_task(task)
        assert find_policy(policy_ref(chosen)) == chosen


def test_every_field_of_a_conversation_is_kept_or_left_out_knowingly(replica: Callable[..., Replica]) -> None:
    """Whoever adds a field decides here whether a checkpoint must carry it."""
    kept = {"policy", "num_rows", "page_tokens", "pages", "blocks", "ledger", "num_tokens", "committed_tokens",
            "num_commits", "peak_bytes", "unprobed", "whole", "reread",
            "reread_at", "_protected"}  # fmt: skip
    derived = {"_page_ids", "_page_lens"}
    assert set(vars(ConversationKv(ALL_POLICIES["full"], "fp32", 4, 16))) == kept | derived
    text = {"conversation_id", "policy", "tenant"} | {field.name for field in dataclasses.fields(ChatText)}
    # A priority comes with every turn; unnamed ones are not kept; what was lost elsewhere is no loss here.
    of_this_server = {"handle", "turn", "last_used_ns", "end_requested", "priority", "loss", "is_unnamed"}
    fields = {field.name for field in dataclasses.fields(Conversation)}
    assert fields == (text - {"protected"}) | of_this_server
