"""Holds a conversation word for word the same under several policies, and compares every word with the full cache.

The full cache comes first and answers for itself where the conversation has no answers. Then each policy is made to
give those answers, token by token, and its distribution of every one is held against the full cache's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from perf.chat_data import Chat, ChatTurn
from perf.stepping import rest
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, RequestError, UnknownConversationError
from runtime.paged_executor import PagedExecutor
from runtime.request import KvStats, Request, SamplingParams
from runtime.text import EngineTokenizer
from runtime.wiring import load_parts, load_tokenizer

FULL = "full"
_ID = "c"


@dataclass(frozen=True, eq=False)
class Said:
    """One answer.   tokens: as they stand in the conversation.   logprobs [tokens, vocab] fp32: before each of them.

    compressed: whether something had been committed before the turn.
    """

    tokens: tuple[int, ...]
    logprobs: torch.Tensor
    compressed: bool


@dataclass(frozen=True, eq=False)
class Reference:
    """A conversation with the full cache.   kv: after its last turn."""

    said: tuple[Said, ...]
    kv: KvStats


@dataclass(frozen=True)
class TurnScore:
    """kl: mean over the answer's tokens, nats.   same_choice: whether both prefer the same token for each of them.

    agreement: share of the tokens for which they do.
    """

    kl: float
    same_choice: bool
    agreement: float


@dataclass(frozen=True)
class Telling:
    """A conversation under one policy.   scores: of the turns before which something was compressed.

    kv: after the last turn and the idle time behind it.
    """

    scores: tuple[TurnScore, ...]
    kv: KvStats


class _Forcing:
    """Replaces what a step samples from, so that the answer is the given one; remembers what it was."""

    def __init__(self) -> None:
        self.answer: Sequence[int] | None = None
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == 1, "one conversation at a time"
        index = len(self.logprobs)
        self.logprobs.append(torch.log_softmax(logits[0].float(), dim=-1).cpu())
        if self.answer is None:
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[0, self.answer[index]] = 0.0
        return forced


class Teacher:
    """One engine, on which conversations are held under one policy after the other."""

    def __init__(self, engine_dir: Path, config: RuntimeConfig, answer_tokens: int) -> None:
        """answer_tokens: of every answer at most so many are held and compared. Raises ManifestError or ConfigError."""
        parts = load_parts(engine_dir, config)
        assert isinstance(parts.executor, PagedExecutor)
        self.spec, self._max_seq_len = parts.spec, parts.limits.max_seq_len
        self._engine = Engine(parts)
        self._forcing = parts.executor.steer = _Forcing()
        self._answer_tokens = answer_tokens
        self._tokenizer: EngineTokenizer = load_tokenizer(engine_dir, manifests.load(engine_dir, verify=False))

    def check_length(self, chat: Chat) -> None:
        """Raises RequestError naming the line by which the messages alone fill the model's context."""
        total = len(self._tokenizer.encode(chat.system or "", (0, 0))[0])
        for turn in chat.turns:
            answer = self._given(turn)
            total += len(self._tokenizer.encode(turn.user, (0, 0))[0]) + (1 if answer is None else len(answer))
            if total >= self._max_seq_len:
                raise RequestError(
                    f"--data: {turn.where}: {total} tokens of {chat.name} up to here, expected fewer than the engine's "
                    f"{self._max_seq_len}; cut the conversation, or build the engine with a larger --max-seq-len"
                )

    def refer(self, chat: Chat) -> Reference:
        """The conversation with the full cache. Raises RequestError naming the line of a turn that is refused."""
        with self._conversation():
            said = [self._turn(chat, number, FULL, self._given(turn)) for number, turn in enumerate(chat.turns)]
            return Reference(tuple(said), self._engine.kv_stats(_ID))

    def tell(self, chat: Chat, policy: str, like: Reference) -> Telling:
        """The conversation under a policy with the answers of `like`. Raises RequestError."""
        scores = []
        with self._conversation():
            for number, whole in enumerate(like.said):
                said = self._turn(chat, number, policy, whole.tokens)
                if said.compressed:
                    scores.append(compare(said, whole))
            return Telling(tuple(scores), self._engine.kv_stats(_ID))

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """Lets go of the conversation whatever happens."""
        try:
            yield
        finally:
            with suppress(UnknownConversationError):
                self._engine.end_conversation(_ID)
            rest(self._engine)

    def _given(self, turn: ChatTurn) -> tuple[int, ...] | None:
        if turn.answer is None:
            return None
        return tuple(self._tokenizer.encode(turn.answer, (0, 0))[0][: self._answer_tokens])

    def _turn(self, chat: Chat, number: int, policy: str, given: Sequence[int] | None) -> Said:
        turn = chat.turns[number]
        compressed = False
        if number:
            kv = self._engine.kv_stats(_ID)
            compressed = kv.committed + kv.evicted > 0
        self._forcing.answer, self._forcing.logprobs = given, []
        sampling = SamplingParams(max_tokens=self._answer_tokens if given is None else len(given))
        system = chat.system if number == 0 else None
        try:
            self._engine.submit(
                Request(f"turn-{number}", turn.user, sampling, _ID, system_prompt=system, policy=policy)
            )
            rest(self._engine)
        except CommitKVError as error:
            raise RequestError(f"--data: {turn.where}: {error}") from error
        logprobs = torch.stack(self._forcing.logprobs)
        tokens = logprobs.argmax(dim=1).tolist() if given is None else given
        if len(tokens) != len(logprobs):
            raise RequestError(
                f"--data: {turn.where}: the answer reaches the end of the model's context, expected a shorter "
                f"conversation; cut it, or build the engine with a larger --max-seq-len"
            )
        return Said(tuple(tokens), logprobs, compressed)


def compare(ours: Said, full: Said) -> TurnScore:
    """KL(full || ours) and top choices of one answer."""
    assert ours.tokens == full.tokens, "the answers differ"
    p, q = full.logprobs, ours.logprobs
    kl = (p.exp() * (p - q)).sum(dim=1).clamp_(min=0.0)
    same = p.argmax(dim=1) == q.argmax(dim=1)
    return TurnScore(float(kl.mean()), bool(same.all()), float(same.float().mean()))
