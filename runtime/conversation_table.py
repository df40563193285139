"""Which conversations are held: by handle, by id within a tenant, by running request, and who has been idle longest.

An id means nothing outside its tenant: every look-up by id names the tenant, so that no caller can forget it.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.conversation import Conversation
from runtime.errors import UnknownConversationError


class ConversationTable:
    """by_handle: all that are held, oldest first.

    idle: by handle, those that run no turn and may get another one; idle longest first.
    """

    def __init__(self) -> None:
        self.by_handle: dict[int, Conversation] = {}
        self.idle: dict[int, Conversation] = {}
        self._by_id: dict[tuple[str, str], Conversation] = {}
        self._by_request: dict[str, Conversation] = {}
        self._next_handle = 0

    def __len__(self) -> int:
        return len(self.by_handle)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.by_handle.values())

    def take_handle(self) -> int:
        """A number that no conversation of this engine has had."""
        self._next_handle += 1
        return self._next_handle - 1

    def add(self, conversation: Conversation) -> None:
        self.by_handle[conversation.handle] = conversation
        if conversation.conversation_id is not None:
            self._by_id[conversation.tenant, conversation.conversation_id] = conversation

    def find(self, tenant: str, conversation_id: str) -> Conversation | None:
        """The conversation that clients of `tenant` call so."""
        return self._by_id.get((tenant, conversation_id))

    def known(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises UnknownConversationError for an id that the tenant does not have, whoever else may have it."""
        conversation = self.find(tenant, conversation_id)
        if conversation is None:
            raise UnknownConversationError(
                f"conversation_id: got {conversation_id!r}, expected one that is held; it may have ended already"
            )
        return conversation

    def of_tenant(self, tenant: str) -> Iterator[Conversation]:
        """Those of one tenant, oldest first."""
        return (conversation for conversation in self if conversation.tenant == tenant)

    def forget_id(self, conversation: Conversation) -> None:
        """From now on clients do not know it; its id is free for a new one."""
        self.idle.pop(conversation.handle, None)
        if conversation.conversation_id is not None:
            self._by_id.pop((conversation.tenant, conversation.conversation_id), None)

    def remove(self, conversation: Conversation) -> None:
        """It is held no longer. One whose end was asked for lost its id then; the id may be another's by now."""
        if not conversation.end_requested:
            self.forget_id(conversation)
        self.idle.pop(conversation.handle, None)
        del self.by_handle[conversation.handle]

    # Running turns

    @property
    def has_turns(self) -> bool:
        return bool(self._by_request)

    def of_request(self, request_id: str) -> Conversation | None:
        """The conversation whose turn waits or runs under this id."""
        return self._by_request.get(request_id)

    def turn_began(self, conversation: Conversation) -> None:
        assert conversation.turn is not None
        self._by_request[conversation.turn.request.request_id] = conversation
        self.idle.pop(conversation.handle, None)

    def turn_ended(self, conversation: Conversation, now_ns: int, *, goes_on: bool) -> None:
        """The turn is gone; a conversation that goes on is the newest idle one."""
        assert conversation.turn is not None
        del self._by_request[conversation.turn.request.request_id]
        conversation.turn = None
        conversation.last_used_ns = now_ns
        if goes_on:
            self.idle[conversation.handle] = conversation
