"""Selection on the host and by sorting agree, and are what sorting by hand says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.commit import line as line_module
from plugins.commit.selection import best_above, best_of_groups


@settings(deadline=None)
@given(scores=st.lists(st.integers(0, 6), max_size=20), count=st.integers(-2, 25))
def test_the_best_and_of_equals_the_first(scores: list[int], count: int) -> None:
    line, mask = best_above(torch.tensor(scores, dtype=torch.float32), count)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: max(0, count)]
    assert mask.nonzero().flatten().tolist() == sorted(order)
    assert line == (scores[order[-1]] if order else math.inf)


@settings(deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 2, 3, 6]), columns=st.integers(0, 8))
def test_groups_at_once_are_chosen_as_one_by_one(data: st.DataObject, groups: int, columns: int) -> None:
    """Ranks with ties, entries that are not there, and entries that stay in any case."""
    cells = st.lists(st.sampled_from(["none", "kept", 0, 1, 2, 3]), min_size=6 * columns, max_size=6 * columns)
    drawn = data.draw(cells)
    quotas = tuple(data.draw(st.lists(st.integers(0, 30), min_size=groups, max_size=groups)))
    rank = torch.tensor([-1.0 if c == "none" else math.inf if c == "kept" else c for c in drawn]).view(6, columns)
    filled = torch.tensor([c != "none" for c in drawn], dtype=torch.bool).view(6, columns)
    kept = torch.tensor([c == "kept" for c in drawn], dtype=torch.bool).view(6, columns)
    line, let_in = best_of_groups(rank, filled & ~kept, torch.tensor(quotas), kept)
    expected = kept.clone()
    assert line_module._fill_quotas(expected, rank, filled, quotas) == float(line)
    assert torch.equal(kept | let_in, expected)


@pytest.mark.parametrize("quotas", [(40,), (10, 20)])
def test_a_device_chooses_by_sorting_and_waits_for_nothing(quotas: tuple[int, ...]) -> None:
    rank, filled, kept = (
        torch.empty((6, 9), dtype=dtype, device="meta") for dtype in (torch.float32, *2 * [torch.bool])
    )
    line = line_module._fill_quotas(kept, rank, filled, quotas)
    assert isinstance(line, torch.Tensor) and line.device.type == "meta" and line.shape == ()
