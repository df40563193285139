"""Super tokens: which entries of a row go together, and what becomes of them.

The members of a group are consecutive in time and lie in one tier. Its first members, as many as the tier has entries,
are the leaders: they stay, with the merged keys, values and biases; the others are gone. A set with weights p (sum 1)
becomes
    k = sum p_j k_j      v = sum p_j v_j      bias = sum p_j (b_j - ln p_j)
"mean" takes p_j as the mass exp(b_j), for which the bias is the log of the masses' sum; "weighted" takes p_j as the
score; "max" takes the largest of every channel and that same log-sum; "learned" takes what a trained network says.
"pca" first parts the group into as many sets as it has leaders and weighs each by score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.commit.choices import Pooling, PoolKind
from plugins.commit.components import part_by_components, place_in_group
from plugins.commit.entries import TINY_WEIGHT, Entries
from plugins.commit.merger import RowMerger, merge_weights

NO_GROUP = -1


@dataclass(frozen=True, eq=False)
class Grouping:
    """group [rows, columns] int64, NO_GROUP or number * num_tiers + tier; leader [rows, columns] bool."""

    group: torch.Tensor
    leader: torch.Tensor


def tiers_of(ages: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Index of the tier of each age, in its shape, int64."""
    bounds = torch.tensor([tier.min_age for tier in pooling.tiers[1:]], dtype=torch.float32, device=ages.device)
    return torch.bucketize(ages.float(), bounds, right=True)


def group_staged(loose: torch.Tensor, ages: torch.Tensor, pooling: Pooling) -> Grouping:
    """loose [rows, n] bool: staged tokens to be pooled; ages [n]. The last group of a tier may be smaller.

    A group of no more members than the tier has entries stays as it is: all of them lead.
    """
    group = torch.full(loose.shape, NO_GROUP, dtype=torch.int64, device=loose.device)
    leader = torch.zeros_like(loose)
    tier_of = tiers_of(ages, pooling)
    for index, tier in enumerate(pooling.tiers):
        members = loose & (tier_of == index)
        place = members.cumsum(dim=1) - 1
        group = torch.where(
            members, torch.div(place, tier.size, rounding_mode="floor") * len(pooling.tiers) + index, group
        )
        leader |= members & (place % tier.size < tier.entries)
    return Grouping(group, leader)


def group_old(loose: torch.Tensor, score: torch.Tensor, bias: torch.Tensor, pooling: Pooling, now: int) -> Grouping:
    """Old entries that have aged into a tier of larger super tokens than they are.

    loose [rows, columns] bool; score: position + 1; bias: log-mass; now: tokens of the conversation. Entries of equal
    mass go together, whole groups only, so that a rest waits for the next commit.
    """
    order = torch.where(loose, score, torch.inf).argsort(dim=1, stable=True)
    free = loose.gather(1, order)
    tier_of = tiers_of(now - score.gather(1, order), pooling)
    mass = bias.gather(1, order).exp().round()
    group = torch.full(loose.shape, NO_GROUP, dtype=torch.int64, device=loose.device)
    leader = torch.zeros_like(loose)
    used = torch.zeros((loose.shape[0], 1), dtype=torch.int64, device=loose.device)
    for index, tier in enumerate(pooling.tiers):
        for old_mass in range(1, tier.size // 2 + 1):
            count = tier.size // old_mass
            members = free & (tier_of == index) & (mass == old_mass)
            place = members.cumsum(dim=1) - 1
            whole = torch.div(members.sum(dim=1, keepdim=True), count, rounding_mode="floor")
            members &= place < whole * count
            number = used + torch.div(place, count, rounding_mode="floor")
            group = torch.where(members, number * len(pooling.tiers) + index, group)
            leader |= members & (place % count == 0)
            used = used + whole
    back = order.argsort(dim=1)
    return Grouping(group.gather(1, back), leader.gather(1, back))


@dataclass(frozen=True, eq=False)
class Merging:
    """How groups become super tokens.   merger: of the row, for tiers that say "learned"."""

    pooling: Pooling
    merger: RowMerger | None = None


def pool(entries: Entries, keep: torch.Tensor, group: torch.Tensor, merging: Merging) -> tuple[Entries, torch.Tensor]:
    """Entries after their leaders took the others in, and which entries [n] bool are left: leaders and loners.

    keep [n] bool: what stays, leaders among it; group [n] as in `Grouping`.
    """
    grouped = group >= 0
    if not bool(grouped.any()):
        return entries, torch.ones_like(keep)
    pooling = merging.pooling
    names, number = torch.unique(group[grouped], return_inverse=True)
    tier = names % len(pooling.tiers)
    members = entries[grouped]
    most = max(t.entries for t in pooling.tiers)
    parts = number * most + _parts(members, number, tier, pooling)
    sets, part = torch.unique(parts, return_inverse=True)
    merged = _merge(members, part, tier[torch.div(sets, most, rounding_mode="floor")], merging)
    place = grouped.nonzero()[:, 0]
    leads = keep[place]
    leader = place[leads]
    of = torch.searchsorted(sets, number[leads] * most + place_in_group(number[leads]))
    assert leader.shape[0] == sets.shape[0], "a group has not one leader for each of its super tokens"
    keys, values, bias, score = (x.clone() for x in (entries.keys, entries.values, entries.bias, entries.score))
    keys[leader], values[leader], bias[leader], score[leader] = (
        merged.keys[of], merged.values[of], merged.bias[of], merged.score[of],
    )  # fmt: skip
    return Entries(keys, values, bias, score), keep | ~grouped


def _parts(members: Entries, number: torch.Tensor, tier: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Which of its group's super tokens each member goes into, [m] int64."""
    parts = torch.zeros_like(number)
    for index, kind in enumerate(pooling.tiers):
        of_tier = tier[number] == index
        if kind.how == "pca" and bool(of_tier.any()):
            weights = members.score[of_tier].clamp(TINY_WEIGHT, torch.finfo(torch.float16).max)
            parts[of_tier] = part_by_components(members.keys[of_tier], weights, number[of_tier], kind.entries)
    return parts


def _merge(members: Entries, number: torch.Tensor, tier: torch.Tensor, merging: Merging) -> Entries:
    """One entry for each set; number [m] int64: each member's set, tier [sets]: index of its tier."""
    sets, pooling = tier.shape[0], merging.pooling
    kinds = [t.how for t in pooling.tiers]

    def of_kind(*names: PoolKind) -> torch.Tensor:
        return torch.tensor([kind in names for kind in kinds], device=tier.device)[tier]

    weighted, largest, learned = of_kind("weighted", "pca")[number], of_kind("max"), of_kind("learned")[number]
    fp16_max = torch.finfo(torch.float16).max
    raw = torch.where(weighted, members.score.clamp(TINY_WEIGHT, fp16_max), members.bias.exp())
    if bool(learned.any()):
        assert merging.merger is not None, "learned super tokens need a trained network"
        raw = torch.where(learned, merge_weights(members, number, sets, merging.merger), raw)
    p = raw / raw.new_zeros(sets).index_add_(0, number, raw)[number]

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((sets, *x.shape[1:])).index_add_(0, number, x)

    def top(x: torch.Tensor) -> torch.Tensor:
        where = number if x.dim() == 1 else number[:, None].expand_as(x)
        return x.new_zeros((sets, *x.shape[1:])).scatter_reduce_(0, where, x, "amax", include_self=False)

    keys, values = (
        torch.where(largest[:, None], top(x), total(p[:, None] * x)) for x in (members.keys, members.values)
    )
    bias = total(p * (members.bias - p.log()))
    if pooling.bias == "root":
        keys = keys * total(torch.ones_like(p)).sqrt()[:, None]
    if pooling.bias != "mass":
        bias = torch.zeros_like(bias)
    return Entries(keys, values, bias, top(members.score))
