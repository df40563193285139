"""What a client asks for and what it is told, as the engine sees it (no tensors, no transport)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from runtime.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 or top_k 1: greedy. top_k 0: no limit. seed None: the engine draws one.

    stop: texts that end the answer and are cut from it.   bad: texts that never appear in it.
    end_id: a token that ends the answer, besides the model's own.

    Raises RequestError naming the field for values no distribution has.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    want_logprobs: bool = False
    bad: tuple[str, ...] = ()
    end_id: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number, 0 or more"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "a number from -2 to 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "a number from -2 to 2"),
        )
        for name, good, expected in checks:
            if not good:
                raise RequestError(f"{name}: got {getattr(self, name)}, expected {expected}; correct the request")
        if any(not s for s in self.stop):
            raise RequestError("stop: got an empty stop string, expected non-empty text; leave it out")
        if any(not word for word in self.bad):
            raise RequestError("bad: got an empty text, expected words that must not appear; leave it out")
        if any("\ufffd" in word for word in self.bad):
            raise RequestError(
                "bad: got U+FFFD, which stands for bytes that are no character, expected text; leave it out"
            )
        if len(self.bad) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_CHARS for word in self.bad):
            raise RequestError(
                f"bad: got {len(self.bad)} words, the longest of {max(map(len, self.bad))} characters, expected at "
                f"most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_CHARS} characters; leave some out"
            )


@dataclass(frozen=True)
class Message:
    """One message of a chat that a client sends whole."""

    role: Role
    content: str


@dataclass(frozen=True)
class Request:
    """One turn.

    text: with `conversation_id`, the new user message (the chat template is applied); without, a raw prompt.
    system_prompt: used on the first turn of a conversation only; protected.
    protect: [start, end) character ranges of `text` whose tokens are never merged or evicted.
    policy: name of a registered policy; None: `default_policy`. Fixed by a conversation's first turn.
    default_policy: of a conversation that begins and names none; None: the engine's own.
    end_conversation: free the conversation when this turn is over.
    messages: the whole chat so far, the newest user message last, instead of `text` and `system_prompt`; the engine
        finds what of it it holds already.
    tenant: whose conversation it is; ids of one tenant mean nothing to another.
    priority: higher ones keep their cache longer and are admitted first; 0 is usual.
    turn_id: the client's name of this turn within its conversation. A turn that asks by the name of the last one that
        was taken is not taken twice: it is told that one's answer.
    """

    request_id: str
    text: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation_id: str | None = None
    system_prompt: str | None = None
    protect: tuple[tuple[int, int], ...] = ()
    policy: str | None = None
    default_policy: str | None = None
    end_conversation: bool = False
    exclude_input_from_output: bool = True
    messages: tuple[Message, ...] = ()
    tenant: str = ""
    priority: int = 0
    turn_id: str | None = None

    @property
    def user_text(self) -> str:
        """The new message, or the prompt."""
        return self.messages[-1].content if self.messages else self.text


@dataclass(frozen=True)
class KvStats:
    """Memory of one conversation. Token counts are token equivalents: entries / (layers * KV heads).

    kv_bytes: active pages, committed blocks with scales, biases and scores, and tables; of pages that several
        conversations share, those that this one has held longest.
    shared_kv_bytes: pages of its system prompt that it shares or offers to share, whoever they count for.
    kv_full_bytes: the full cache of as many tokens in fp16.
    evictable tokens are counted in `committed`, which they still occupy.
    """

    kv_bytes: int = 0
    kv_full_bytes: int = 0
    active: int = 0
    staged: int = 0
    committed: int = 0
    evicted: int = 0
    peak_kv_bytes: int = 0
    shared_kv_bytes: int = 0


@dataclass(frozen=True)
class TurnStats:
    """Timestamps are nanoseconds of the monotonic clock; names follow TensorRT-LLM's perf metrics.

    recomputed_tokens: tokens of earlier turns that had to be computed again, and `recomputed_reason`: why, in words
        for the client ("": none).
    """

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    alloc_new_blocks: int = 0
    alloc_total_blocks: int = 0
    recomputed_tokens: int = 0
    recomputed_reason: str = ""
    kv: KvStats = field(default_factory=KvStats)


@dataclass(frozen=True)
class TextEvent:
    """A piece of answer text; pieces concatenate to the whole, stop strings already cut.

    logprobs: of the tokens generated since the event before, if they were asked for; those of a turn's events are one
        per generated token, and cumulative_logprob is the sum so far.
    """

    request_id: str
    text: str
    cumulative_logprob: float = 0.0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a turn that ran. `stop_reason`: the stop string that matched, or ''.

    logprobs, cumulative_logprob: as in TextEvent.
    """

    request_id: str
    reason: FinishReason
    stop_reason: str
    stats: TurnStats
    cumulative_logprob: float = 0.0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class ErrorEvent:
    """The last event of a turn that could not run or go on; `message` is for the user."""

    request_id: str
    error: Exception


Event = TextEvent | FinishEvent | ErrorEvent
