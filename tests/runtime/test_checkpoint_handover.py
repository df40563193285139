"""A conversation that has been elsewhere and comes back: the newest of it counts, not what a replica still holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_engine import POLICIES, SPEC
from replicas import TEXTS, Replica, small

from runtime.checkpoint_store import CheckpointStore
from runtime.errors import StoreUnavailableError
from runtime.policy.registry import ALL_POLICIES, policies_for


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in [*policies_for(SPEC), *POLICIES.values()]:
        monkeypatch.setitem(ALL_POLICIES, policy.name, small(policy))


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[[], Replica]]:
    made: list[Replica] = []

    def make() -> Replica:
        made.append(Replica(str(tmp_path / "kept")))
        return made[-1]

    yield make
    for one in made:
        one.engine.close(5.0)
        one.check()


@pytest.mark.parametrize("policy", ["full", "commitkv"])
def test_there_and_back_again_is_as_if_it_had_never_moved(replica: Callable[[], Replica], policy: str) -> None:
    alone = replica()
    expected = [alone.turn(text, "alone", policy=policy)[0] for text in TEXTS]
    here, there = replica(), replica()
    answers = [one.turn(text, policy=policy) for one, text in zip((here, there, here, there), TEXTS, strict=True)]
    assert [answer for answer, _ in answers] == expected
    # Each replica but the first held it not at all, or older by a turn, and took up the other's checkpoint.
    assert all("restored from a checkpoint" in end.stats.recomputed_reason for _, end in answers[1:])
    assert here.state() != there.state(), "what is left behind is old, and nobody is answered from it"


def test_a_conversation_that_stays_is_not_read_again(replica: Callable[[], Replica]) -> None:
    here = replica()
    for text in TEXTS:
        _, end = here.turn(text, policy="full")
        assert end.stats.recomputed_reason == ""
    assert here.checkpoints.figures().restored == 0 and here.checkpoints.figures().written == len(TEXTS)


def test_what_was_left_behind_does_not_overwrite_the_newest(
    replica: Callable[[], Replica], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="full")
    there.turn(TEXTS[1])
    newest = there.state()
    with caplog.at_level(logging.WARNING):
        here.checkpoints.changed(here.engine.conversation("ada"))  # idle work that ends late
        here.write()
    assert "another replica has gone on" in caplog.text
    third = replica()
    third.turn(TEXTS[2])
    assert third.checkpoints.figures().restored == 1
    assert newest[0].num_tokens < third.state()[0].num_tokens


def test_what_was_left_behind_takes_no_room(replica: Callable[[], Replica]) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="full")
    there.turn(TEXTS[1])
    here.turn(TEXTS[2])
    assert len(here.engine._table) == 1
    here.engine.end_conversation("ada")
    here.settle()
    assert here.manager.budget.used_bytes == 0


def test_a_store_that_does_not_answer_stops_no_conversation_that_is_held(
    replica: Callable[[], Replica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = replica()
    here.turn(TEXTS[0], policy="full")

    def fail(self: CheckpointStore, key: str) -> bool:
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(CheckpointStore, "is_superseded", fail)
    with caplog.at_level(logging.WARNING):
        _, end = here.turn(TEXTS[1])
    assert end.stats.recomputed_reason == "" and end.stats.reused_tokens > 0 and "as it is held" in caplog.text


def test_an_id_that_was_ended_elsewhere_and_begun_anew_is_the_new_one(replica: Callable[[], Replica]) -> None:
    here, there = replica(), replica()
    here.turn(TEXTS[0], policy="full")
    there.turn(TEXTS[1])
    there.turn(TEXTS[2], end_conversation=True)
    there.turn(TEXTS[3], policy="full")
    tokens = there.state()[0].num_tokens
    _, end = here.turn(TEXTS[1])
    assert end.stats.reused_tokens == tokens and "restored from a checkpoint" in end.stats.recomputed_reason
