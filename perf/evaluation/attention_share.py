"""How unevenly a model's attention falls on the past: its share on the most read keys, and by distance in turns.

The model runs in transformers with the full cache. Rows of the last turns are looked at, in every layer and head. The
first token is left out of both figures: it soaks up weight that means nothing (attention sink, 2309.17453).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOP_SHARE = 0.05
BANDS = ((1, 10), (11, 20), (21, 10**6))
CHUNK_TOKENS = 256
ROW_STEP = 8  # rows of the last turns that are looked at: every eighth
LAST_TURNS = 3


@dataclass(frozen=True)
class AttentionShare:
    """Means over rows, layers and heads.

    top: share of a row's weight on the most read 5 % of the keys before it.   top_with_sink: the same, the first token
        included.   by_distance: of the weight on past turns, how much lies so many turns back ((first, last), share).
    per_token: the same, divided by the share of past tokens that lie there: 1 is even.
    """

    top: float
    top_with_sink: float
    by_distance: tuple[tuple[tuple[int, int], float], ...]
    per_token: tuple[float, ...]
    rows: int


class _Sums:
    """Adds up what every layer's attention says of the rows that are looked at."""

    def __init__(self, turns: torch.Tensor, rows: Sequence[int]) -> None:
        """turns [num_tokens] int64: turn of each token.   rows: positions looked at."""
        self._turns, self._rows = turns, set(rows)
        self.top = self.top_with_sink = 0.0
        self.bands = torch.zeros(len(BANDS), dtype=torch.float64)
        self.tokens = torch.zeros(len(BANDS), dtype=torch.float64)
        self.count = 0

    def add(self, weights: torch.Tensor, position: int) -> None:
        """weights [heads, position + 1] fp32 of one row."""
        past = weights[:, 1:]
        count = math.ceil(TOP_SHARE * past.shape[1])
        top = past.topk(count, dim=1).values.sum(dim=1)
        self.top += float((top / past.sum(dim=1)).mean())
        self.top_with_sink += float(
            weights.topk(max(1, math.ceil(TOP_SHARE * weights.shape[1])), 1).values.sum(1).mean()
        )
        distance = self._turns[position] - self._turns[1 : position + 1]
        before = distance >= 1
        whole = past[:, before].sum(dim=1)
        for band, (first, last) in enumerate(BANDS):
            inside = before & (distance >= first) & (distance <= last)
            self.bands[band] += float((past[:, inside].sum(dim=1) / whole).mean())
            self.tokens[band] += float(inside.sum() / before.sum())
        self.count += 1

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: one sequence, causal. query [1, heads, rows, D]; key, value [1, KV heads,
        keys, D]."""
        heads, num_rows = query.shape[1:3]
        num_keys, group = key.shape[2], heads // key.shape[1]
        first = num_keys - num_rows
        keys, values = (t[0].repeat_interleave(group, dim=0) for t in (key, value))
        logits = torch.bmm(query[0], keys.transpose(1, 2)) * float(options["scaling"])
        later = torch.arange(num_keys)[None, :] > torch.arange(first, num_keys)[:, None]
        weights = logits.masked_fill_(later, -torch.inf).softmax(dim=-1)
        for row in range(num_rows):
            if first + row in self._rows:
                self.add(weights[:, row, : first + row + 1], first + row)
        out = torch.bmm(weights, values)
        return out.transpose(0, 1)[None].contiguous(), None


@torch.inference_mode()
def attention_share(model: Any, turns: Sequence[Sequence[int]]) -> AttentionShare:
    """model: transformers' decoder.   turns: token ids of each turn; more than 20, so that every band has some."""
    from transformers import DynamicCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ids = [token for turn in turns for token in turn]
    owner = torch.tensor([i for i, turn in enumerate(turns) for _ in turn])
    last_turn = len(turns) - 1
    looked_at = [i for i in range(len(ids)) if int(owner[i]) > last_turn - LAST_TURNS][::ROW_STEP]
    sums = _Sums(owner, looked_at)
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("commitkv_share", sums.attend)
    model.config._attn_implementation = "commitkv_share"
    try:
        cache = DynamicCache()
        for start in range(0, len(ids), CHUNK_TOKENS):
            model(torch.tensor([ids[start : start + CHUNK_TOKENS]]), past_key_values=cache, logits_to_keep=1)
    finally:
        model.config._attn_implementation = before
    bands, tokens = sums.bands / sums.count, sums.tokens / sums.count
    return AttentionShare(
        sums.top / sums.count,
        sums.top_with_sink / sums.count,
        tuple((band, float(share)) for band, share in zip(BANDS, bands, strict=True)),
        tuple((bands / tokens).tolist()),
        len(looked_at),
    )
