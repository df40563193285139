"""Entries that stay unquantized: every form of `publish` leaves them alone, and their copies are the same bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from plugins.commit import native
from plugins.commit.exact import choose_exact, copy_exact, count_lost
from plugins.commit.fates import commit_fates
from plugins.commit.line import draw_line
from plugins.commit.params import Decision, LineParams
from plugins.commit.publish import publish as torch_publish
from plugins.native_build import find_compiler
from tests.plugins.commit_cases import CommitCase, CommitState, make_state
from tests.plugins.commit_cuda_cases import GEOMETRIES, check, emulated, plan, run, stored_entries
from tests.plugins.native_forms import forms_of, load

LIBRARY = load(native.library())
PUBLISH = {"torch": torch_publish, **forms_of(LIBRARY, "commitkv_publish", native.NativePublish)}
if find_compiler() is not None:
    PUBLISH["emulated"] = emulated()[0]
COUNT = 5


def decide(state: CommitState, share: float = 0.4, count: int = COUNT) -> Decision:
    keep = int(share * stored_entries(state))
    return choose_exact(draw_line(state.memory, LineParams(state.staged, state.table, keep, 3)), count)


@pytest.mark.parametrize("form", PUBLISH)
@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda c: c.name)
@pytest.mark.parametrize("gate", [None, 0.35, 2.0])
def test_blocks_are_written_as_if_they_were_not_there(form: str, case: CommitCase, gate: float | None) -> None:
    state = make_state(replace(case, entries=3 * case.block_entries, runs=True), seed=2)
    commit = plan(state, decide(state), gate, 0.6)
    counts, memory = run(commit, PUBLISH[form])  # type: ignore[arg-type]
    check(commit, counts, memory)
    rows, staged = state.memory.num_rows, state.staged.shape[0]
    kept = int(commit.decision.staged_keep.sum())
    gone = int((commit.params.dissolve[:, None] & ~commit.decision.alive).sum())
    filled = torch.arange(state.memory.layout.block_entries) < state.table.lens[:, None]
    gone -= int((commit.params.dissolve[:, None] & ~filled).sum())
    assert sum(counts) == rows * (staged - COUNT) - kept + gone


def test_the_best_of_each_row_are_chosen_whatever_the_line() -> None:
    state = make_state(CommitCase("int4", format="int4"), seed=3)
    line = draw_line(state.memory, LineParams(state.staged, state.table, 0, 0))
    decision = choose_exact(line, COUNT)
    assert decision.exact is not None and not decision.staged_keep.any()
    for row, scores in enumerate(line.staged_score):
        chosen = scores[decision.exact[row]]
        rest = scores.clone()
        rest[decision.exact[row]] = -1
        assert chosen.min() >= rest.max() and len(set(decision.exact[row].tolist())) == COUNT
    assert decision.exact.tolist() == [sorted(row) for row in decision.exact.tolist()], "in the order of their slots"
    assert choose_exact(line, 0) is line
    everything = choose_exact(line, 10**6).exact
    assert everything is not None and everything.shape[1] == state.staged.shape[0]


def test_copies_are_the_same_bits_in_every_row() -> None:
    state = make_state(CommitCase("k8v4", format="k8v4", staged=37), seed=1)
    decision = decide(state)
    assert decision.exact is not None
    before, page_tokens = copy.deepcopy(state.memory), state.memory.pages[0].shape[3]
    params = replace(plan(state, decision, 0.35, 0.6).params, exact_to=state.free_slots[:COUNT].flip(0))
    copy_exact(state.memory, params, decision)
    kv_heads = before.pages[0].shape[1]
    written = torch.zeros(before.pages[0].shape[0], page_tokens, dtype=torch.bool)
    for row in range(before.num_rows):
        layer, head = divmod(row, kv_heads)
        for i, slot in enumerate(params.exact_to.tolist()):
            source = int(state.staged[decision.exact[row, i]])
            here, there = divmod(slot, page_tokens), divmod(source, page_tokens)
            written[here] = True
            for arena, was in ((state.memory.pages, before.pages), (state.memory.seen, before.seen)):
                got = arena[layer].movedim(-2 if arena is state.memory.pages else -1, 1)[*here, head]
                want = was[layer].movedim(-2 if arena is state.memory.pages else -1, 1)[*there, head]
                assert torch.equal(got, want)
    for pages, was in zip(state.memory.pages, before.pages, strict=True):
        untouched = pages.movedim(3, 1)[~written]
        assert torch.equal(untouched.nan_to_num(7), was.movedim(3, 1)[~written].nan_to_num(7))


def test_what_was_exact_and_stays_nowhere_is_counted() -> None:
    state = make_state(CommitCase("int4", format="int4", staged=20, entries=0), seed=4)
    decision = decide(state, share=0.3, count=2)
    assert decision.exact is not None
    lost = 0
    for row in range(state.memory.num_rows):
        kept = decision.staged_keep[row].tolist()
        lost += sum(not kept[i] and i not in decision.exact[row].tolist() for i in range(6))
    assert 0 < int(count_lost(decision, 6)) == lost
    plain = replace(decision, exact=None)
    assert int(count_lost(plain, 6)) == int((~decision.staged_keep[:, :6]).sum())


def test_fates_say_that_they_stay() -> None:
    state = make_state(CommitCase("int8", format="int8", spread=0.05), seed=5)
    decision = decide(state)
    assert decision.exact is not None
    params = plan(state, decision, 2.0, 0.6).params
    for row, fates in enumerate(commit_fates(state.memory, params, decision)):
        num_old = fates.shape[0] - state.staged.shape[0]
        places = (num_old + decision.exact[row]).tolist()
        assert fates[places].tolist() == places
        assert not set(places) & set(fates[[i for i in range(len(fates)) if i not in places]].tolist()), (
            "absorbs nothing"
        )
