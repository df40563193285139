"""Turns a sampled token into what the client is told."""

from __future__ import annotations

from runtime.conversation import Conversation, Turn
from runtime.request import Event, FinishEvent, FinishReason, KvStats, TextEvent, TurnStats
from runtime.step import SampledToken


def accept_token(
    conversation: Conversation, token: SampledToken, eos_token_ids: tuple[int, ...], max_seq_len: int, now_ns: int
) -> list[Event]:
    """Adds a token to the turn; sets `turn.end_reason` when it was the last one. Returns text that is ready."""
    turn = conversation.turn
    assert turn is not None and turn.end_reason is None
    conversation.tokens.append(token.token_id)
    turn.first_token_ns = turn.first_token_ns or now_ns
    turn.last_token_ns = now_ns
    if token.logprob is not None:
        turn.cumulative_logprob += token.logprob
        turn.logprobs.append(token.logprob)
    if token.token_id in eos_token_ids or token.token_id == turn.request.sampling.end_id:
        conversation.ended = True
        return finish_text(turn, "stop")
    if turn.bad_words is not None:
        turn.bad_words.push(token.token_id)
    piece = turn.stops.push(turn.stream.step(token.token_id) or "")
    events = _text(turn, piece)
    if turn.stops.matched:
        turn.end_reason = "stop"
    elif conversation.num_generated >= turn.request.sampling.max_tokens or len(conversation.tokens) >= max_seq_len:
        events += finish_text(turn, "length")
    return events


def finish_text(turn: Turn, reason: FinishReason) -> list[Event]:
    """Ends the turn and sends what the stop matcher still held back."""
    turn.end_reason = reason
    return _text(turn, turn.stops.flush())


def _text(turn: Turn, piece: str) -> list[Event]:
    if not piece:
        return []
    turn.text.append(piece)
    return [TextEvent(turn.request.request_id, piece, turn.cumulative_logprob, _take_logprobs(turn))]


def _take_logprobs(turn: Turn) -> tuple[float, ...]:
    """Those of the tokens since the event before."""
    told, turn.num_told = turn.num_told, len(turn.logprobs)
    return tuple(turn.logprobs[told:])


def finish_event(conversation: Conversation, turn: Turn, kv: KvStats) -> FinishEvent:
    """The closing record of a turn."""
    assert turn.end_reason is not None
    stats = TurnStats(
        arrival_ns=turn.arrival_ns,
        first_scheduled_ns=turn.first_scheduled_ns,
        first_token_ns=turn.first_token_ns,
        last_token_ns=turn.last_token_ns,
        prompt_tokens=turn.prompt_end - turn.first_token,
        reused_tokens=turn.reused_tokens,
        generated_tokens=len(conversation.tokens) - turn.prompt_end,
        reused_blocks=turn.reused_pages,
        missed_blocks=turn.new_pages,
        alloc_new_blocks=turn.new_pages,
        alloc_total_blocks=turn.reused_pages + turn.new_pages,
        recomputed_tokens=turn.recomputed_tokens,
        recomputed_reason=turn.recomputed_note,
        kv=kv,
    )
    return FinishEvent(
        request_id=turn.request.request_id,
        reason=turn.end_reason,
        stop_reason=turn.stops.matched,
        stats=stats,
        cumulative_logprob=turn.cumulative_logprob,
        logprobs=_take_logprobs(turn),
    )
