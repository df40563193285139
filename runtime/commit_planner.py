"""The arithmetic of a commit: what is put before the line, which blocks dissolve, and what the tables become."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass

from plugins.commit.choices import LineChoices, Pooling, ScoreKind
from runtime.kv_state import ConversationKv, Page, make_block_table
from runtime.lifecycle import Event, State
from runtime.policy.base import Policy
from runtime.step import CommitRules, LinePlan, LineResult, PublishPlan, int32


def make_line_plan(handle: int, kv: ConversationKv, num_layers: int, pressure: float = 0.0) -> LinePlan:
    """Everything staged, exact entries once more, and a budget over all that was ever committed.

    pressure: share of the KV memory in use, for policies that ask for it.
    """
    slots = int32(page.page_id * kv.page_tokens + i for page in kv.exact_pages() for i in range(page.num_tokens))
    num_exact = len(slots)
    positions = int32([-1] * num_exact)
    for page in kv.staged_pages():
        shift = page.page_id * kv.page_tokens - page.positions[0]  # a staged page holds consecutive tokens
        loose = kv.loose_positions(page)
        slots.extend([shift + p for p in loose])
        positions.extend(loose)
    policy = kv.policy.at_commit(kv.num_commits)
    quotas = _layer_quotas(policy, kv, len(slots) - num_exact, num_layers)
    if policy.share == "head":
        quotas = [share for quota in quotas for share in _split_evenly(quota, kv.num_rows // num_layers)]
    return LinePlan(
        handle=handle,
        staged_slots=slots,
        blocks=kv.blocks,
        keep_entries=sum(quotas),
        rules=_rules(policy, kv.num_tokens, pressure),
        quotas=() if policy.share == "conversation" else tuple(quotas),
        positions=positions,
        num_exact=num_exact,
        num_tokens=kv.num_tokens,
    )


def _rules(policy: Policy, num_tokens: int, pressure: float) -> CommitRules:
    kinds: dict[str, ScoreKind] = {"recency": "position", "gate": "gate"}
    tiers = policy.tiers_at(num_tokens)
    choices = LineChoices(
        score=kinds.get(policy.score, "recorded"),
        smooth=policy.smooth,
        redundancy=policy.redundancy,
        threshold=None if policy.thresholds is None else policy.thresholds.at(pressure),
        redraw=policy.redraw,
        pooling=Pooling(tiers, policy.pool_bias) if tiers else None,
    )
    return CommitRules(
        floor_entries=policy.floor_entries,
        absorb_gate=policy.absorb_gate,
        layer_scale=policy.layer_scale,
        protect_outlier_z=policy.protection.outlier_z,
        choices=choices,
        gate=policy.gate.file if policy.gate is not None else "",
        merger=policy.merger.file if policy.learned else "",
        exact_entries=policy.exact_entries,
    )


def is_unscored(policy: Policy, kv: ConversationKv) -> bool:
    """Whether there is text that only a probe could have scored, and none has yet."""
    return policy.probe and not policy.records and bool(kv.unprobed)


def _layer_quotas(policy: Policy, kv: ConversationKv, num_staged: int, num_layers: int) -> list[int]:
    """Entries that each layer keeps; their sum is the budget of the conversation.

    Of a policy that does not redraw, old entries all stay and the budget is one of the staged tokens. Text that only a
    probe could have scored, and none has yet, is kept whole.
    """
    rows = kv.num_rows // num_layers
    if policy.tiers and not policy.pools_by_score:
        ratio, num_tokens = 0.0, 0
    else:
        ratio = 1.0 if is_unscored(policy, kv) else policy.budget_at(kv.num_tokens)
        num_tokens = num_staged + (kv.committed_tokens if policy.redraw else 0)
    total = 0.0
    quotas: list[int] = []
    for layer in range(num_layers):  # rounded so that the sums are right
        total += ratio * num_tokens * rows * policy.layer_weight(layer, num_layers)
        quotas.append(math.ceil(total - 1e-6) - sum(quotas))
    if not policy.redraw:
        starts, lens = kv.blocks.starts, kv.blocks.lens
        quotas = [
            quota + sum(lens[starts[layer * rows] : starts[(layer + 1) * rows]]) for layer, quota in enumerate(quotas)
        ]
    return quotas


def _split_evenly(total: int, parts: int) -> list[int]:
    """`total` in whole parts that differ by 1 at most."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def blocks_to_dissolve(
    alive: Sequence[int], new_kept: int, block_entries: int, repack_ratio: float, forced: Set[int] = frozenset()
) -> set[int]:
    """Indices of one row's blocks to empty, so that the row ends with the fewest blocks.

    Only blocks with less than `repack_ratio` of their entries above the line are candidates, emptiest first;
    of equal savings the one that rewrites fewest entries wins. `forced` blocks go in any case.
    """
    candidates = sorted((n, i) for i, n in enumerate(alive) if n < repack_ratio * block_entries and i not in forced)
    moved = new_kept + sum(alive[i] for i in forced)
    best, best_blocks = 0, math.ceil(moved / block_entries)
    for count, (num_alive, _) in enumerate(candidates, start=1):
        moved += num_alive
        blocks_after = math.ceil(moved / block_entries) - count
        if blocks_after < best_blocks:
            best, best_blocks = count, blocks_after
    return {i for _, i in candidates[:best]} | set(forced)


@dataclass(frozen=True)
class _RowDraft:
    """One row after the commit: old blocks that stay as (id, len), and entries to write to new ones."""

    stays: tuple[tuple[int, int], ...]
    num_written: int


@dataclass(frozen=True, eq=False)
class CommitDraft:
    """A commit whose line is drawn and whose new blocks and pages have no ids yet."""

    rows: tuple[_RowDraft, ...]
    dissolve: array[int]
    new_kept: int
    alive: int
    alive_in_dissolved: int
    below_in_dissolved: int
    below: int
    block_entries: int
    protected_slots: tuple[int, ...]
    protected_positions: tuple[int, ...]
    room_in_compacted: int
    page_tokens: int
    num_exact: int
    exact_lost: int

    @property
    def num_new_blocks(self) -> int:
        return sum(math.ceil(row.num_written / self.block_entries) for row in self.rows)

    @property
    def num_exact_pages(self) -> int:
        return math.ceil(self.num_exact / self.page_tokens)

    @property
    def num_new_pages(self) -> int:
        """Those of exact entries, which come first, and those that protected tokens move to."""
        num_moved = max(0, len(self.protected_slots) - self.room_in_compacted)
        return self.num_exact_pages + math.ceil(num_moved / self.page_tokens)

    def publish_plan(
        self, kv: ConversationKv, line: LinePlan, block_ids: array[int], page_ids: array[int]
    ) -> PublishPlan:
        """Gives the new blocks their ids and the protected tokens their new slots."""
        rows: list[list[tuple[int, int]]] = []
        new_flags = int32()
        next_id = iter(block_ids)
        for row in self.rows:
            lens = _split(row.num_written, self.block_entries)
            rows.append([*row.stays, *((next(next_id), n) for n in lens)])
            new_flags.extend([0] * len(row.stays) + [1] * len(lens))
        table = make_block_table(kv.blocks.format, rows)
        exact_ids, moved_ids = page_ids[: self.num_exact_pages], page_ids[self.num_exact_pages :]
        move_to = int32(_free_compacted_slots(kv, moved_ids)[: len(self.protected_slots)])
        exact_to = int32(_slots_of(exact_ids, kv.page_tokens)[: self.num_exact])
        return PublishPlan(line, self.dissolve, table, new_flags, int32(self.protected_slots), move_to, exact_to)

    def apply(self, kv: ConversationKv, plan: PublishPlan, page_ids: array[int]) -> tuple[array[int], array[int]]:
        """Swaps tables and counts; returns the page ids and block ids that are free now."""
        compacted = [page for page in kv.pages if page.compacted]
        compacted += [Page(page_id, compacted=True) for page_id in page_ids[self.num_exact_pages :]]
        positions = list(self.protected_positions)
        for page in compacted:
            room = kv.page_tokens - page.num_tokens
            page.positions.extend(positions[:room])
            del positions[:room]
        assert not positions
        lens = _split(self.num_exact, kv.page_tokens)
        exact = [Page(i, int32([-1] * n), State.COMMITTED) for i, n in zip(page_ids, lens, strict=False)]
        freed_pages = int32(page.page_id for pages in (kv.staged_pages(), kv.exact_pages()) for page in pages)
        freed_blocks = int32(b for b, gone in zip(kv.blocks.ids, self.dissolve, strict=True) if gone)
        flow = [page for page in kv.pages if page.state is State.ACTIVE and not page.compacted]
        kv.committed_tokens += kv.num_staged
        kv.num_commits += 1
        self._move_entries(kv)
        kv.set_pages(exact + compacted + flow)
        kv.blocks = plan.blocks
        return freed_pages, freed_blocks

    def _move_entries(self, kv: ConversationKv) -> None:
        ledger = kv.ledger
        fell = self.below + self.exact_lost - ledger[State.EVICTABLE]
        if fell >= 0:
            ledger.move(State.COMMITTED, Event.FELL, fell)
        else:
            ledger.move(State.EVICTABLE, Event.ROSE, -fell)
        ledger.move(State.EVICTABLE, Event.REPACKED, self.below_in_dissolved + self.exact_lost)
        were_exact = kv.num_exact * kv.num_rows - self.exact_lost
        ledger.move(State.STAGED, Event.KEPT, self.new_kept + self.num_exact * kv.num_rows - were_exact)
        ledger.move(State.STAGED, Event.BELOW, ledger[State.STAGED])


def draft_commit(kv: ConversationKv, line: LineResult, block_entries: int) -> CommitDraft:
    """Decides row by row which blocks dissolve, and finds the protected tokens that must leave staged pages."""
    table = kv.blocks
    dissolve = int32(bytes(4 * table.num_blocks))
    rows: list[_RowDraft] = []
    alive_moved = below_moved = 0
    for row in range(kv.num_rows):
        first, last = table.starts[row], table.starts[row + 1]
        forced = {i for i, flag in enumerate(line.repooled[first:last]) if flag}
        alive, kept = line.alive[first:last], line.new_kept[row]
        gone = blocks_to_dissolve(alive, kept, block_entries, kv.policy.repack_ratio, forced)
        stays: list[tuple[int, int]] = []
        written = line.new_kept[row]
        for i in range(first, last):
            if i - first in gone:
                dissolve[i] = 1
                written += line.alive[i]
                alive_moved += line.alive[i]
                below_moved += table.lens[i] - line.alive[i]
            else:
                stays.append((table.ids[i], table.lens[i]))
        rows.append(_RowDraft(tuple(stays), written))
    slots, positions = _protected_in_staged(kv)
    return CommitDraft(
        rows=tuple(rows),
        dissolve=dissolve,
        new_kept=sum(line.new_kept),
        alive=sum(line.alive),
        alive_in_dissolved=alive_moved,
        below_in_dissolved=below_moved,
        below=sum(table.lens) - sum(line.alive),
        block_entries=block_entries,
        protected_slots=tuple(slots),
        protected_positions=tuple(positions),
        room_in_compacted=len(_free_compacted_slots(kv, int32())),
        page_tokens=kv.page_tokens,
        num_exact=line.num_exact,
        exact_lost=line.exact_lost,
    )


def _split(total: int, size: int) -> list[int]:
    """`total` in pieces of `size`, the last one smaller."""
    return [min(size, total - first) for first in range(0, total, size)]


def _protected_in_staged(kv: ConversationKv) -> tuple[list[int], list[int]]:
    """Slots and positions of protected tokens that sit in staged pages."""
    slots: list[int] = []
    positions: list[int] = []
    for page in filter(kv.holds_protected, kv.staged_pages()):
        for offset, position in enumerate(page.positions):
            if kv.is_protected(position):
                slots.append(page.page_id * kv.page_tokens + offset)
                positions.append(position)
    return slots, positions


def _free_compacted_slots(kv: ConversationKv, new_page_ids: array[int]) -> list[int]:
    """Slots where protected tokens may go: the rest of compacted pages, then new ones."""
    size = kv.page_tokens
    slots = [
        page.page_id * size + offset for page in kv.pages if page.compacted for offset in range(page.num_tokens, size)
    ]
    return slots + _slots_of(new_page_ids, size)


def _slots_of(page_ids: array[int], page_tokens: int) -> list[int]:
    return [page_id * page_tokens + offset for page_id in page_ids for offset in range(page_tokens)]
