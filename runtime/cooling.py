"""Stages tokens of running turns by their policy's signals: `active -> staged (cooled)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from runtime.conversation import Conversation
from runtime.kv_manager import KvManager
from runtime.kv_state import ConversationKv
from runtime.lifecycle import Event, State
from runtime.policy.signals import PageAge, SignalTracker
from runtime.step import SignalResult


class Cooling:
    """One tracker for each conversation whose policy has signals; made when it first runs, gone when it is.

    boundaries: token ids that separate messages in the chat template.
    """

    def __init__(
        self, manager: KvManager, conversations: Mapping[int, Conversation], boundaries: frozenset[int] = frozenset()
    ) -> None:
        self._manager, self._conversations, self._boundaries = manager, conversations, boundaries
        self._trackers: dict[int, SignalTracker] = {}

    def step_done(self, ran: Iterable[Conversation], results: Sequence[SignalResult]) -> None:
        """The rows of `ran` were settled; `results` are of those among them that were watched."""
        by_handle = {result.handle: result for result in results}
        for conversation in ran:
            signals = conversation.policy.signals
            if signals.on and conversation.policy.compresses and conversation.handle in self._manager:
                self._read(conversation, by_handle.get(conversation.handle))
        for handle in [h for h in self._trackers if h not in self._conversations]:
            del self._trackers[handle]

    def _read(self, conversation: Conversation, result: SignalResult | None) -> None:
        kv = self._manager[conversation.handle]
        signals = conversation.policy.signals
        tracker = self._trackers.setdefault(conversation.handle, SignalTracker(signals))
        first = tracker.num_tokens
        if first > kv.num_tokens:
            tracker.rewind(kv.num_tokens)
        tracker.read_tokens(conversation.tokens[tracker.num_tokens : kv.num_tokens], self._boundaries)
        if result is not None and result.jumps:
            tracker.read_jumps(result.jumps)
        if result is not None and result.page_shares:
            tracker.read_attention(_even_shares(kv, result.page_shares), result.entropy)
        if signals.looks(first, kv.num_tokens):
            cooled = tracker.look(_ages(kv))
            if cooled:
                self._manager.stage(conversation.handle, Event.COOLED, cooled)


def _even_shares(kv: ConversationKv, shares: Mapping[int, float]) -> dict[int, float]:
    """page id -> share, as page key -> attention in units of even attention."""
    num_read = sum(page.num_tokens for page in kv.pages) + sum(kv.blocks.lens) / kv.num_rows
    return {
        page.positions[0]: shares[page.page_id] * num_read / page.num_tokens
        for page in kv.pages
        if page.page_id in shares and page.state is not State.COMMITTED
    }


def _ages(kv: ConversationKv) -> Iterable[PageAge]:
    """Pages that may be staged, by the manager's own rules but for their age."""
    return (
        PageAge(page.positions[0], page.positions[-1])
        for page in kv.pages[:-1]
        if page.state is State.ACTIVE and not page.compacted
    )
