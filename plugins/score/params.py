"""The parameters of `score`: one record for a single layer.

For every row with `record` set and every query head h of KV head g, the weight exp(logit - lse) of each page token that
the row sees and each filled entry listed for g raises `seen` or `score`: x = max(x, weight). Which page tokens a row
sees, how the bias enters the logit and what `record_skip` leaves out is as in plugins.attend.params; `attend` followed
by `score` with its log-sum-exp therefore records what `attend` alone would. Values are not read, nothing else is
written.

Where `record` is RECORD_SQUARES, in all recorded rows of a sequence, squares are added up instead, as `attend` does:
x = sqrt(x^2 + the sum of weight^2). Two such sequences of one call must have no page or block in common.

It is the second pass of a prefill chunk, over the rows sampled from it, and the probe: rows that re-read a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.attend.params import AttendTables
from plugins.layout import BlockLayout


@dataclass(frozen=True, eq=False)
class ScoreParams:
    """q [rows, q_heads, head_dim] fp32/bf16/fp16; lse [rows, q_heads] fp32, natural, -inf where a row sees nothing.

    pages, seen, blocks, score, block_layout, tables, scale: as in `plugins.attend.params.AttendParams`.
    """

    q: torch.Tensor
    lse: torch.Tensor
    pages: torch.Tensor
    seen: torch.Tensor
    blocks: torch.Tensor
    score: torch.Tensor
    block_layout: BlockLayout
    tables: AttendTables
    scale: float


class ScoreForm(Protocol):
    """A form of `score`: raises params.seen and params.score in place."""

    def __call__(self, params: ScoreParams) -> None: ...
