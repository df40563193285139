"""A small cache made by hand: real manager, arenas and commit forms, no model.

Every token's value holds its position, so that entries tell which tokens they stand for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from plugins import blocks as block_bytes
from plugins.commit.line import draw_line
from plugins.commit.publish import publish
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.lifecycle import Event
from runtime.paged_executor import CommitForms, PagedExecutor
from runtime.policy.base import Policy, Schedule
from runtime.step_tables import StepRows

SPEC = ModelSpec("llama", 4, 16, 16, 4, 2, 16, 97, 1e-5, RopeSpec(10000.0), 4096, True, name="tiny")
LIMITS = EngineLimits(dtype="fp32", kv_dtype="fp32", page_tokens=8, block_entries=16)
SCHEDULE = Schedule(min_tokens=16, recent_tokens=16, span_tokens=32)
ROWS, GROUP = SPEC.num_kv_rows, SPEC.num_kv_heads
HANDLE = 0

Keys = Callable[[int, int], torch.Tensor]
"""(row, position) -> key [head_dim]."""
Seen = Callable[[int, int], float]
"""(row, position) -> recorded weight."""


class CommitsOnly(PagedExecutor):
    """The shared half of every executor; nothing here runs a model."""

    def _forward(
        self, sequences: list[StepRows], logit_rows: array[int], interrupted: Callable[[], bool] | None
    ) -> torch.Tensor | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Entry:
    """position: what its value holds, a mean for super tokens."""

    position: float
    key: torch.Tensor
    bias: float
    score: float


def random_key(row: int, position: int) -> torch.Tensor:
    return torch.randn(SPEC.head_dim, generator=torch.Generator().manual_seed(row * 10_000 + position))


def random_seen(row: int, position: int) -> float:
    return float(torch.rand(1, generator=torch.Generator().manual_seed(position * 100 + row)) ** 4)


def small(policy: Policy, **changes: object) -> Policy:
    """The policy with a schedule that works on a few dozen tokens."""
    return replace(policy, **{"schedule": SCHEDULE, **changes})  # type: ignore[arg-type]


class CraftedCache:
    """One conversation. Its first 4 tokens are sinks."""

    def __init__(self, policy: Policy, keys: Keys = random_key, seen: Seen = random_seen, kv_mib: int = 8) -> None:
        self.policy, self._keys, self._seen = policy, keys, seen
        self.manager = KvManager(SPEC, LIMITS, kv_mib << 20)
        place = ArenaPlace(poison=True)
        self.storage = KvStorage(SPEC, LIMITS, self.manager.num_pages, self.manager.num_blocks, place)
        self.executor = CommitsOnly(SPEC, LIMITS, self.storage, CommitForms(draw_line, publish))
        self.manager.open(HANDLE, policy)
        self.absorbed = self.dropped = 0

    @property
    def kv(self):  # type: ignore[no-untyped-def]
        return self.manager[HANDLE]

    def add(self, num_tokens: int) -> None:
        """New tokens, as if steps had run."""
        first = self.kv.num_tokens
        reservation = self.manager.reserve_rows(HANDLE, num_tokens)
        for position, slot in enumerate(reservation.slots, first):
            page, offset = divmod(slot, LIMITS.page_tokens)
            for row in range(ROWS):
                layer, head = divmod(row, GROUP)
                self.storage.pages[layer][page, head, 0, offset] = self._keys(row, position)
                self.storage.pages[layer][page, head, 1, offset] = float(position)
                self.storage.seen[layer][page, head, offset] = self._seen(row, position)
        self.manager.settle_rows(reservation)

    def commit(self) -> None:
        """Stages what left the recent window, takes its scores for those of a probe, and commits it."""
        self.manager.stage(HANDLE, Event.TURN_ENDED)
        self.kv.unprobed.clear()
        plan = self.manager.plan_commit(HANDLE)
        assert plan is not None, "nothing was staged"
        (line,) = self.executor.draw_lines([plan])
        reservation = self.manager.reserve_publish(plan, line)
        result = self.executor.publish(reservation.plan, line)
        self.absorbed, self.dropped = self.absorbed + result.absorbed, self.dropped + result.dropped
        freed = self.manager.settle_commit(reservation)
        self.executor.release(freed.page_ids, freed.blocks)
        self.manager.check_invariants()

    def entries(self, row: int) -> list[Entry]:
        """What the row's blocks hold, in table order."""
        table, found = self.kv.blocks, []
        arena = self.storage.blocks(table.format)
        for i in range(table.starts[row], table.starts[row + 1]):
            raw = arena.raw[table.ids[i] : table.ids[i] + 1]
            keys, values, bias = (
                read(raw, arena.layout)[0]
                for read in (block_bytes.read_keys, block_bytes.read_values, block_bytes.read_bias)
            )
            for j in range(table.lens[i]):
                score = float(arena.score[table.ids[i], j])
                found.append(Entry(float(values[j, 0]), keys[j].clone(), float(bias[j]), score))
        return found

    def positions(self, row: int) -> list[float]:
        """Positions that the row's entries stand for, sorted."""
        return sorted(entry.position for entry in self.entries(row))

    def in_pages(self) -> set[int]:
        return {position for page in self.kv.pages for position in page.positions}

    def raw(self) -> list[bytes]:
        """Every block's bytes and scores, in table order."""
        table = self.kv.blocks
        arena = self.storage.blocks(table.format)
        return [arena.raw[i].numpy().tobytes() + arena.score[i].numpy().tobytes() for i in table.ids]
