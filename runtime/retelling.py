"""Turns that were taken and whose answer did not arrive: asked again by the same name, they are told again.

A connection that breaks, or a server that dies, between the end of a turn and its client leaves the client not knowing
whether the turn was taken. Sent again without a name the message would be said, and answered, twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.conversation import Conversation, Turn
from runtime.errors import RequestError
from runtime.history import TakenTurn
from runtime.request import Event, FinishEvent, KvStats, Request, TextEvent, TurnStats

NOTE = "told again: the turn had been taken"


@dataclass(frozen=True)
class Retelling:
    """An answer that is to be told again.   answer: its text.   num_tokens: what the conversation holds with it."""

    request: Request
    conversation: Conversation
    taken: TakenTurn
    answer: str
    num_tokens: int
    arrival_ns: int

    def events(self, kv: KvStats) -> list[Event]:
        """What the turn's client is told: all of the text, if there is any, and the end."""
        request_id, taken = self.request.request_id, self.taken
        stats = TurnStats(
            arrival_ns=self.arrival_ns,
            reused_tokens=self.num_tokens,
            recomputed_reason=NOTE,
            kv=kv,
        )
        end = FinishEvent(request_id, taken.reason, taken.stop_reason, stats, taken.cumulative_logprob)
        if not self.answer:
            return [end]
        return [TextEvent(request_id, self.answer, taken.cumulative_logprob, taken.logprobs), end]


def taken_turn(turn: Turn) -> TakenTurn | None:
    """What is remembered of a turn that has ended well; nothing of one without a name."""
    if turn.request.turn_id is None:
        return None
    assert turn.end_reason is not None
    return TakenTurn(
        turn.request.turn_id, turn.end_reason, turn.stops.matched, turn.cumulative_logprob, tuple(turn.logprobs)
    )


def retelling(request: Request, conversation: Conversation, now_ns: int) -> Retelling | None:
    """The answer of the last turn, if `request` asks by its name; None for a turn that is to be taken.

    Raises RequestError where that turn said something else.
    """
    taken = conversation.taken
    if taken is None or request.turn_id != taken.turn_id:
        return None
    user, answer = conversation.messages[-2:]
    if user.content != request.user_text:
        raise RequestError(
            f"turn_id: got {request.turn_id!r}, the name of the turn before, with another text, expected the same text "
            f"to hear its answer again; use a new name for a new turn"
        )
    return Retelling(request, conversation, taken, answer.content, len(conversation.tokens), now_ns)
