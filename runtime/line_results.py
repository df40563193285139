"""What comes up of the lines that an executor has drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plugins.commit.exact import count_lost
from plugins.commit.params import Decision
from runtime.step import LinePlan, LineResult, int32


@dataclass(frozen=True, eq=False)
class Decided:
    """`LineResult.decision` of executors that keep KV in arenas: what a plan came to."""

    plan: LinePlan
    decision: Decision


def line_results(plans: Sequence[LinePlan], decisions: Sequence[Decision]) -> tuple[LineResult, ...]:
    """The counts of all decisions, in one copy: a device is waited for here and only here."""
    columns = [
        (
            _scalar(decision.line, decision.alive),
            count_lost(decision, plan.num_exact),
            decision.staged_keep.sum(1),
            decision.alive.sum(1),
            decision.repooled,
        )
        for plan, decision in zip(plans, decisions, strict=True)
    ]
    values = iter(torch.cat([column.double() for group in columns for column in group]).tolist())
    results = []
    for plan, decision, group in zip(plans, decisions, columns, strict=True):
        (line,), (lost,), *counts = ([next(values) for _ in range(column.shape[0])] for column in group)
        new_kept, alive, repooled = (int32(map(int, column)) for column in counts)
        num_exact = 0 if decision.exact is None else decision.exact.shape[1]
        decided = Decided(plan, decision)
        results.append(LineResult(line, new_kept, alive, repooled, num_exact, int(lost), decided))
    return tuple(results)


def _scalar(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[1] fp64 where `like` lies."""
    if isinstance(value, torch.Tensor):
        return value.double().view(1)
    return torch.full((1,), value, dtype=torch.float64, device=like.device)
