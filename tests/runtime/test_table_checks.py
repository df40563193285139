"""Ids outside the arenas are refused on the host, by name, before a decoder or a kernel is called."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.errors import TableError
from runtime.executor_torch import TORCH_FORMS, TorchExecutor
from runtime.kv_storage import KvStorage
from runtime.step import BlockTable, CommitRules, KvView, LinePlan, SampleSpec, SequencePlan, StepPlan, int32
from runtime.table_checks import check_aligned

SPEC = ModelSpec("llama", 2, 64, 128, 6, 3, 64, 100, 1e-5, RopeSpec(10000.0), 1024, True)
LIMITS = EngineLimits(page_tokens=16, block_entries=64)
ROWS = SPEC.num_kv_rows
NUM_PAGES, NUM_BLOCKS = 8, 20


class Untouchable:
    """A decoder that must not be reached."""

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("the step was run")


@pytest.fixture
def executor() -> TorchExecutor:
    storage = KvStorage(SPEC, LIMITS, NUM_PAGES, {"k8v4": NUM_BLOCKS})
    return TorchExecutor(Untouchable(), SPEC, LIMITS, storage, TORCH_FORMS, TableStaging(torch.device("cpu")))  # type: ignore[arg-type]


def table(version: int, **changes: Any) -> BlockTable:
    """One block in each row."""
    sound = BlockTable(version, "k8v4", int32(range(ROWS + 1)), int32(range(ROWS)), int32([64] * ROWS))
    return replace(sound, **changes)


def plan(**changes: Any) -> SequencePlan:
    """Two tokens on the second page."""
    view = KvView(int32([3, 5]), int32([16, 2]), table(1))
    sound = SequencePlan(0, (4, 99), 700, int32([80, 81]), view, True, 0, SampleSpec())
    return replace(sound, **changes)


def view(**changes: Any) -> KvView:
    return replace(plan().view, **changes)


def test_a_sound_plan_reaches_the_decoder(executor: TorchExecutor) -> None:
    for sound in (plan(), plan(slots=int32([-1, 81])), plan(view=view(page_ids=int32([-1, 5])))):
        with pytest.raises(AssertionError, match="the step was run"):
            executor.run(StepPlan((sound,)))


BAD: dict[str, tuple[Callable[[], SequencePlan], str]] = {
    "token": (lambda: plan(token_ids=(4, 100)), r"token_ids: got 100, expected ids in \[0, 100\)"),
    "negative token": (lambda: plan(token_ids=(-1, 5)), "token_ids: got -1"),
    "position": (lambda: plan(first_position=1023), r"positions: got \[1023, 1025\)"),
    "slot": (lambda: plan(slots=int32([80, NUM_PAGES * 16])), "slots: got 128"),
    "negative slot": (lambda: plan(slots=int32([80, -2])), "slots: got -2"),
    "number of slots": (lambda: plan(slots=int32([80])), "2 tokens, 1 slots"),
    "page": (lambda: plan(view=view(page_ids=int32([3, NUM_PAGES]))), "page_ids: got 8"),
    "page length": (lambda: plan(view=view(page_lens=int32([17, 2]))), "page_lens: got 17"),
    "number of lengths": (lambda: plan(view=view(page_lens=int32([16]))), "page_lens: got 1, expected one for each"),
    "block": (lambda: plan(view=view(blocks=table(2, ids=int32([0, 1, 2, 3, 4, NUM_BLOCKS])))), "block ids: got 20"),
    "block length": (lambda: plan(view=view(blocks=table(3, lens=int32([64] * 5 + [65])))), "block lens: got 65"),
    "format": (lambda: plan(view=view(blocks=table(4, format="int8"))), "block ids: got"),
    "starts": (lambda: plan(view=view(blocks=table(5, starts=int32([0, 2, 1, 3, 4, 5, 6])))), "starts go down"),
    "last start": (lambda: plan(view=view(blocks=table(6, starts=int32([0, 1, 2, 3, 4, 5, 7])))), "block table: got"),
    "number of starts": (lambda: plan(view=view(blocks=table(7, starts=int32([0, 6])))), "expected 7 starts"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_named_and_nothing_runs(executor: TorchExecutor, name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(TableError, match=message):
        executor.run(StepPlan((plan(), make())))


def test_a_bad_commit_is_refused(executor: TorchExecutor) -> None:
    for staged, blocks, message in (
        (int32([0, NUM_PAGES * 16]), table(8), "staged_slots: got 128"),
        (int32([0]), table(9, ids=array("i", [0, 1, 2, 3, 4, 99])), "block ids: got 99"),
    ):
        with pytest.raises(TableError, match=message):
            executor.drawing([LinePlan(0, staged, blocks, 1, CommitRules())])


def test_alignment() -> None:
    check_aligned("pages", 4096)
    with pytest.raises(TableError, match="pages: got address 0x1008, expected a multiple of 16 bytes"):
        check_aligned("pages", 0x1008)
