"""Fates that a commit's watcher is told, against what `publish` then does; tests/runtime/test_trace.py has pooling."""

from __future__ import annotations

import copy

import pytest
import torch

from plugins import blocks as block_bytes
from plugins.commit.fates import GONE, commit_fates
from plugins.commit.line import draw_line
from plugins.commit.params import LineParams, PublishParams
from plugins.commit.publish import publish
from tests.plugins.commit_cases import CASES, CommitCase, CommitState, make_state, plan_publish


def keys_and_bias(state: CommitState, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [entries, D] and biases of the row's filled old entries, then its staged tokens; by loops."""
    memory, table = state.memory, state.table
    layer, head = divmod(row, memory.pages[0].shape[1])
    keys, bias = [], []
    for block in range(table.starts[row], table.starts[row + 1]):
        raw = memory.blocks[table.ids[block]][None]
        count = int(table.lens[block])
        keys += list(block_bytes.read_keys(raw, memory.layout)[0, :count])
        bias += block_bytes.read_bias(raw, memory.layout)[0, :count].tolist()
    for slot in state.staged.tolist():
        page, offset = divmod(slot, memory.pages[0].shape[3])
        keys.append(memory.pages[layer][page, head, 0, offset].float())
        bias.append(0.0)
    return torch.stack(keys), torch.tensor(bias)


@pytest.mark.parametrize("case", [c for c in CASES if c.staged], ids=lambda c: c.name)
@pytest.mark.parametrize("gate", [None, 0.35, 5.0])
def test_counts_are_those_of_publish(case: CommitCase, gate: float | None) -> None:
    state = make_state(case)
    total = int(state.table.lens.sum()) + case.staged * state.memory.num_rows
    decision = draw_line(state.memory, LineParams(state.staged, state.table, int(0.3 * total), 3))
    params = plan_publish(state, decision, gate)
    fates = commit_fates(state.memory, params, decision)
    absorbed = sum(int(((f != GONE) & (f != torch.arange(len(f)))).sum()) for f in fates)
    dropped = sum(int((f == GONE).sum()) for f in fates)
    assert (absorbed, dropped) == publish(state.memory, params, decision)
    assert all(bool((f[f[f != GONE]] == f[f != GONE]).all()) for f in fates)  # what absorbs is part of itself


@pytest.mark.parametrize("gate", [0.35, 0.8])
def test_the_absorbing_entry_is_the_nearest_kept_one_and_gets_the_mass(gate: float) -> None:
    state = make_state(CommitCase("mass", staged=40, entries=80, equal=True, spread=0.15))
    decision = draw_line(state.memory, LineParams(state.staged, state.table, 120, 3))
    params = plan_publish(state, decision, gate)
    before = copy.deepcopy(state)
    fates = commit_fates(state.memory, params, decision)
    publish(state.memory, params, decision)
    num_absorbed = 0
    for row, fate in enumerate(fates):
        keys, bias = keys_and_bias(before, row)
        blocks = range(before.table.starts[row], before.table.starts[row + 1])
        alive = [bool(a) for b in blocks for a in decision.alive[b, : int(before.table.lens[b])]]
        above = [j for j, stays in enumerate([*alive, *decision.staged_keep[row].tolist()]) if stays]
        absorbers = [int(f) for i, f in enumerate(fate.tolist()) if f not in (i, GONE)]
        for i, into in enumerate(fate.tolist()):
            if into in (i, GONE):
                continue
            num_absorbed += 1
            distance = (keys[i] - keys[into]).norm()
            assert distance < gate * keys[i].norm()
            assert not [j for j in above if (keys[i] - keys[j]).norm() < distance * (1 - 1e-5)]
        changed = _changed_biases(state, params, row, keys, bias)
        assert changed == set(absorbers)
    assert num_absorbed > 20


def _changed_biases(
    after: CommitState, params: PublishParams, row: int, keys: torch.Tensor, bias: torch.Tensor
) -> set[int]:
    """Entries whose bias grew: found by their keys, which stay exact in an unquantized format."""
    table = params.new
    changed = set()
    for block in range(table.starts[row], table.starts[row + 1]):
        raw = after.memory.blocks[table.ids[block]][None]
        new_keys = block_bytes.read_keys(raw, after.memory.layout)[0, : int(table.lens[block])]
        new_bias = block_bytes.read_bias(raw, after.memory.layout)[0, : int(table.lens[block])]
        for key, value in zip(new_keys, new_bias, strict=True):
            [index] = (keys == key).all(dim=1).nonzero()[:, 0].tolist()
            if abs(float(value) - float(bias[index])) > 1e-6:
                changed.add(index)
    return changed
