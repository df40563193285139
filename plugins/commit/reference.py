"""Brute-force form of a commit in float64: sorts and loops, nothing mutated. What the torch form is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from plugins.blocks import read_bias, read_keys, read_values
from plugins.commit.entries import TINY_WEIGHT
from plugins.commit.params import Decision, LineParams, PublishParams, RowTable
from plugins.memory import KvMemory


@dataclass
class Entry:
    """One staged token or old entry of a row. `place`: (block id, offset) of an old entry in a block that stays."""

    key: torch.Tensor
    value: torch.Tensor
    bias: float
    score: float
    kept: bool
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class PublishOutcome:
    """written [rows]: entries of each row's new blocks; rewritten: merged entries of blocks that stay, by place."""

    written: list[list[Entry]]
    rewritten: dict[tuple[int, int], Entry]
    absorbed: int
    dropped: int


def draw_line(memory: KvMemory, params: LineParams) -> Decision:
    """Ranks everything: the floor of each row first, then the whole conversation."""
    staged = torch.stack([_staged_scores(memory, params.staged, row) for row in range(memory.num_rows)])
    if params.outlier_z is not None:
        _protect_outliers(memory, params, staged)
    ranked: list[tuple[float, int, int]] = []
    kept: set[tuple[int, int]] = set()
    for row in range(memory.num_rows):
        scale = params.layer_scale[row // memory.pages[0].shape[1]] if params.layer_scale else 1.0
        scores = [*_old_scores(memory, params.table, row), *staged[row].tolist()]
        scores = [s if math.isinf(s) else s * scale for s in scores]
        order = sorted((-s, row, i) for i, s in enumerate(scores))
        kept |= {(row, i) for _, _, i in order[: max(0, params.floor_entries)]}
        kept |= {(row, i) for s, _, i in order if s == -math.inf}
        ranked += order
    line = math.inf
    for negative, row, i in sorted(x for x in ranked if x[1:] not in kept):
        if len(kept) >= params.keep_entries:
            break
        kept.add((row, i))
        line = -negative
    return _as_decision(memory, params, (line, kept, staged))


def _as_decision(
    memory: KvMemory, params: LineParams, drawn: tuple[float, set[tuple[int, int]], torch.Tensor]
) -> Decision:
    line, kept, staged = drawn
    alive = torch.zeros((params.table.ids.shape[0], memory.layout.block_entries), dtype=torch.bool)
    staged_keep = torch.zeros(staged.shape, dtype=torch.bool)
    for row in range(memory.num_rows):
        index = 0
        for b in range(params.table.starts[row], params.table.starts[row + 1]):
            for offset in range(int(params.table.lens[b])):
                alive[b, offset] = (row, index) in kept
                index += 1
        for i in range(staged.shape[1]):
            staged_keep[row, i] = (row, index + i) in kept
    return Decision(line, staged_keep, staged.float(), alive)


def _staged_scores(memory: KvMemory, slots: torch.Tensor, row: int) -> torch.Tensor:
    layer, head = divmod(row, memory.pages[0].shape[1])
    page_tokens = memory.pages[0].shape[3]
    scores = [float(memory.seen[layer][s // page_tokens, head, s % page_tokens]) for s in slots.tolist()]
    return torch.tensor(scores, dtype=torch.float64)


def _old_scores(memory: KvMemory, table: RowTable, row: int) -> list[float]:
    return [
        float(memory.score[int(table.ids[b]), offset])
        for b in range(table.starts[row], table.starts[row + 1])
        for offset in range(int(table.lens[b]))
    ]


def _protect_outliers(memory: KvMemory, params: LineParams, staged: torch.Tensor) -> None:
    for row in range(memory.num_rows):
        scores = [s for s in [*_old_scores(memory, params.table, row), *staged[row].tolist()] if math.isfinite(s)]
        if not scores:
            continue
        mean = sum(scores) / len(scores)
        spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores))
        staged[row][staged[row] > mean + float(params.outlier_z or 0.0) * spread] = math.inf


def publish(memory: KvMemory, params: PublishParams, decision: Decision) -> PublishOutcome:
    """What the torch form must write, before quantization."""
    written: list[list[Entry]] = []
    rewritten: dict[tuple[int, int], Entry] = {}
    absorbed = dropped = 0
    for row in range(memory.num_rows):
        moving, staying = _row_entries(memory, params, decision, row)
        kept = [e for e in moving if e.kept]
        candidates = [e for e in kept + staying if e.kept and math.isfinite(e.score)]
        groups: dict[int, list[Entry]] = {}
        for entry in (e for e in moving if not e.kept):
            target = _nearest(entry, candidates, params.absorb_gate)
            if target is None:
                dropped += 1
                continue
            absorbed += 1
            groups.setdefault(target, []).append(entry)
        for target, entries in groups.items():
            _merge(candidates[target], entries)
            place = candidates[target].place
            if place is not None:
                rewritten[place] = candidates[target]
        written.append(kept)
    return PublishOutcome(written, rewritten, absorbed, dropped)


def _row_entries(
    memory: KvMemory, params: PublishParams, decision: Decision, row: int
) -> tuple[list[Entry], list[Entry]]:
    """Entries of dissolved blocks and staged tokens, and entries of the blocks that stay."""
    layer, head = divmod(row, memory.pages[0].shape[1])
    page_tokens = memory.pages[0].shape[3]
    moving: list[Entry] = []
    staying: list[Entry] = []
    for b in range(params.old.starts[row], params.old.starts[row + 1]):
        block = int(params.old.ids[b])
        raw = memory.blocks[block : block + 1]
        keys, values, bias = (f(raw, memory.layout)[0].double() for f in (read_keys, read_values, read_bias))
        for i in range(int(params.old.lens[b])):
            entry = Entry(keys[i], values[i], float(bias[i]), float(memory.score[block, i]), bool(decision.alive[b, i]))
            if params.dissolve[b]:
                moving.append(entry)
            else:
                entry.place = (block, i)
                staying.append(entry)
    exact = set() if decision.exact is None else set(decision.exact[row].tolist())
    for i, slot in enumerate(params.staged.tolist()):
        if i in exact:
            continue
        key, value = memory.pages[layer][slot // page_tokens, head, :, slot % page_tokens].double()
        score = float(decision.staged_score[row, i])
        moving.append(Entry(key, value, 0.0, score, bool(decision.staged_keep[row, i])))
    return moving, staying


def _nearest(entry: Entry, candidates: list[Entry], gate: float | None) -> int | None:
    """Index of the nearest candidate under the gate; candidates never include protected entries."""
    if gate is None or not candidates:
        return None
    distances = [float((entry.key - c.key).norm()) for c in candidates]
    best = min(range(len(candidates)), key=distances.__getitem__)
    return best if distances[best] < gate * float(entry.key.norm()) else None


def _merge(target: Entry, entries: list[Entry]) -> None:
    """v = sum p v, bias = sum p (b - ln p) with p proportional to the scores."""
    members = [target, *entries]
    weights = [max(e.score, TINY_WEIGHT) for e in members]
    shares = [w / sum(weights) for w in weights]
    value = torch.stack([p * e.value for p, e in zip(shares, members, strict=True)]).sum(dim=0)
    target.bias = sum(p * (e.bias - math.log(p)) for p, e in zip(shares, members, strict=True))
    target.value = value
