"""Page shares and entropy against brute force in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from plugins.attend.params import AttendParams
from plugins.attend.reference import _block_entries, _page_tokens, _weights
from plugins.attend.shares import page_shares
from tests.plugins.attend_cases import AttendCase, make_attend_case

CASES = (
    AttendCase("decode"),
    AttendCase("chunk_over_history", rows=(9,), tokens=(40,)),
    AttendCase("holes", rows=(5,), tokens=(31,), holes=True, format="k8v4"),
    AttendCase("no_committed", rows=(3,), tokens=(40,), max_entries=0),
    AttendCase("one_token", tokens=(1,), max_entries=0),
    AttendCase("bf16", rows=(2,), tokens=(20,), dtype="bf16", kv_dtype="bf16", format="int8"),
)


def brute_force(params: AttendParams, hidden: list[int]) -> tuple[list[float], float]:
    """Shares of pages in table order, and the mean normalised entropy."""
    kv_heads, page_ids = params.pages.shape[1], params.tables.page_ids.tolist()
    shares, entropies = dict.fromkeys(page_ids, 0.0), []
    group_size = params.q.shape[1] // kv_heads
    for g in range(kv_heads):
        tokens, entries = _page_tokens(params, 0, g), _block_entries(params, 0, g)
        for row, unseen in enumerate(hidden):
            visible = tokens[: max(0, len(tokens) - unseen)] + entries
            for h in range(g * group_size, (g + 1) * group_size):
                weights = _weights(params.q[row, h].double(), visible, params.scale)
                for weight, (_, _, _, (page, _, is_block)) in zip(weights, visible, strict=True):
                    if not is_block:
                        shares[page] += weight / (len(hidden) * params.q.shape[1])
                spread = -sum(w * math.log(w) for w in weights if w > 0)
                entropies.append(spread / math.log(len(visible)) if len(visible) > 1 else 0.0)
    return list(shares.values()), sum(entropies) / len(entropies)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_brute_force(case: AttendCase) -> None:
    params = make_attend_case(case)
    hidden = list(range(case.rows[0]))[::-1]
    expected, entropy = brute_force(params, hidden)
    seen, score = params.seen.clone(), params.score.clone()
    shares, got = page_shares(params, torch.tensor(hidden))
    assert shares.tolist() == pytest.approx(expected, abs=1e-4)
    assert float(got) == pytest.approx(entropy, abs=1e-3)
    assert torch.equal(params.seen.view(torch.int16), seen.view(torch.int16)), "no score is raised"
    assert torch.equal(params.score.view(torch.int16), score.view(torch.int16))


def test_even_attention_is_told_from_a_look_at_one_token() -> None:
    params = make_attend_case(AttendCase("even", tokens=(32,), max_entries=0))
    even = replace(params, q=torch.zeros_like(params.q))
    shares, entropy = page_shares(even, torch.tensor([0]))
    assert shares.tolist() == pytest.approx([0.25] * 4) and float(entropy) == pytest.approx(1.0)
    key = params.pages[int(params.tables.page_ids[2]), :, 0, 3]
    sharp = replace(params, q=100.0 * key.repeat_interleave(3, dim=0)[None])
    shares, entropy = page_shares(sharp, torch.tensor([0]))
    assert float(shares[2]) == pytest.approx(1.0, abs=1e-3) and float(entropy) == pytest.approx(0.0, abs=1e-2)
