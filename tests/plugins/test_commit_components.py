"""Principal parts of spans and merges by a trained network, against what they promise."""

from __future__ import annotations

import pytest
import torch

from plugins.commit.choices import Pooling, Tier
from plugins.commit.components import part_by_components, place_in_group
from plugins.commit.entries import TINY_WEIGHT, Entries
from plugins.commit.merger import MergeWeights, RowMerger, merge_weights
from plugins.commit.pooling import Merging, group_staged, pool

D = 8


def clustered(centres: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Keys [groups * n, D]; member j of group g lies near centre centres[g][j]."""
    gen = torch.Generator().manual_seed(seed)
    means = 4.0 * torch.randn(4, D, generator=gen)
    flat = [c for group in centres for c in group]
    return means[flat] + 0.05 * torch.randn(len(flat), D, generator=gen)


def test_parts_are_the_clusters_of_the_keys() -> None:
    centres = [[0, 1, 0, 2, 1, 0], [3, 3, 1, 3, 1, 2]]
    number = torch.tensor([7] * 6 + [9] * 6)
    parts = part_by_components(clustered(centres), torch.ones(12), number, 3).tolist()
    for got, expected in zip((parts[:6], parts[6:]), centres, strict=True):
        names: dict[int, int] = {}
        assert [names.setdefault(c, len(names)) for c in expected] == got, "numbered by their first members"


def test_every_group_gets_as_many_parts_as_it_can_have() -> None:
    number = torch.tensor([0] * 5 + [1] * 2 + [2] + [3] * 4)
    same = torch.ones(12, D)
    parts = part_by_components(same, torch.rand(12) + 0.1, number, 3)
    for group, expected in ((0, 3), (1, 2), (2, 1), (3, 3)):
        assert sorted(set(parts[number == group].tolist())) == list(range(expected)), "keys that are all the same too"
    assert place_in_group(torch.tensor([4, 2, 4, 4, 2])).tolist() == [0, 0, 1, 2, 1]


def test_the_first_cut_is_along_the_first_component() -> None:
    gen = torch.Generator().manual_seed(1)
    axis = torch.nn.functional.normalize(torch.randn(D, generator=gen), dim=0)
    along = torch.randn(40, generator=gen)
    keys = 5.0 * along[:, None] * axis + 0.1 * torch.randn(40, D, generator=gen)
    weights = torch.rand(40, generator=gen) + 0.5
    parts = part_by_components(keys, weights, torch.zeros(40, dtype=torch.int64), 2)
    side = along > (weights * along).sum() / weights.sum()
    clear = (along - (weights * along).sum() / weights.sum()).abs() > 0.1
    assert torch.equal((parts == parts[side.nonzero()[0, 0]])[clear], side[clear])


def entries(keys: torch.Tensor, seed: int = 0) -> Entries:
    gen = torch.Generator().manual_seed(seed)
    count = keys.shape[0]
    return Entries(keys, torch.randn(count, D, generator=gen), torch.zeros(count), torch.rand(count, generator=gen))


def test_a_span_becomes_its_parts_each_merged_by_score() -> None:
    keys = clustered([[0, 1, 0, 1, 0, 1]])
    before = entries(keys)
    pooling = Pooling((Tier(0, 6, "pca", 2),))
    grouping = group_staged(torch.ones(1, 6, dtype=torch.bool), torch.arange(6), pooling)
    assert grouping.leader[0].tolist() == [True, True, False, False, False, False]
    after, left = pool(before, grouping.leader[0], grouping.group[0], Merging(pooling))
    assert left.nonzero()[:, 0].tolist() == [0, 1]
    for leader, members in ((0, [0, 2, 4]), (1, [1, 3, 5])):
        p = before.score[members] / before.score[members].sum()
        torch.testing.assert_close(after.keys[leader], p @ before.keys[members])
        torch.testing.assert_close(after.values[leader], p @ before.values[members])
        assert float(after.bias[leader]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
        assert float(after.score[leader]) == pytest.approx(float(before.score[members].max()))


def test_a_short_last_span_stays_exact_and_a_longer_one_does_not() -> None:
    pooling = Pooling((Tier(0, 5, "pca", 3),))
    before = entries(torch.randn(12, D))
    grouping = group_staged(torch.ones(1, 12, dtype=torch.bool), torch.arange(12), pooling)
    after, left = pool(before, grouping.leader[0], grouping.group[0], Merging(pooling))
    assert left.nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6, 7, 10, 11]
    torch.testing.assert_close(after.keys[10:], before.keys[10:])
    torch.testing.assert_close(after.bias[10:], torch.zeros(2))


def merger_of(score: float, out: torch.Tensor) -> RowMerger:
    gen = torch.Generator().manual_seed(2)
    hidden = torch.randn(2 * D + 1, out.shape[0], generator=gen)
    return RowMerger(hidden, torch.zeros(out.shape[0]), out, torch.tensor(score))


@pytest.mark.parametrize(("score", "how"), [(1.0, "weighted"), (0.0, "mean")])
def test_a_network_that_learned_nothing_is_a_fixed_merge(score: float, how: str) -> None:
    before = entries(torch.randn(10, D))
    results = []
    for tier in (Tier(0, 5, "learned"), Tier(0, 5, how)):  # type: ignore[arg-type]
        pooling = Pooling((tier,))
        grouping = group_staged(torch.ones(1, 10, dtype=torch.bool), torch.arange(10), pooling)
        merging = Merging(pooling, merger_of(score, torch.zeros(3)))
        results.append(pool(before, grouping.leader[0], grouping.group[0], merging)[0])
    for name in ("keys", "values", "bias", "score"):
        torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name), atol=1e-5, rtol=1e-5)


def test_the_network_is_its_formula() -> None:
    members = entries(torch.randn(7, D), seed=3)
    number = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    merger = merger_of(0.7, torch.tensor([0.5, -0.25]))
    got = merge_weights(members, number, 2, merger)
    for group in (0, 1):
        of = (number == group).nonzero()[:, 0]
        log_score = members.score[of].clamp(min=TINY_WEIGHT).log()
        x = torch.cat((members.keys[of], members.values[of], log_score[:, None]), dim=1).double()
        inner = torch.tanh((x - x.mean(dim=0)) @ merger.hidden.double() + merger.offset.double())
        logits = 0.7 * log_score.double() + inner @ merger.out.double()
        p = got[of] / got[of].sum()
        torch.testing.assert_close(p.double(), logits.softmax(dim=0), atol=1e-5, rtol=1e-4)


def test_rows_have_networks_of_their_own() -> None:
    weights = MergeWeights(torch.randn(3, 2 * D + 1, 2), torch.randn(3, 2), torch.randn(3, 2), torch.randn(3))
    assert torch.equal(weights.row(1).hidden, weights.hidden[1]) and weights.row(2).score == weights.score[2]
