"""A conversation's text and the turn it is running. The cache itself is the manager's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from runtime.bad_words import BadWords
from runtime.detokenizer import StopMatcher, TokenStream
from runtime.history import HeldMessage, Rollback, TakenTurn, Undo
from runtime.policy.base import Policy
from runtime.request import FinishReason, Request
from runtime.step import SampleSpec


@dataclass
class Turn:
    """A turn that waits, runs or has just ended.

    first_token: index in the conversation's tokens where this turn begins; a cancelled turn is undone to here.
    prompt_end: index where its prompt ends; what follows was generated.
    ended_before: the conversation's `ended` before this turn.
    protect: [start, end) token ranges to protect.
    bad_words: what the answer must not say; None: anything goes.
    logprobs: of generated tokens.   num_told: how many of them the client was told.
    history_end: where the newest user message begins; tokens before it are of earlier turns.
    rollback: what the chat that the client sent departs from; None once the cache was rolled back, or nothing departs.
    undo: what the turn took the place of.   protected_before: what was protected when the cache was rolled back.
    recomputed_tokens: tokens of earlier turns that this one computed again, and `recomputed_reason`: why.
    note: what else the client is told about its KV.
    passed: turns of other tenants that were let in before it since it found no room.
    """

    request: Request
    stream: TokenStream
    stops: StopMatcher
    uniforms: random.Random
    first_token: int
    prompt_end: int
    arrival_ns: int
    ended_before: bool
    protect: list[tuple[int, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    cumulative_logprob: float = 0.0
    reused_tokens: int = 0
    reused_pages: int = 0
    new_pages: int = 0
    recomputed_tokens: int = 0
    recomputed_reason: str = ""
    note: str = ""
    passed: int = 0
    bad_words: BadWords | None = None
    logprobs: list[float] = field(default_factory=list)
    num_told: int = 0
    history_end: int = 0
    rollback: Rollback | None = None
    undo: Undo = field(default_factory=Undo)
    protected_before: list[tuple[int, int]] = field(default_factory=list)
    cancelled: bool = False
    end_reason: FinishReason | None = None

    @property
    def recomputed_note(self) -> str:
        """What the client is told about tokens that had to be computed again, and about its KV besides."""
        if not self.recomputed_tokens:
            return self.note
        again = f"{self.recomputed_reason}, {self.recomputed_tokens} tokens recomputed"
        return f"{self.note}; {again}" if self.note else again

    def sample_spec(self, history: tuple[int, ...]) -> SampleSpec:
        """How to choose the next token; draws one number from the request's stream."""
        p = self.request.sampling
        return SampleSpec(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            frequency_penalty=p.frequency_penalty,
            presence_penalty=p.presence_penalty,
            uniform=self.uniforms.random() if p.temperature > 0 else 0.0,
            history=history if p.frequency_penalty or p.presence_penalty else (),
            want_logprob=p.want_logprobs,
            forbidden=self.bad_words.forbidden() if self.bad_words is not None else (),
        )


@dataclass
class Conversation:
    """tokens: every logical token so far, compressed or not, so that a dropped cache can be recomputed.

    ended: whether the last answer closed with an end token.
    tenant: whose it is; its id means something to clients of this tenant only.
    priority: of its last turn; conversations of a lower one give up their cache first.
    num_computed: tokens [0, num_computed) have been in the cache, which may have been dropped since: computing them
        once more is a loss that its client is told of. Whoever cuts `tokens` cuts this too.
    loss: why the cache was dropped last.
    messages: what `tokens` say, message by message.   system_tokens: how many of them are the system part.
    is_unnamed: its client sends whole chats and gave no id; it is found by what it holds.
    taken: the last turn, if its client named it.
    """

    handle: int
    conversation_id: str | None
    policy: Policy
    tenant: str = ""
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    turn: Turn | None = None
    ended: bool = True
    last_used_ns: int = 0
    end_requested: bool = False
    num_computed: int = 0
    loss: str = ""
    messages: tuple[HeldMessage, ...] = ()
    system_tokens: int = 0
    is_unnamed: bool = False
    taken: TakenTurn | None = None

    def num_pending(self, num_cached: int) -> int:
        """Tokens that are not in the cache yet; 1 while decoding."""
        return len(self.tokens) - num_cached

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens that the current turn has generated."""
        assert self.turn is not None
        return tuple(self.tokens[self.turn.prompt_end :])

    @property
    def num_generated(self) -> int:
        assert self.turn is not None
        return len(self.tokens) - self.turn.prompt_end
