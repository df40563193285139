"""Pages of system prompts, stored once for all conversations of a tenant that begin alike.

A shared page is known by the page before it and by its own tokens (the first one by its tenant), so two conversations
meet on a page exactly where everything up to its end is the same, and never across tenants. Such pages are full, their
tokens are protected, and they stay active as long as anybody holds them: nobody writes to them, scores them or commits
them. What is left of a prefix after its last full page lies in a page of the conversation's own.

Attention may still raise `seen` beside a shared page from several conversations at once. It does so with atomic
maxima, and nobody reads the `seen` of a protected token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.kv_state import ConversationKv

Key = tuple[str | int, tuple[int, ...]]  # tenant or id of the page before, tokens


@dataclass
class _Prefix:
    """Of one conversation.   pages: tokens of each full page, in order.   held: ids of those it shares, the first
    `len(held)` of `pages`."""

    tenant: str
    pages: list[tuple[int, ...]]
    held: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether there are pages that could still be shared."""
        return len(self.held) < len(self.pages)

    @property
    def next_key(self) -> Key:
        return (self.held[-1] if self.held else self.tenant, self.pages[len(self.held)])


class SharedPrefixes:
    """Reference counts of shared pages, by handle of the conversation. Only `kv_manager` writes it."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._prefixes: dict[int, _Prefix] = {}
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._holders: dict[int, dict[int, None]] = {}  # handles by page id, oldest holder first

    def announce(self, handle: int, tenant: str, token_ids: Sequence[int]) -> None:
        """What the conversation begins with: whole pages of it may be shared from now on, and nothing that it was said
        to begin with before. What it shares stays."""
        size = self._page_tokens
        whole = len(token_ids) // size * size
        pages = [tuple(token_ids[first : first + size]) for first in range(0, whole, size)]
        held = self.held(handle)
        if pages or held:
            self._prefixes[handle] = _Prefix(tenant, pages, held)
        else:
            self._prefixes.pop(handle, None)

    def prefix(self, handle: int) -> tuple[str, list[int]]:
        """Tenant and tokens that `announce` was given, less what is not a whole page."""
        prefix = self._prefixes.get(handle)
        return (prefix.tenant, [t for page in prefix.pages for t in page]) if prefix is not None else ("", [])

    def held(self, handle: int) -> list[int]:
        """Ids of the pages it shares, in order of its tokens."""
        prefix = self._prefixes.get(handle)
        return prefix.held if prefix is not None else []

    def adopt(self, handle: int, kv: ConversationKv) -> int:
        """Appends the pages that others hold of what comes next in `kv`; returns the number of tokens in them."""
        before = kv.num_tokens
        prefix = self._prefixes.get(handle)
        while prefix is not None and prefix.is_open and kv.num_tokens == len(prefix.held) * self._page_tokens:
            page_id = self._ids.get(prefix.next_key)
            if page_id is None:
                break
            self._join(handle, page_id)
            kv.append(self._page_tokens, [page_id])
        return kv.num_tokens - before

    def offer(self, handle: int, kv: ConversationKv) -> list[int]:
        """Shares the pages of the prefix that are full by now. Where another conversation was first, its page takes
        the place of ours; returns ours, which nobody needs any more."""
        spare: list[int] = []
        prefix = self._prefixes.get(handle)
        while prefix is not None and prefix.is_open:
            first = len(prefix.held) * self._page_tokens
            if kv.num_tokens < first + self._page_tokens:
                break
            page = kv.active_page_of(first)
            if page is None:  # staged before it was protected
                self.cut(handle, first)
                break
            twin = self._ids.get(prefix.next_key)
            if twin is None:
                self._publish(handle, page.page_id)
            else:
                spare.append(page.page_id)
                page.page_id = twin
                kv.set_pages(kv.pages)
                self._join(handle, twin)
        return spare

    def num_waiting(self, handle: int, kv: ConversationKv) -> int:
        """Tokens that `adopt` would append now."""
        prefix = self._prefixes.get(handle)
        if prefix is None or kv.num_tokens != len(prefix.held) * self._page_tokens:
            return 0
        before: str | int = prefix.held[-1] if prefix.held else prefix.tenant
        found = 0
        for tokens in prefix.pages[len(prefix.held) :]:
            page_id = self._ids.get((before, tokens))
            if page_id is None:
                break
            before, found = page_id, found + 1
        return found * self._page_tokens

    def cut(self, handle: int, num_tokens: int) -> None:
        """Tokens from `num_tokens` on will be others: pages that are not shared yet and hold some of them never are."""
        prefix = self._prefixes.get(handle)
        if prefix is not None:
            del prefix.pages[max(len(prefix.held), num_tokens // self._page_tokens) :]

    def _join(self, handle: int, page_id: int) -> None:
        self._holders[page_id][handle] = None
        self._prefixes[handle].held.append(page_id)

    def _publish(self, handle: int, page_id: int) -> None:
        """From now on others find it."""
        prefix = self._prefixes[handle]
        key = prefix.next_key
        assert key not in self._ids and page_id not in self._holders
        self._ids[key] = page_id
        self._keys[page_id] = key
        self._holders[page_id] = {handle: None}
        prefix.held.append(page_id)

    def leave(self, handle: int, num_kept: int = 0) -> list[int]:
        """Gives up all but the first `num_kept` shared pages; returns those that nobody holds any more."""
        gone: list[int] = []
        held = self.held(handle)
        for page_id in held[num_kept:]:
            holders = self._holders[page_id]
            del holders[handle]
            if not holders:
                del self._holders[page_id]
                del self._ids[self._keys.pop(page_id)]
                gone.append(page_id)
        del held[num_kept:]
        return gone

    def rename(self, handle: int, to: int) -> None:
        """What `handle` shares is `to`'s from now on, which must share nothing."""
        prefix = self._prefixes.pop(handle, None)
        if prefix is None:
            return
        assert to not in self._prefixes
        self._prefixes[to] = prefix
        for page_id in prefix.held:
            self._holders[page_id] = {to if one == handle else one: None for one in self._holders[page_id]}

    def forget(self, handle: int) -> list[int]:
        """The conversation is over; returns the pages that nobody holds any more."""
        gone = self.leave(handle)
        self._prefixes.pop(handle, None)
        return gone

    def num_borrowed(self, handle: int) -> int:
        """Shared pages whose bytes count for somebody else: each counts for whoever has held it longest."""
        return sum(next(iter(self._holders[page_id])) != handle for page_id in self.held(handle))

    @property
    def page_ids(self) -> list[int]:
        """All that are shared, each once."""
        return list(self._holders)

    def check_pages(self, handle: int, kv: ConversationKv) -> None:
        """What a conversation shares lies in its page table, active, at the beginning of its tokens, and nothing of
        others does."""
        held = self.held(handle)
        for i, page_id in enumerate(held):
            page = kv.active_page_of(i * self._page_tokens)
            assert page is not None and page.page_id == page_id, "a shared page is not where its tokens are"
        in_common = [page.page_id for page in kv.pages if page.page_id in self._holders]
        assert sorted(in_common) == sorted(held), "a page of others is in its table"

    def check_invariants(self) -> None:
        """Every page has holders, they are those that list it, and its predecessor is held by all of them."""
        lists: dict[int, set[int]] = {}
        for handle, prefix in self._prefixes.items():
            for page_id in prefix.held:
                lists.setdefault(page_id, set()).add(handle)
        assert lists == {page_id: set(handles) for page_id, handles in self._holders.items()}, "holders are wrong"
        assert {key: page_id for page_id, key in self._keys.items()} == self._ids and self._keys.keys() == lists.keys()
        for page_id, (before, _) in self._keys.items():
            assert isinstance(before, str) or lists[page_id] <= lists[before], "a page outlived the one before it"
