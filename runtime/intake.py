"""Checks a request and turns it into tokens. Nothing is changed until everything has been checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runtime.chat_format import ChatFormat
from runtime.conversation import Conversation, Turn
from runtime.conversation_table import ConversationTable
from runtime.detokenizer import StopMatcher, Tokenizer
from runtime.errors import ConversationBusyError, OutOfMemoryError, PromptTooLongError, RequestError
from runtime.policy.base import Policy
from runtime.policy.registry import get_policy
from runtime.policy.task_type import detect_task
from runtime.protection import protected_ranges, token_ranges
from runtime.request import Request


@dataclass(frozen=True)
class _Prompt:
    """text: new text of the turn.   system_end, user_start, user_end: character offsets in it."""

    text: str
    system_end: int
    user_start: int
    user_end: int


class Intake:
    """The text side of the engine."""

    def __init__(
        self, tokenizer: Tokenizer, chat_format: ChatFormat, default_policy: str, max_seq_len: int, max_waiting: int
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._default_policy = default_policy
        self._max_seq_len = max_seq_len
        self._max_waiting = max_waiting
        self._max_chars = max_seq_len * tokenizer.max_token_chars

    def find(self, request: Request, table: ConversationTable) -> Conversation | None:
        """The conversation a request goes on with, None for a new one. Raises for a turn that cannot be taken."""
        if table.of_request(request.request_id) is not None:
            raise RequestError(
                f"request_id: got {request.request_id!r}, which is still running; use an id of its own per request"
            )
        if not request.text:
            raise RequestError("text_input: got an empty text, expected at least one character; send some text")
        if request.conversation_id is None:
            return None
        conversation = table.find(request.tenant, request.conversation_id)
        if conversation is None:
            return None
        if conversation.turn is not None:
            raise ConversationBusyError(
                f"conversation_id: {request.conversation_id!r} is still running a turn; one turn at a time: wait for "
                f"its end or cancel it"
            )
        policy = conversation.policy
        if request.policy is not None and get_policy(request.policy).name not in (policy.name, policy.chosen_from):
            raise RequestError(
                f"kv_policy: got {request.policy!r} for a conversation begun with {policy.name!r}; "
                f"leave it out, or start a new conversation"
            )
        return conversation

    def check_queue(self, num_waiting: int) -> None:
        """Raises OutOfMemoryError when the queue is full."""
        if num_waiting >= self._max_waiting:
            raise OutOfMemoryError(
                f"queue: {num_waiting} turns are waiting, at most {self._max_waiting} may; try again later"
            )

    def start(self, request: Request, handle: int) -> Conversation:
        """A new conversation for `request`. Raises UnknownPolicyError."""
        return Conversation(handle, request.conversation_id, self._policy(request), request.tenant)

    def make_turn(self, request: Request, conversation: Conversation, arrival_ns: int) -> Turn:
        """Adds the turn's prompt to the conversation. Raises PromptTooLongError or RequestError, adding nothing."""
        self._check_chars(request)
        prompt = self._prompt(request, conversation)
        for start, end in request.protect:
            if not 0 <= start < end <= len(request.text):
                raise RequestError(
                    f"protect: got the range [{start}, {end}), expected 0 <= start < end <= {len(request.text)} "
                    f"(characters of text_input); correct the range"
                )
        literal = (prompt.user_start, prompt.user_end) if request.conversation_id is not None else None
        token_ids, offsets = self._tokenizer.encode(prompt.text, literal)
        first = len(conversation.tokens)
        num_after = first + len(token_ids)
        if num_after >= self._max_seq_len:
            raise PromptTooLongError(
                f"text_input: {len(token_ids)} tokens after {first} of the conversation, expected fewer than "
                f"{self._max_seq_len} together; shorten the prompt, begin a new conversation, or build the engine "
                f"with a larger --max-seq-len"
            )
        seed = request.sampling.seed
        turn = Turn(
            request=request,
            stream=self._tokenizer.stream(),
            stops=StopMatcher(request.sampling.stop),
            uniforms=random.Random(seed) if seed is not None else random.Random(),
            first_token=first,
            prompt_end=num_after,
            arrival_ns=arrival_ns,
            ended_before=conversation.ended,
            protect=[
                (first + start, first + end)
                for start, end in token_ranges(self._protected_chars(request, conversation, prompt), offsets)
            ],
        )
        conversation.tokens.extend(token_ids)
        conversation.ended = False
        return turn

    def preview(self, conversation: Conversation, user_text: str, answer: str) -> tuple[int, ...]:
        """Tokens of a next turn whose answer has begun; the conversation stays as it is."""
        turn = self._chat_format.next_turn(user_text, conversation.ended)
        ids, _ = self._tokenizer.encode(turn.text + answer, (turn.user_start, turn.user_end))
        return tuple(ids)

    def _check_chars(self, request: Request) -> None:
        """Megabytes of text are refused before they are tokenized: that takes seconds in which nobody else runs."""
        num_chars = len(request.text) + len(request.system_prompt or "")
        if num_chars > self._max_chars:
            raise PromptTooLongError(
                f"text_input: got {num_chars:,} characters with the system prompt, expected at most "
                f"{self._max_chars:,}, the longest text of {self._max_seq_len} tokens; shorten the prompt"
            )

    def _policy(self, request: Request) -> Policy:
        policy = get_policy(request.policy if request.policy is not None else self._default_policy)
        return policy.for_task(detect_task(request.text)) if policy.by_task else policy

    def _prompt(self, request: Request, conversation: Conversation) -> _Prompt:
        if request.conversation_id is None:
            return _Prompt(request.text, 0, 0, len(request.text))
        if not conversation.tokens:
            turn = self._chat_format.first_turn(request.system_prompt, request.text)
        elif request.system_prompt is not None:
            raise RequestError(
                "system_prompt: got one after the first turn, expected it on the first turn only; leave it out"
            )
        else:
            turn = self._chat_format.next_turn(request.text, conversation.ended)
        return _Prompt(turn.text, turn.system_end, turn.user_start, turn.user_end)

    def _protected_chars(self, request: Request, conversation: Conversation, prompt: _Prompt) -> list[tuple[int, int]]:
        rules = conversation.policy.protection
        ranges = list(request.protect) + protected_ranges(request.text, rules)
        shifted = [(start + prompt.user_start, end + prompt.user_start) for start, end in ranges]
        if rules.system_prompt and prompt.system_end:
            shifted.append((0, prompt.system_end))
        return shifted
