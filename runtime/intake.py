"""Checks a request and turns it into tokens. Nothing is changed until everything has been checked."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

from runtime.bad_words import BadWords
from runtime.chat_format import ChatFormat
from runtime.conversation import Conversation, Turn
from runtime.conversation_table import ConversationTable
from runtime.detokenizer import StopMatcher, Tokenizer
from runtime.errors import ConversationBusyError, PromptTooLongError, RequestError
from runtime.history import ChatReader, Draft, Held, Piece, Rollback, Undo
from runtime.policy.base import Policy
from runtime.policy.registry import get_policy
from runtime.policy.task_type import detect_task
from runtime.protection import protected_ranges, token_ranges
from runtime.request import Message, Request

# Told the conversation, its tokens with the prompt, and `max_tokens`.
SizeCheck = Callable[[Conversation, int, int], None]


class Intake:
    """The text side of the engine."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat, default_policy: str, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._chats = ChatReader(tokenizer, chat_format)
        self._default_policy = default_policy
        self._max_seq_len = max_seq_len
        self._max_chars = max_seq_len * tokenizer.max_token_chars

    def find(self, request: Request, table: ConversationTable) -> Conversation | None:
        """The conversation a request goes on with, None for a new one. Raises for a turn that cannot be taken."""
        if table.of_request(request.request_id) is not None:
            raise RequestError(
                f"request_id: got {request.request_id!r}, which is still running; use an id of its own per request"
            )
        if request.messages and (request.text or request.system_prompt is not None):
            raise RequestError(
                "messages: got a whole chat and text_input or system_prompt beside it, expected one or the other; put "
                "all into messages"
            )
        if not request.text and not request.messages:
            raise RequestError("text_input: got an empty text, expected at least one character; send some text")
        if request.conversation_id is None:
            return self._find_unnamed(request, table) if request.messages else None
        conversation = table.find(request.tenant, request.conversation_id)
        if conversation is None:
            return None
        if conversation.turn is not None:
            raise ConversationBusyError(
                f"conversation_id: {request.conversation_id!r} is still running a turn; one turn at a time: wait for "
                f"its end or cancel it"
            )
        self.check_policy(request, conversation)
        return conversation

    def _find_unnamed(self, request: Request, table: ConversationTable) -> Conversation | None:
        """The idle conversation without an id that holds most of a chat, one of the same policy if one is asked for."""
        wanted = None if request.policy is None else get_policy(request.policy).name
        for handle, num_common in table.chats.find(request.tenant, request.messages):
            conversation = table.idle.get(handle)
            if conversation is None or wanted not in (None, conversation.policy.name, conversation.policy.chosen_from):
                continue
            # A chat that branches off early is another one: the rest of this one may still be asked for.
            if 2 * conversation.messages[num_common - 1].end >= len(conversation.tokens):
                return conversation
        return None

    def check_policy(self, request: Request, conversation: Conversation) -> None:
        """Raises RequestError for a turn that asks for another policy than the conversation has."""
        policy = conversation.policy
        if request.policy is not None and get_policy(request.policy).name not in (policy.name, policy.chosen_from):
            raise RequestError(
                f"kv_policy: got {request.policy!r} for a conversation begun with {policy.name!r}; "
                f"leave it out, or start a new conversation"
            )

    def prepare(self, request: Request) -> None:
        """What takes long and needs no lock: the tokens that hold bad words are looked up, and then remembered."""
        self._bad_words(request)

    def start(self, request: Request, handle: int) -> Conversation:
        """A new conversation for `request`. Raises UnknownPolicyError.

        A chat without an id gets one that nobody is told, so that its next turn may find it by what it holds.
        """
        unnamed = request.conversation_id is None and bool(request.messages)
        conversation_id = f"unnamed-{secrets.token_urlsafe(16)}" if unnamed else request.conversation_id
        conversation = Conversation(handle, conversation_id, self._policy(request), request.tenant)
        conversation.is_unnamed = unnamed
        return conversation

    def make_turn(self, request: Request, conversation: Conversation, arrival_ns: int, check_size: SizeCheck) -> Turn:
        """Adds the turn's prompt to the conversation. Raises PromptTooLongError or RequestError, adding nothing.

        check_size: raises for a turn that is too large; asked before anything is changed.
        """
        self._check_chars(request)
        draft = self._draft(request, conversation)
        _check_protect(request)
        num_after = draft.keep + len(draft.token_ids)
        if num_after >= self._max_seq_len:
            raise PromptTooLongError(
                f"text_input: {len(draft.token_ids)} tokens after {draft.keep} of the conversation, expected fewer "
                f"than {self._max_seq_len} together; shorten the prompt, begin a new conversation, or build the engine "
                f"with a larger --max-seq-len"
            )
        check_size(conversation, num_after, request.sampling.max_tokens)
        first, seed = min(draft.keep, draft.turn_start), request.sampling.seed
        turn = Turn(
            request=request,
            stream=self._tokenizer.stream(),
            stops=StopMatcher(request.sampling.stop),
            bad_words=self._bad_words(request),
            uniforms=random.Random(seed) if seed is not None else random.Random(),
            first_token=first,
            prompt_end=num_after,
            arrival_ns=arrival_ns,
            ended_before=conversation.ended,
            protect=self._protected(request, conversation, draft),
            history_end=draft.turn_start,
            undo=Undo(
                tuple(conversation.tokens[first:]),
                conversation.messages,
                conversation.system_tokens,
                conversation.num_computed,
            ),
        )
        _take(conversation, turn, draft)
        return turn

    def _draft(self, request: Request, conversation: Conversation) -> Draft:
        """What the turn makes of the conversation's tokens."""
        if conversation.conversation_id is None:
            message = Message("user", request.text)
            token_ids, offsets = self._tokenizer.encode(request.text, None)
            return Draft(0, token_ids, (Piece(message, 0, token_ids, offsets),), (), 0, 0)
        held = Held(conversation.tokens, conversation.messages, conversation.ended, conversation.system_tokens)
        if request.messages:
            return self._chats.match(held, request.messages)
        return self._chats.go_on(held, request.system_prompt, request.text)

    def preview(self, conversation: Conversation, user_text: str, answer: str) -> tuple[int, ...]:
        """Tokens of a next turn whose answer has begun; the conversation stays as it is."""
        turn = self._chat_format.next_turn(user_text, conversation.ended)
        ids, _ = self._tokenizer.encode(turn.text + answer, (turn.user_start, turn.user_end))
        return tuple(ids)

    def _check_chars(self, request: Request) -> None:
        """Megabytes of text are refused before they are tokenized: that takes seconds in which nobody else runs."""
        num_chars = len(request.text) + len(request.system_prompt or "") + sum(len(m.content) for m in request.messages)
        if num_chars > self._max_chars:
            raise PromptTooLongError(
                f"text_input: got {num_chars:,} characters with the system prompt, expected at most "
                f"{self._max_chars:,}, the longest text of {self._max_seq_len} tokens; shorten the prompt"
            )

    def _bad_words(self, request: Request) -> BadWords | None:
        words = request.sampling.bad
        return BadWords(words, self._tokenizer.token_texts()) if words else None

    def _policy(self, request: Request) -> Policy:
        names = (request.policy, request.default_policy, self._default_policy)
        policy = get_policy(next(name for name in names if name is not None))
        return policy.for_task(detect_task(request.user_text)) if policy.by_task else policy

    def _protected(self, request: Request, conversation: Conversation, draft: Draft) -> list[tuple[int, int]]:
        """[start, end) ranges of new tokens that are never merged or evicted."""
        rules = conversation.policy.protection
        found: list[tuple[int, int]] = []
        for piece in draft.pieces:
            if piece.message.role != "user":
                continue
            asked = request.protect if piece is draft.pieces[-1] else ()
            chars = [*asked, *protected_ranges(piece.message.content, rules)]
            shifted = [(start + piece.user_start, end + piece.user_start) for start, end in chars]
            if rules.system_prompt and piece.system_end:
                shifted.append((0, piece.system_end))
            found += [(piece.start + start, piece.start + end) for start, end in token_ranges(shifted, piece.offsets)]
        # Tokens that stay keep the protection that they have.
        return [(max(start, draft.keep), end) for start, end in found if end > draft.keep]


def _take(conversation: Conversation, turn: Turn, draft: Draft) -> None:
    """The conversation's text becomes what the turn makes of it."""
    num_held = len(conversation.tokens)
    if draft.keep < num_held:
        turn.rollback = Rollback(draft.keep, draft.departs)
        # What was said before and has to be read again counts as computed again.
        lost = max(draft.keep, min(draft.turn_start, num_held))
        conversation.num_computed = min(conversation.num_computed, lost)
    conversation.tokens[draft.keep :] = draft.token_ids
    conversation.messages = draft.messages
    conversation.system_tokens = draft.system_tokens
    conversation.ended = False


def _check_protect(request: Request) -> None:
    text = request.user_text
    for start, end in request.protect:
        if not 0 <= start < end <= len(text):
            raise RequestError(
                f"protect: got the range [{start}, {end}), expected 0 <= start < end <= {len(text)} "
                f"(characters of text_input, or of the newest message); correct the range"
            )
