"""Adds up what the manager believes: every page and block has its owner, every token its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.kv_state import ConversationKv
from runtime.lifecycle import State
from runtime.page_pool import IdPool
from runtime.shared_prefix import SharedPrefixes


def check_conversations(conversations: Mapping[int, ConversationKv], shared: SharedPrefixes) -> None:
    """Each cache alone: its counts agree with its tables, and what it shares lies where its tokens are."""
    shared.check_invariants()
    for handle, kv in conversations.items():
        shared.check_pages(handle, kv)
        in_pages = sum(page.num_tokens for page in kv.pages) - kv.num_exact
        assert kv.ledger[State.ACTIVE] == (in_pages - kv.num_staged) * kv.num_rows
        num_entries = sum(kv.blocks.lens) + kv.num_exact * kv.num_rows
        assert kv.ledger[State.COMMITTED] + kv.ledger[State.EVICTABLE] == num_entries
        assert in_pages + kv.committed_tokens == kv.num_tokens, "a token was lost"


def check_pools(
    conversations: Iterable[ConversationKv],
    shared: SharedPrefixes,
    pages: IdPool,
    num_scratch: int,
    blocks: Mapping[str, IdPool],
) -> None:
    """All together: pages are shared only where that is known, and nothing is owned that nobody holds."""
    tables = list(conversations)
    in_common = set(shared.page_ids)
    ids = [page.page_id for kv in tables for page in kv.pages if page.page_id not in in_common]
    assert len(ids) == len(set(ids)), "a page has two owners"
    assert all(map(pages.owns, (*ids, *in_common)))
    assert pages.num_owned == len(ids) + len(in_common) + num_scratch, "pages leaked"
    for block_format, pool in blocks.items():
        block_ids = [i for kv in tables if kv.blocks.format == block_format for i in kv.blocks.ids]
        assert len(block_ids) == len(set(block_ids)) == pool.num_owned, "blocks leaked or shared"
