"""Conversations go on elsewhere as if they had never stopped, and what cannot go on is said, never guessed.

Two engines with the same weights stand for two replicas; they share a store and nothing else.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_engine import CONFIG, END_TOKEN, POLICIES, SPEC, make_limits
from simulated_engine import CharTokenizer, PlainChat, drain, eager, last_of, text_of

from builder.lower_torch import TorchDecoder
from builder.model import HEAD, weight_recipes
from runtime.checkpoint import ChatText, KvImage, KvTables
from runtime.checkpoint_store import CheckpointStore, StoreLimits
from runtime.checkpoint_tables import place_of, tables_of
from runtime.checkpoints import Checkpoints, find_policy, policy_ref
from runtime.conversation import Conversation
from runtime.engine import Engine
from runtime.engine_parts import EngineParts
from runtime.errors import LostConversationError, RequestError, StoreUnavailableError, UnknownConversationError
from runtime.executor_torch import TorchExecutor
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.kv_state import ConversationKv
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.kv_transfer import KvTransfer
from runtime.policy.base import Policy
from runtime.policy.registry import ALL_POLICIES, policies_for
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams

WAIT_S = 20.0
TEXTS = (
    "The tide comes in at nine. Remember it. " * 3,
    "Which colour was the boat? It was blue, wasn't it, and the sails were red. " * 2,
    "And when does the tide come in?",
    "Say all of it once more, from the beginning.",
)
EVERY_POLICY = sorted(policy.name for policy in policies_for(SPEC))


def small(policy: Policy) -> Policy:
    """With limits that a few hundred tokens reach. Nothing depends on how many steps the engine has run: two engines
    have run different numbers of them."""
    if not policy.compresses:
        return policy
    policy = eager(policy)
    return dataclasses.replace(policy, schedule=dataclasses.replace(policy.schedule, every_steps=0))


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All registered policies, made small."""
    for policy in [*policies_for(SPEC), *POLICIES.values()]:
        monkeypatch.setitem(ALL_POLICIES, policy.name, small(policy))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "kept")


class Replica:
    """An engine on a tiny model with a store of checkpoints."""

    def __init__(
        self, url: str, *, fingerprint: str = "same", limits: StoreLimits | None = None, **config: Any
    ) -> None:
        self.limits = dataclasses.replace(make_limits("fp32"), policy="commitkv")
        self.config = dataclasses.replace(CONFIG, **config)
        self.manager = KvManager(SPEC, self.limits, self.config.kv_memory_bytes)
        place = ArenaPlace(poison=True)  # what was never written reads as NaN
        storage = KvStorage(SPEC, self.limits, self.manager.num_pages, self.manager.num_blocks, place)
        gen = torch.Generator().manual_seed(5)
        weights = {r.name: torch.randn(r.shape, generator=gen) * 0.2 + 1.5 * r.is_norm for r in weight_recipes(SPEC)}
        weights[HEAD][END_TOKEN] = 0.0
        executor = TorchExecutor(TorchDecoder(SPEC, weights, "fp32", "cpu"), SPEC, self.limits, storage)
        self.transfer = KvTransfer(storage)
        self.store = CheckpointStore(url, limits or StoreLimits())
        wait_s = self.config.checkpoint_wait_s
        self.checkpoints = Checkpoints(fingerprint, self.manager, self.transfer, self.store, wait_s)
        intake = Intake(CharTokenizer(), PlainChat(), "commitkv", self.limits.max_seq_len)  # type: ignore[arg-type]
        parts = EngineParts(
            SPEC, self.limits, self.config, self.manager, executor, intake, (5, 6, 7), checkpoints=self.checkpoints
        )
        self.engine = Engine(parts)
        self._numbers = iter(range(1000))

    def submit(self, text: str, name: str = "ada", max_tokens: int = 10, **options: object) -> str:
        request_id = f"{name}/{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=11)
        request = Request(request_id, text, sampling, name, **options)  # type: ignore[arg-type]
        self.engine.submit(request, self.engine.prepare(request))
        return request_id

    def finish(self, request_id: str) -> tuple[str, FinishEvent]:
        """Until the turn is over and not one step further."""
        events: list[Event] = []
        while not any(isinstance(event, FinishEvent) and event.request_id == request_id for event in events):
            new, worked = self.engine.step()
            events += new
            assert worked
        end = last_of(events, request_id)
        assert isinstance(end, FinishEvent)
        return text_of(events, request_id), end

    def turn(self, text: str, name: str = "ada", **options: object) -> tuple[str, FinishEvent]:
        """A turn and the idle work after it, all of it written."""
        request_id = self.submit(text, name, **options)
        answer, end = self.finish(request_id)
        self.settle()
        return answer, end

    def settle(self) -> None:
        """Idle work is done, and everything is written."""
        drain(self.engine)
        self.write()

    def write(self) -> None:
        """Copies out what has changed, without any other work."""
        for _ in range(100):
            self.checkpoints.between_steps(lambda: False, self.engine._scheduler.evictor.drop)
            assert self.store.flush(WAIT_S)
            if not self.checkpoints.figures().waiting:
                return
        raise AssertionError("never copied out")

    def state(self, name: str = "ada", tenant: str = "") -> tuple[KvTables, dict[str, bytes]]:
        """Tables and bytes of a conversation, ids left out."""
        kv = self.manager[self.engine.conversation(name, tenant).handle]
        image = self.transfer.copy_out(place_of(kv))
        return tables_of(kv), {field: bytes(getattr(image, field)) for field in ("pages", "seen", "blocks", "score")}

    def check(self) -> None:
        self.manager.check_invariants()


@pytest.fixture
def replica(url: str) -> Iterator[Callable[..., Replica]]:
    """Makes replicas that share a store."""
    made: list[Replica] = []

    def make(**options: object) -> Replica:
        made.append(Replica(url, **options))  # type: ignore[arg-type]
        if len(made) == 1:  # goes on as if there were no others, which are compared with it
            made[0].store.is_superseded = lambda key: False  # type: ignore[method-assign]
        return made[-1]

    yield make
    for one in made:
        one.check()
        one.engine.close(WAIT_S)


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


def damage(url: str, part: int = -1, tear: bool = False) -> None:
    """Flips the last byte of the only checkpoint, or cuts half of it off."""
    [path] = Path(url).glob("*/*.ckv")
    data = bytearray(path.read_bytes())
    data[part] ^= 1
    path.write_bytes(data[: len(data) // 2] if tear else data)


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


def test_stopping_writes_what_waits(replica: Callable[..., Replica]) -> None:
    here, there = replica(), replica()
    for name in ("a", "b", "c"):
        here.finish(here.submit(TEXTS[0], name))
    here.engine.close(WAIT_S)
    for name in ("a", "b", "c"):
        assert there.turn(TEXTS[1], name)[1].stats.reused_tokens > 100


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


def test_its_system_prompt_is_shared_again(replica: Callable[..., Replica]) -> None:
    """Pages that another conversation here holds already are stored once."""
    here, there = replica(), replica()
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


def test_what_is_protected_stays_so_when_only_the_text_came_back(replica: Callable[..., Replica], url: str) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], protect=((5, 40),))
    before = here.manager[here.engine.conversation("ada").handle].protected_ranges()
    damage(url)
    there.turn(TEXTS[1])
    after = there.manager[there.engine.conversation("ada").handle].protected_ranges()
    assert set(before) <= set(after) and any(end - start >= 35 for start, end in before)


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
            "num_commits", "peak_bytes", "unprobed", "_protected"}  # fmt: skip
    derived = {"_page_ids", "_page_lens"}
    assert set(vars(ConversationKv(ALL_POLICIES["full"], "fp32", 4, 16))) == kept | derived
    text = {"conversation_id", "policy", "tenant"} | {field.name for field in dataclasses.fields(ChatText)}
    # A priority comes with every turn; unnamed ones are not kept; what was lost elsewhere is no loss here.
    of_this_server = {"handle", "turn", "last_used_ns", "end_requested", "priority", "loss", "is_unnamed"}
    fields = {field.name for field in dataclasses.fields(Conversation)}
    assert fields == (text - {"protected"}) | of_this_server
