"""Which conversations are held: by handle, by id within a tenant, by running request, and who has been idle longest.

An id means nothing outside its tenant: every look-up by id names the tenant, so that no caller can forget it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from runtime.chat_index import ChatIndex
from runtime.conversation import Conversation
from runtime.errors import UnknownConversationError

# Conversations that the server ended of itself: so many are remembered, so that their clients can be told.
MAX_ENDINGS = 4096


class ConversationTable:
    """by_handle: all that are held, oldest first.

    idle: by handle, those that run no turn and may get another one; idle longest first.
    ending: by handle, those whose end was asked for and that are still held.
    chats: what those hold that have no id of their client's.
    """

    def __init__(self) -> None:
        self.by_handle: dict[int, Conversation] = {}
        self.idle: dict[int, Conversation] = {}
        self.ending: dict[int, Conversation] = {}
        self.chats = ChatIndex()
        self._by_id: dict[tuple[str, str], Conversation] = {}
        self._by_request: dict[str, Conversation] = {}
        self._endings: OrderedDict[tuple[str, str], str] = OrderedDict()
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
            key = conversation.tenant, conversation.conversation_id
            self._by_id[key] = conversation
            self._endings.pop(key, None)

    def find(self, tenant: str, conversation_id: str) -> Conversation | None:
        """The conversation that clients of `tenant` call so."""
        return self._by_id.get((tenant, conversation_id))

    def known(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises UnknownConversationError for an id that the tenant does not have, whoever else may have it."""
        conversation = self.find(tenant, conversation_id)
        if conversation is None:
            self.check_not_ended(tenant, conversation_id)
            raise UnknownConversationError(
                f"conversation_id: got {conversation_id!r}, expected one that is held; it may have ended already"
            )
        return conversation

    def check_not_ended(self, tenant: str, conversation_id: str) -> None:
        """Raises UnknownConversationError for a conversation that the server ended of itself, saying why."""
        reason = self._endings.get((tenant, conversation_id))
        if reason is not None:
            raise UnknownConversationError(
                f"conversation_id: {conversation_id!r} was {reason}; send the whole chat as messages to go on with it, "
                f"or begin a new one with another id (conversation_end makes this one free)"
            )

    def take_ending(self, tenant: str, conversation_id: str) -> str | None:
        """Why the server ended that conversation ("ended after 600 s idle"), None if it did not. It is forgotten:
        from now on the id is free."""
        return self._endings.pop((tenant, conversation_id), None)

    def of_tenant(self, tenant: str) -> Iterator[Conversation]:
        """Those of one tenant, oldest first."""
        return (conversation for conversation in self if conversation.tenant == tenant)

    def forget_id(self, conversation: Conversation, reason: str = "") -> None:
        """From now on clients do not know it. reason: why the server ended it; "": its client did, and its id is free
        for a new one."""
        self.idle.pop(conversation.handle, None)
        if conversation.conversation_id is None:
            return
        key = conversation.tenant, conversation.conversation_id
        self._by_id.pop(key, None)
        if reason:
            self._endings[key] = reason
            while len(self._endings) > MAX_ENDINGS:
                self._endings.popitem(last=False)

    def ask_end(self, conversation: Conversation, reason: str = "") -> None:
        """It is to be removed when its turn is over; clients do not know it any more, see `forget_id`."""
        self.forget_id(conversation, reason)
        conversation.end_requested = True
        self.ending[conversation.handle] = conversation

    def remove(self, conversation: Conversation) -> None:
        """It is held no longer. One whose end was asked for lost its id then; the id may be another's by now."""
        if not conversation.end_requested:
            self.forget_id(conversation)
        self.idle.pop(conversation.handle, None)
        self.ending.pop(conversation.handle, None)
        self.chats.forget(conversation.handle)
        del self.by_handle[conversation.handle]

    # Running turns

    @property
    def has_turns(self) -> bool:
        return bool(self._by_request)

    @property
    def with_turn(self) -> list[Conversation]:
        """Those whose turn waits or runs."""
        return list(self._by_request.values())

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
        if goes_on:
            self.rest(conversation, now_ns)

    def rest(self, conversation: Conversation, now_ns: int) -> None:
        """It runs no turn and is the newest idle one."""
        conversation.last_used_ns = now_ns
        self.idle.pop(conversation.handle, None)
        self.idle[conversation.handle] = conversation
