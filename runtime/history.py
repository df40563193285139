"""Chats that clients send whole, against what is held of them: the longest exact beginning stays, the rest is new text.

Messages are compared as text, so an answer that comes back as it was given keeps the tokens that were generated for
it, however a tokenizer would cut it. From the first message that differs on, the chat is rendered anew, message by
message, and its tokens are compared with those held: what they have in common stays too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.detokenizer import Tokenizer
from runtime.errors import RequestError
from runtime.request import FinishReason, Message, Role


@dataclass(frozen=True)
class HeldMessage:
    """A message whose tokens a conversation holds.

    start, end: [start, end) its tokens, with what the template puts between it and the message before.
    ended: of an answer, whether the token that ends it is among them.
    """

    role: Role
    content: str
    start: int
    end: int
    ended: bool = False


@dataclass(frozen=True)
class TakenTurn:
    """The last turn that a conversation took, by the name that its client gave it; its answer is the last message."""

    turn_id: str
    reason: FinishReason
    stop_reason: str
    cumulative_logprob: float = 0.0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Held:
    """What a conversation holds before a turn.   system_tokens: how many of its tokens are the system part."""

    tokens: Sequence[int] = ()
    messages: tuple[HeldMessage, ...] = ()
    ended: bool = True
    system_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """Tokens of one rendered user message with what stands before it, or of one answer.

    start: index of its first token.   offsets: character span of each token in the rendered text.
    system: the system prompt that stands before the first user message.
    [0, system_end): characters of the system part.   user_start: where character 0 of the user's text lies.
    """

    message: Message
    start: int
    token_ids: list[int]
    offsets: list[tuple[int, int]]
    system: str | None = None
    system_end: int = 0
    user_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def system_tokens(self) -> int:
        return sum(first < self.system_end for first, _ in self.offsets)

    @property
    def held(self) -> list[HeldMessage]:
        """Its messages, once a conversation holds them."""
        message, first = self.message, self.start
        if self.system is None:
            return [HeldMessage(message.role, message.content, first, self.end)]
        first += self.system_tokens
        system = HeldMessage("system", self.system, self.start, first)
        return [system, HeldMessage(message.role, message.content, first, self.end)]


@dataclass(frozen=True)
class Draft:
    """What a turn makes of a conversation: its first `keep` tokens stay, `token_ids` follow.

    pieces: what was rendered anew.   messages: all, the newest user message last.
    turn_start: first token of the newest user message.
    departs: how the chat differs from what was held, in words; "" where it only goes on.
    """

    keep: int
    token_ids: list[int]
    pieces: tuple[Piece, ...]
    messages: tuple[HeldMessage, ...]
    system_tokens: int
    turn_start: int
    departs: str = ""


@dataclass(frozen=True)
class Rollback:
    """Tokens from `keep` on are no longer what the cache was computed from.   departs: as in `Draft`."""

    keep: int
    departs: str


@dataclass(frozen=True)
class Undo:
    """What a turn took the place of, to put back if it is undone.   tokens: those from the turn's first token on."""

    tokens: tuple[int, ...] = ()
    messages: tuple[HeldMessage, ...] = ()
    system_tokens: int = 0
    num_computed: int = 0


class RenderedText(Protocol):
    """`runtime.chat_format.RenderedTurn`."""

    @property
    def text(self) -> str: ...

    @property
    def system_end(self) -> int: ...

    @property
    def user_start(self) -> int: ...

    @property
    def user_end(self) -> int: ...


class TurnFormat(Protocol):
    """What is asked of `runtime.chat_format.ChatFormat`."""

    def first_turn(self, system: str | None, user: str) -> RenderedText: ...

    def next_turn(self, user: str, previous_ended: bool) -> RenderedText: ...

    def answer(self, text: str) -> str: ...

    def plain(self, role: Role, text: str) -> str: ...


class ChatReader:
    """Turns chats into drafts of turns."""

    def __init__(self, tokenizer: Tokenizer, chat_format: TurnFormat) -> None:
        self._tokenizer = tokenizer
        self._format = chat_format

    def go_on(self, held: Held, system: str | None, text: str) -> Draft:
        """The next user message of a conversation. RequestError for a system prompt after its first turn."""
        if held.tokens and system is not None:
            raise RequestError(
                "system_prompt: got one after the first turn, expected it on the first turn only; leave it out"
            )
        chat = () if system is None else (Message("system", system),)
        pieces = self._render((*chat, Message("user", text)), len(held.tokens), held.ended)
        messages = (*held.messages, *(message for piece in pieces for message in piece.held))
        return _draft(held, len(held.tokens), pieces, messages, "")

    def match(self, held: Held, chat: Sequence[Message]) -> Draft:
        """A whole chat, the newest user message last. RequestError for one that no template can write."""
        check_chat(chat)
        same = self._num_same(held.messages, chat)
        departs = f"history edited at message {same + 1}" if same < len(chat) else f"history cut after message {same}"
        # A system prompt is written together with the first user message.
        kept = 0 if same and held.messages[same - 1].role == "system" else same
        before = held.messages[kept - 1] if kept else HeldMessage("user", "", 0, 0)
        pieces = self._render(chat[kept:], before.end, before.ended)
        messages = (*held.messages[:kept], *(message for piece in pieces for message in piece.held))
        return _draft(held, before.end, pieces, messages, departs)

    def _num_same(self, held: Sequence[HeldMessage], chat: Sequence[Message]) -> int:
        """Leading messages that are held as they are. None where the conversation's beginning is not known as text."""
        if not held or held[0].start != 0:
            return 0
        plain = self._format.plain
        for i, (old, new) in enumerate(zip(held, chat, strict=False)):
            if old.role != new.role or plain(old.role, old.content) != plain(new.role, new.content):
                return i
        return min(len(held), len(chat))

    def _render(self, chat: Sequence[Message], start: int, ended: bool) -> tuple[Piece, ...]:
        """Pieces of `chat` from token `start` on.   ended: the token that ends the answer before is there already."""
        pieces: list[Piece] = []
        system: str | None = None
        for message in chat:
            if message.role == "system":
                system = message.content
                continue
            if message.role == "user":
                piece = self._user_piece(message, system, start, ended)
                system = None
            else:
                text = self._format.answer(message.content)
                piece = Piece(message, start, *self._tokenizer.encode(text, (0, len(text))))
            pieces.append(piece)
            start, ended = piece.end, False
        return tuple(pieces)

    def _user_piece(self, message: Message, system: str | None, start: int, ended: bool) -> Piece:
        if start == 0:
            turn = self._format.first_turn(system, message.content)
        else:
            turn = self._format.next_turn(message.content, ended)
        token_ids, offsets = self._tokenizer.encode(turn.text, (turn.user_start, turn.user_end))
        return Piece(message, start, token_ids, offsets, system, turn.system_end, turn.user_start)


def _draft(held: Held, start: int, pieces: tuple[Piece, ...], messages: tuple[HeldMessage, ...], departs: str) -> Draft:
    """What of the new tokens, which begin at `start`, is held already stays; at least one token is left to be run.

    departs: said if anything that is held does not stay.
    """
    old, new = held.tokens, [token for piece in pieces for token in piece.token_ids]
    keep, end = start, start + len(new)
    while keep < min(end, len(old)) and old[keep] == new[keep - start]:
        keep += 1
    keep = min(keep, end - 1)
    first = next((piece for piece in pieces if piece.start == 0), None)
    return Draft(
        keep=keep,
        token_ids=new[keep - start :] if keep >= start else [*old[keep:start], *new],
        pieces=pieces,
        messages=messages,
        system_tokens=held.system_tokens if first is None else first.system_tokens,
        turn_start=messages[-1].start,
        departs=departs if keep < len(old) else "",
    )


def check_chat(chat: Sequence[Message]) -> None:
    """Raises RequestError unless user and assistant take turns after at most one system message, the user last."""
    first = 1 if chat and chat[0].role == "system" else 0
    for i, message in enumerate(chat[first:], first):
        expected = "assistant" if (i - first) % 2 else "user"
        if message.role != expected:
            raise RequestError(
                f"messages[{i}].role: got {message.role!r}, expected {expected!r}: after at most one system message "
                f"user and assistant take turns; reorder or join messages"
            )
    if len(chat) == first or chat[-1].role != "user":
        raise RequestError(
            f"messages: got {len(chat)} without a user message at the end, expected the newest one there; append it"
        )
    if not chat[-1].content:
        raise RequestError(
            f"messages[{len(chat) - 1}].content: got empty text, expected the user's message; send some text"
        )
