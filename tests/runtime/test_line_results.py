"""What comes up of several lines at once is what each decision says."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from plugins.commit.params import Decision
from runtime.kv_state import make_block_table
from runtime.line_results import Decided, line_results
from runtime.step import CommitRules, LinePlan, int32


def decision(seed: int, num_staged: int, num_blocks: int, line: float | torch.Tensor) -> Decision:
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand((6, num_staged), generator=draw) < 0.5
    return Decision(line, keep, keep.float(), torch.rand((num_blocks, 4), generator=draw) < 0.5)


def test_counts_of_each_come_up_and_its_decision_stays_with_it() -> None:
    pooled = replace(decision(3, 5, 4, 0.25), old_group=torch.tensor([[-1] * 4, [-1, 0, 0, 1], [-1] * 4, [2] * 4]))
    decisions = [decision(1, 9, 7, math.inf), pooled, decision(2, 0, 0, torch.tensor(0.1))]
    plans = [LinePlan(i, int32(), make_block_table("int4", [[]] * 6), 1, CommitRules()) for i in range(3)]
    results = line_results(plans, decisions)
    for plan, one, result in zip(plans, decisions, results, strict=True):
        assert result.line == float(one.line)
        assert list(result.new_kept) == one.staged_keep.sum(dim=1).tolist()
        assert list(result.alive) == one.alive.sum(dim=1).tolist()
        assert isinstance(result.decision, Decided)
        assert result.decision.plan is plan and result.decision.decision is one
    assert [list(result.repooled) for result in results] == [[], [0, 1, 0, 1], []]
