"""Parts of a span along the principal components of its keys.

Principal direction divisive partitioning (Boley, 1998): the part whose keys scatter most about their mean is cut in two
where the first principal component of its keys changes sign, until there are as many parts as asked for. Each part is
then a set of alike keys that merges as any other (see `plugins.commit.pooling`), so what stays are means of real keys
under weights of sum 1, and never a direction that no key had.
"""

from __future__ import annotations

import torch


def place_in_group(number: torch.Tensor) -> torch.Tensor:
    """number [m] int64: each member's group -> how many members of its group come before it, [m] int64."""
    order = number.argsort(stable=True)
    counts = torch.bincount(number)
    first = (counts.cumsum(dim=0) - counts)[number[order]]
    place = torch.empty_like(number)
    place[order] = torch.arange(number.shape[0], device=number.device) - first
    return place


def part_by_components(keys: torch.Tensor, weights: torch.Tensor, number: torch.Tensor, parts: int) -> torch.Tensor:
    """The part of each member within its group, [m] int64 from 0, in the order of their first members.

    keys [m, D] fp32; weights [m] fp32 > 0; number [m] int64: each member's group. A group gets min(parts, members).
    """
    _, group = torch.unique(number, return_inverse=True)
    where = (group, place_in_group(group))
    shape = tuple(int(index.amax()) + 1 for index in where)
    x = keys.new_zeros((*shape, keys.shape[1]))
    w = keys.new_zeros(shape)
    x[where], w[where] = keys, weights
    part = torch.where(w > 0, 0, -1)
    for made in range(1, min(parts, shape[1])):
        part = torch.where(_cut(x, w, part, made), made, part)
    return _by_first_member(part, parts)[where]


def _cut(x: torch.Tensor, w: torch.Tensor, part: torch.Tensor, made: int) -> torch.Tensor:
    """Members [groups, n] bool that leave the part that scatters most; none in groups that cannot be cut further."""
    inside = part[..., None] == torch.arange(made, device=part.device)  # [groups, n, made]
    shares = w[..., None] * inside
    means = torch.einsum("gnp,gnd->gpd", shares, x) / shares.sum(dim=1)[..., None].clamp(min=1e-30)
    apart = x - torch.einsum("gnp,gpd->gnd", inside.to(x.dtype), means)
    scatter = torch.einsum("gnp,gn->gp", shares, apart.square().sum(dim=2))
    scatter = torch.where(inside.sum(dim=1) > 1, scatter, -1.0)
    worst = scatter.argmax(dim=1)
    chosen = (part == worst[:, None]) & (scatter.amax(dim=1) >= 0)[:, None]
    scaled = (w.sqrt()[..., None] * apart * chosen[..., None]).double()
    # The eigenvector of the Gram matrix has the sign of each member's coordinate along the principal component.
    side = torch.linalg.eigh(scaled @ scaled.transpose(1, 2)).eigenvectors[..., -1] > 0
    first = chosen.to(torch.int8).argmax(dim=1, keepdim=True)
    leaves = chosen & (side != side.gather(1, first))
    # Keys that are all the same have no component: the last one leaves, and merging the rest is exact.
    last = chosen & (chosen.cumsum(dim=1) == chosen.sum(dim=1, keepdim=True))
    return torch.where(leaves.any(dim=1, keepdim=True), leaves, last)


def _by_first_member(part: torch.Tensor, parts: int) -> torch.Tensor:
    """Parts [groups, n] numbered by where their first members stand; -1 stays."""
    place = torch.arange(part.shape[1], device=part.device)
    none = part.shape[1]
    firsts = torch.stack([torch.where(part == i, place, none).amin(dim=1) for i in range(parts)], dim=1)
    rank = firsts.argsort(dim=1, stable=True).argsort(dim=1)
    return torch.where(part >= 0, rank.gather(1, part.clamp(min=0)), part)
