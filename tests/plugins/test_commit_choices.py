"""Choices beyond one line over recorded scores: against brute force, in every form that takes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plugins import blocks as block_bytes
from plugins.commit import native
from plugins.commit.choices import LineChoices, Pooling, Tier
from plugins.commit.gate import GateWeights
from plugins.commit.line import draw_line as torch_line
from plugins.commit.params import Decision, LineParams, PublishParams
from plugins.commit.pooling import NO_GROUP, group_old, group_staged
from plugins.commit.publish import publish as torch_publish
from plugins.commit.redundancy import SIMILAR, rank_row
from plugins.memory import KvMemory
from tests.plugins.commit_cases import CASES, CommitCase, CommitState, make_state, plan_publish
from tests.plugins.native_forms import load

Line = Callable[[KvMemory, LineParams], Decision]
LIBRARY = load(native.library())
LINE: dict[str, Line] = {"torch": torch_line} | ({"native": native.NativeLine(LIBRARY)} if LIBRARY else {})
FORMS = ["torch"] + (["native"] if LIBRARY else [])


def publish_of(form: str):  # type: ignore[no-untyped-def]
    return torch_publish if form == "torch" else native.NativePublish(LIBRARY, None, 1)  # type: ignore[arg-type]


def params_of(state: CommitState, choices: LineChoices, keep: int = 0, **more: object) -> LineParams:
    count = state.staged.shape[0]
    more = {"positions": torch.arange(count) + 500, "num_tokens": 520 + count, **more}
    return LineParams(state.staged, state.table, keep, 0, choices=choices, **more)  # type: ignore[arg-type]


def row_scores(state: CommitState, row: int) -> list[float]:
    """Stored scores of a row, old entries in table order and then staged tokens; inf: protected."""
    memory, table = state.memory, state.table
    layer, head = divmod(row, memory.pages[0].shape[1])
    page_tokens = memory.pages[0].shape[3]
    old = [
        float(memory.score[int(table.ids[b]), i])
        for b in range(table.starts[row], table.starts[row + 1])
        for i in range(int(table.lens[b]))
    ]
    return old + [float(memory.seen[layer][s // page_tokens, head, s % page_tokens]) for s in state.staged.tolist()]


def kept_of(state: CommitState, decision: Decision, row: int) -> list[bool]:
    """What stays, in the order of `row_scores`."""
    table = state.table
    old = [
        bool(decision.alive[b, i])
        for b in range(table.starts[row], table.starts[row + 1])
        for i in range(int(table.lens[b]))
    ]
    return old + decision.staged_keep[row].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_quotas_fill_group_by_group(form: str, case: CommitCase, groups: int) -> None:
    state = make_state(case, seed=2)
    rows = state.memory.num_rows
    quotas = tuple(7 * (i + 1) for i in range(groups))
    decision = LINE[form](state.memory, params_of(state, LineChoices(), quotas=quotas))
    for group, quota in enumerate(quotas):
        members = range(group * rows // groups, (group + 1) * rows // groups)
        scores = [(s, row, i) for row in members for i, s in enumerate(row_scores(state, row))]
        order = sorted(scores, key=lambda x: (-x[0], x[1], x[2]))
        protected = sum(math.isinf(s) for s, _, _ in scores)
        expected = {(row, i) for _, row, i in order[: max(quota, protected)]}
        got = {(row, i) for row in members for i, kept in enumerate(kept_of(state, decision, row)) if kept}
        assert got == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_threshold_ignores_the_budget(form: str) -> None:
    state = make_state(CommitCase("threshold", protected=0.1))
    decision = LINE[form](state.memory, params_of(state, LineChoices(threshold=0.3), keep=1))
    assert decision.line == 0.3
    for row in range(state.memory.num_rows):
        assert kept_of(state, decision, row) == [score > 0.3 for score in row_scores(state, row)]


@pytest.mark.parametrize("form", FORMS)
def test_without_redrawing_old_entries_all_stay(form: str) -> None:
    state = make_state(CommitCase("stay"))
    old = int(state.table.lens.sum())
    decision = LINE[form](state.memory, params_of(state, LineChoices(redraw=False), keep=old + 9))
    assert int(decision.alive.sum()) == old and int(decision.staged_keep.sum()) == 9


def test_smoothing_is_a_max_over_neighbours() -> None:
    state = make_state(CommitCase("smooth", entries=0))
    decision = torch_line(state.memory, params_of(state, LineChoices(smooth=5)))
    for row in range(state.memory.num_rows):
        scores = row_scores(state, row)
        expected = [max(scores[max(0, i - 2) : i + 3]) for i in range(len(scores))]
        assert decision.staged_score[row].tolist() == expected


def test_the_gate_is_its_formula() -> None:
    state = make_state(CommitCase("gate", entries=0))
    rows, head_dim = state.memory.num_rows, state.memory.layout.head_dim
    gate = GateWeights(torch.randn(rows, 2 * head_dim + 1), torch.randn(rows))
    params = params_of(state, LineChoices(score="gate", threshold=0.4), gate=gate)
    decision = torch_line(state.memory, params)
    page_tokens = state.memory.pages[0].shape[3]
    for row in range(rows):
        layer, head = divmod(row, state.memory.pages[0].shape[1])
        for i, slot in enumerate(state.staged.tolist()):
            key, value = state.memory.pages[layer][slot // page_tokens, head, :, slot % page_tokens].double()
            features = torch.cat((key, value, torch.tensor([(500 + i) / 1024.0]).double()))
            p = float((gate.weight[row].double() @ features + gate.bias[row].double()).sigmoid())
            assert float(decision.staged_score[row, i]) == pytest.approx(p, abs=1e-5)
            assert bool(decision.staged_keep[row, i]) == (p > 0.4)


def test_redundancy_is_its_definition() -> None:
    gen = torch.Generator().manual_seed(4)
    keys = torch.randn(12, 8, generator=gen)
    keys[5] = keys[2] * 3.0 + 0.01 * torch.randn(8, generator=gen)
    keys[9] = keys[2] + 0.01 * torch.randn(8, generator=gen)
    importance = torch.rand(12, generator=gen)
    unit = [k / k.norm() for k in keys.double()]
    similarity = [[0.0 if i == j else float(unit[i] @ unit[j]) for j in range(12)] for i in range(12)]
    for row in similarity:
        alike = [j for j, s in enumerate(row) if s > SIMILAR]
        if alike:
            row[alike[-1]] = 0.0
    means = torch.tensor([sum(row[j] for row in similarity) / 12 for j in range(12)])
    share = importance / importance.sum()
    for weight in (0.0, 0.1, 1.0):
        expected = weight * share - (1 - weight) * means.softmax(dim=0) + 1.0
        torch.testing.assert_close(rank_row(keys, importance, weight), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("redraw", [True, False])
def test_redundant_entries_leave_first(form: str, redraw: bool) -> None:
    state = make_state(CommitCase("twins", spread=0.0, centres=3, equal=True, protected=0.1, format="fp32"))
    choices = LineChoices(redundancy=0.0, redraw=redraw)
    keep = int(state.table.lens.sum()) + 24
    decision = LINE[form](state.memory, params_of(state, choices, keep=keep))
    kept = int(decision.staged_keep.sum() + decision.alive.sum())
    assert kept == keep
    assert redraw or int(decision.alive.sum()) == int(state.table.lens.sum())
    protected = torch.isinf(state.memory.score[state.table.ids])
    assert bool(decision.alive[protected].all())


POOLINGS = (
    Pooling((Tier(0, 4, "mean"),)),
    Pooling((Tier(0, 5, "weighted"),)),
    Pooling((Tier(0, 2, "mean"), Tier(30, 4, "max"))),
    Pooling((Tier(0, 3, "mean"),), bias="root"),
    Pooling((Tier(0, 3, "max"),), bias="none"),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pooling", POOLINGS, ids=lambda p: f"{p.tiers[0].how}-{p.bias}-{len(p.tiers)}")
@pytest.mark.parametrize("name", ["first_commit", "later_commit", "nothing_staged", "one_token", "k8v4", "ties"])
def test_super_tokens_against_brute_force(form: str, pooling: Pooling, name: str) -> None:
    state = make_state(next(c for c in CASES if c.name == name), seed=5)
    before = copy.deepcopy(state.memory)
    params = params_of(state, LineChoices(pooling=pooling), keep=int(state.table.lens.sum()) // 2 + 10)
    decision = LINE[form](state.memory, params)
    plain = torch_line(state.memory, replace(params, choices=LineChoices()))
    plan = plan_publish(state, decision, None)
    absorbed, _ = publish_of(form)(state.memory, plan, decision)
    total = 0
    for row in range(state.memory.num_rows):
        ages = [params.num_tokens - 1 - (500 + i) for i in range(state.staged.shape[0])]
        groups = brute_groups(plain.staged_keep[row].tolist(), ages, pooling)
        exact = [i for i, kept in enumerate(plain.staged_keep[row].tolist()) if kept]
        expected = sorted([[i] for i in exact] + groups)
        new = [entry for entry in new_entries(state, plan, row) if entry[3] == "staged"]
        assert len(new) == len(expected)
        total += sum(len(g) - 1 for g in groups)
        for members, (key, value, bias, _) in zip(expected, new, strict=True):
            check_merge(before, state, row, (members, members in groups), (key, value, bias), pooling)
    assert absorbed == total


def brute_groups(kept: list[bool], ages: list[int], pooling: Pooling) -> list[list[int]]:
    """Staged tokens below the line in runs of their tier's size."""
    groups: list[list[int]] = []
    for index, tier in enumerate(pooling.tiers):
        loose = [i for i, stays in enumerate(kept) if not stays and pooling.tier_of(ages[i]) == index]
        groups += [loose[first : first + tier.size] for first in range(0, len(loose), tier.size)]
    return groups


def new_entries(
    state: CommitState, plan: PublishParams, row: int
) -> list[tuple[torch.Tensor, torch.Tensor, float, str]]:
    """Entries of the row's new blocks; those from dissolved blocks come first."""
    layout = state.memory.layout
    moved = sum(
        int((plan_alive(state, plan)[b]).sum())
        for b in range(plan.old.starts[row], plan.old.starts[row + 1])
        if plan.dissolve[b]
    )
    found = []
    for b in range(plan.new.starts[row], plan.new.starts[row + 1]):
        if plan.is_new[b]:
            raw = state.memory.blocks[int(plan.new.ids[b])][None]
            keys, values = block_bytes.read_keys(raw, layout)[0], block_bytes.read_values(raw, layout)[0]
            bias = block_bytes.read_bias(raw, layout)[0]
            found += [(keys[i], values[i], float(bias[i])) for i in range(int(plan.new.lens[b]))]
    return [(*entry, "old" if i < moved else "staged") for i, entry in enumerate(found)]


def plan_alive(state: CommitState, plan: PublishParams) -> torch.Tensor:
    """Without re-pooling nothing of old blocks merges, so what is alive follows from the sizes of the new blocks."""
    params = params_of(state, LineChoices(), keep=int(plan.old.lens.sum()) // 2 + 10)
    return torch_line(state.memory, params).alive


def check_merge(
    before: KvMemory,
    state: CommitState,
    row: int,
    group: tuple[list[int], bool],
    got: tuple[torch.Tensor, torch.Tensor, float],
    pooling: Pooling,
) -> None:
    members, pooled = group
    layer, head = divmod(row, before.pages[0].shape[1])
    page_tokens, layout = before.pages[0].shape[3], before.layout
    slots = [int(state.staged[i]) for i in members]
    kv = torch.stack([before.pages[layer][s // page_tokens, head, :, s % page_tokens] for s in slots]).double()
    seen = [max(float(before.seen[layer][s // page_tokens, head, s % page_tokens]), 2.0**-24) for s in slots]
    tier = pooling.tiers[pooling.tier_of(520 + state.staged.shape[0] - 1 - (500 + members[0]))]
    raw = seen if tier.how == "weighted" and pooled else [1.0] * len(members)
    p = torch.tensor([w / sum(raw) for w in raw], dtype=torch.float64)
    merged = kv.amax(dim=0) if tier.how == "max" and pooled else (p[:, None, None] * kv).sum(dim=0)
    bias = float(-(p * p.log()).sum())
    if pooled and pooling.bias == "root":
        merged[0] *= math.sqrt(len(members))
    if pooling.bias != "mass":
        bias = 0.0
    tolerance = 0.5 if layout.format == "k8v4" else 1e-4
    torch.testing.assert_close(got[0].double(), merged[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(got[1].double(), merged[1], atol=tolerance, rtol=0)
    assert got[2] == pytest.approx(bias, abs=2e-3)


def test_old_entries_merge_only_in_whole_groups_of_equal_mass() -> None:
    pooling = Pooling((Tier(0, 1), Tier(10, 2), Tier(40, 4)))
    now = 101  # newest position 100
    positions = [10, 11, 12, 20, 25, 28, 70, 75, 80, 99, 5]
    masses = [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 4]
    score = torch.tensor([[p + 1.0 for p in positions]])
    bias = torch.tensor([[math.log(m) for m in masses]])
    got = group_old(torch.ones(1, len(positions), dtype=torch.bool), score, bias, pooling, now)
    by_group: dict[int, list[int]] = {}
    for position, group in zip(positions, got.group[0].tolist(), strict=True):
        if group != NO_GROUP:
            by_group.setdefault(group, []).append(position)
    # Age 40 and more wants 4: two of the three pairs; three single ones are too few. Age 10 to 39 wants pairs.
    assert sorted(by_group.values()) == [[10, 11], [70, 75]]
    assert [p for p, leads in zip(positions, got.leader[0].tolist(), strict=True) if leads] == [10, 70]


def test_groups_of_staged_tokens_do_not_cross_tiers() -> None:
    pooling = Pooling((Tier(0, 2), Tier(5, 4)))
    ages = torch.arange(11, -1, -1)
    loose = torch.ones(1, 12, dtype=torch.bool)
    loose[0, 3] = False
    got = group_staged(loose, ages, pooling)
    members = [[i for i in range(12) if int(got.group[0, i]) == g] for g in dict.fromkeys(got.group[0].tolist())]
    assert members == [[0, 1, 2, 4], [3], [5, 6], [7, 8], [9, 10], [11]]
    assert got.leader[0].nonzero()[:, 0].tolist() == [0, 5, 7, 9, 11]


def test_plain_params_are_told_from_others() -> None:
    state = make_state(CommitCase("plain"))
    assert LineParams(state.staged, state.table, 5, 0).plain
    for changed in (
        params_of(state, LineChoices(smooth=3)), params_of(state, LineChoices(), quotas=(1, 2)),
        params_of(state, LineChoices(pooling=POOLINGS[0])), params_of(state, LineChoices(redraw=False)),
    ):  # fmt: skip
        assert not changed.plain
