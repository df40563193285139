"""Pieces of work on caches between steps, and how a piece of text is re-read.

A probe asks the model to repeat text that it has read: what it then looks at is what it needs of that text.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.conversation import Conversation
from runtime.errors import OutOfMemoryError
from runtime.kv_manager import KvManager
from runtime.reservations import RowReservation
from runtime.step import LinePlan, ProbePlan, int32

# Tokens before a probed piece that are re-read with it, so that its first tokens have a context to be found by.
LEAD_TOKENS = 8


@dataclass(frozen=True, eq=False)
class ProbeWork:
    """Rows that no turn asked for.

    span: what is re-read; None for text that is computed anew.   urgent: belongs to a review and is not interrupted,
    or it would starve under steady load.   again: the span was re-read before, when it was nearer.
    """

    plan: ProbePlan
    reservation: RowReservation
    span: tuple[int, int] | None
    urgent: bool = False
    again: bool = False


@dataclass(frozen=True)
class CommitWork:
    """A batch of commits, each of another conversation's cache or twin, due for the same reason."""

    plans: tuple[LinePlan, ...]


@dataclass(frozen=True)
class ProbeSettings:
    """prompt: tokens that ask the model to repeat the text.   max_tokens: of a span per probe.

    boundaries: ids of the tokens that separate messages, for `runtime.policy.signals`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    max_seq_len: int
    boundaries: frozenset[int] = frozenset()


class Prober:
    """Reserves the rows of probes."""

    def __init__(self, manager: KvManager, settings: ProbeSettings) -> None:
        self._manager = manager
        self.settings = settings

    def reread(
        self,
        conversation: Conversation,
        span: tuple[int, int],
        handle: int | None = None,
        *,
        urgent: bool = False,
        again: bool = False,
    ) -> ProbeWork | None:
        """The next piece of `span`; None where memory has no room for its rows.

        handle: of the cache that is read, where it is not the conversation's own.
        """
        handle = conversation.handle if handle is None else handle
        kv = self._manager[handle]
        start = span[0]
        end = min(span[1], start + self.settings.max_tokens)
        lead = min(LEAD_TOKENS, start)
        token_ids = (*self.settings.prompt, *conversation.tokens[start - lead : end])
        try:
            reservation = self._manager.reserve_scratch(handle, len(token_ids))
        except OutOfMemoryError:
            return None  # no spare memory: the span is committed by `seen` alone
        plan = ProbePlan(
            handle=handle,
            token_ids=token_ids,
            # Beyond the model's range the re-read moves closer; its distances are a little short then.
            first_position=max(0, min(kv.num_tokens, self.settings.max_seq_len - len(token_ids))),
            slots=reservation.slots,
            view=reservation.view,
            first_scored_row=len(self.settings.prompt),
            record_skip=conversation.policy.schedule.recent_tokens,
            fades=again and start == 0,
            squares=conversation.policy.score == "norm",
            exact_pages=int32(page.page_id for page in kv.exact_pages()),
        )
        return ProbeWork(plan, reservation, (start, end), urgent, again)
