"""What the KV memory holds right now, by lifecycle state, over all conversations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.kv_manager import KvManager
from runtime.lifecycle import State


@dataclass(frozen=True)
class KvTotals:
    """Bytes by state, each thing counted once: of pages (active, staged, exact entries) and blocks.

    scratch_bytes: pages of rows that are read once and forgotten (a probe's), and of caches that are computed anew.
    used_bytes: all of these, as the budget counts them; `table_bytes` comes on top.
    saved_bytes: what pages that several conversations share would take more if each had its own.
    *_tokens: token equivalents, entries / (layers * KV heads); what is shared counts for each that reads it.
    """

    budget_bytes: int = 0
    used_bytes: int = 0
    page_bytes: int = 1
    page_tokens: int = 1
    active_bytes: int = 0
    staged_bytes: int = 0
    committed_bytes: int = 0
    evictable_bytes: int = 0
    scratch_bytes: int = 0
    table_bytes: int = 0
    saved_bytes: int = 0
    active_tokens: int = 0
    staged_tokens: int = 0
    committed_tokens: int = 0
    evictable_tokens: int = 0


def kv_totals(manager: KvManager, handles: Iterable[int]) -> KvTotals:
    """Adds up the caches of `handles`. Linear in their pages; reads tables only."""
    page_states: dict[int, State] = {}
    block_bytes = dict.fromkeys((State.COMMITTED, State.EVICTABLE), 0.0)
    tokens = dict.fromkeys(State, 0)
    table_bytes = num_pages = 0
    for handle in handles:
        kv = manager[handle]
        num_pages += len(kv.pages)
        page_states.update((page.page_id, page.state) for page in kv.pages)
        for state in tokens:
            tokens[state] += kv.ledger[state] // kv.num_rows
        table_bytes += kv.table_bytes
        entries = kv.ledger[State.COMMITTED] + kv.ledger[State.EVICTABLE]
        held = kv.blocks.num_blocks * manager.block_layouts[kv.blocks.format].stored_bytes
        for state in block_bytes:
            block_bytes[state] += held * kv.ledger[state] / entries if entries else 0.0
    page_bytes = manager.page_layout.page_bytes
    num_staged, num_exact = (
        sum(state is which for state in page_states.values()) for which in (State.STAGED, State.COMMITTED)
    )
    committed, blocks = round(block_bytes[State.COMMITTED]), round(sum(block_bytes.values()))
    return KvTotals(
        budget_bytes=manager.budget.total_bytes,
        used_bytes=manager.budget.used_bytes,
        page_bytes=page_bytes,
        page_tokens=manager.page_tokens,
        active_bytes=(len(page_states) - num_staged - num_exact) * page_bytes,
        staged_bytes=num_staged * page_bytes,
        committed_bytes=committed + num_exact * page_bytes,
        evictable_bytes=blocks - committed,
        scratch_bytes=max(0, manager.budget.used_bytes - blocks - len(page_states) * page_bytes),
        table_bytes=table_bytes,
        saved_bytes=(num_pages - len(page_states)) * page_bytes,
        active_tokens=tokens[State.ACTIVE],
        staged_tokens=tokens[State.STAGED],
        committed_tokens=tokens[State.COMMITTED],
        evictable_tokens=tokens[State.EVICTABLE],
    )
