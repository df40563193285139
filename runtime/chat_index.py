"""Finds conversations by what they hold: the chats of clients that send all of them each time and give no id.

Each beginning of a chat, message by message, has a digest that is chained from the one before it and starts from the
tenant; an index of the digests finds the conversation with the longest common beginning in one look-up per message.
What is found is compared as text before anything of it is used (`runtime.history`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

# Beginnings that are indexed of one conversation, its longest ones; a chat edited further back begins a new one.
MAX_BEGINNINGS = 64
_DIGEST_BYTES = 16


class ChatMessage(Protocol):
    """`runtime.request.Message`, `runtime.history.HeldMessage`."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class ChatIndex:
    """Of one engine. Holds at most `MAX_BEGINNINGS` digests for each conversation that is put."""

    def __init__(self) -> None:
        self._handles: dict[bytes, dict[int, None]] = {}  # by digest, newest last
        self._digests: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def put(self, handle: int, tenant: str, messages: Sequence[ChatMessage]) -> None:
        """What a conversation holds now, instead of what it held before."""
        self.forget(handle)
        digests = [digest for _, digest in _beginnings(tenant, messages)][-MAX_BEGINNINGS:]
        self._digests[handle] = digests
        for digest in digests:
            self._handles.setdefault(digest, {})[handle] = None

    def forget(self, handle: int) -> None:
        for digest in self._digests.pop(handle, ()):
            handles = self._handles[digest]
            del handles[handle]
            if not handles:
                del self._handles[digest]

    def find(self, tenant: str, messages: Sequence[ChatMessage]) -> Iterator[tuple[int, int]]:
        """Conversations that begin like a chat, as (handle, number of messages in common), the most first and of
        equals the newest."""
        found: set[int] = set()
        for num_messages, digest in reversed(list(_beginnings(tenant, messages))):
            for handle in reversed(self._handles.get(digest, {})):
                if handle not in found:
                    found.add(handle)
                    yield handle, num_messages


def _beginnings(tenant: str, messages: Sequence[ChatMessage]) -> Iterator[tuple[int, bytes]]:
    """(number of messages, digest) of each beginning that holds more than a system prompt."""
    digest = _digest(b"", tenant)
    for num_messages, message in enumerate(messages, 1):
        digest = _digest(digest + message.role[:1].encode(), message.content)
        if message.role != "system":
            yield num_messages, digest


def _digest(before: bytes, text: str) -> bytes:
    """Surrogates that JSON can write do not stop it."""
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
