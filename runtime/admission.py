"""Which turns are taken, and which may run beside those that run: so that a turn that was accepted finishes.

A turn is judged by the most bytes its conversation can come to hold: all of its prompt and `max_tokens` in pages, or
what its policy leaves of them where the policy compresses under pressure, whichever is less. Caches of idle
conversations do not count, since they give way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runtime.config import EngineLimits, RuntimeConfig
from runtime.conversation import Conversation
from runtime.errors import QueueFullError, TurnTooLargeError
from runtime.kv_manager import KvManager
from runtime.maintenance import WATERMARK_MIN_PAGES
from runtime.memory_plan import peak_memory

# Weight of the newest turn in the mean time of a turn, from which the hint when to try again is reckoned.
NEWEST = 0.2


class Admission:
    """Predicts and refuses; holds no state but the mean time that turns take."""

    def __init__(self, manager: KvManager, limits: EngineLimits, config: RuntimeConfig) -> None:
        self._manager = manager
        self._limits = limits
        self._config = config
        self._mean_turn_s = 0.0

    # Arriving turns

    def check_queue(self, num_waiting: int, tenant: str, num_of_tenant: int) -> None:
        """Raises QueueFullError, with a hint when to try again, if too many turns wait, or too many of the tenant."""
        config = self._config
        for num, most, whose in (
            (num_waiting, config.max_waiting, ""),
            (num_of_tenant, config.max_tenant_waiting, f" of tenant {tenant!r}"),
        ):
            if most and num >= most:
                retry_s = self._wait_s(num)
                raise QueueFullError(
                    f"queue: {num} turns{whose} are waiting, at most {most} may; try again in {retry_s} s",
                    retry_s,
                )

    def check_size(self, conversation: Conversation, num_tokens: int, max_tokens: int) -> None:
        """Raises TurnTooLargeError for a turn that could not end. num_tokens: of the conversation with the prompt."""
        peak = self.peak_bytes(conversation, num_tokens, max_tokens)
        budget = self._manager.budget
        for most, option in (
            (budget.total_bytes - budget.headroom_bytes, "kv_memory_bytes"),
            (self._config.max_conversation_bytes, "max_conversation_bytes"),
        ):
            if most and peak > most:
                raise TurnTooLargeError(
                    f"KV memory: {num_tokens} tokens with this prompt and max_tokens {max_tokens} may come to "
                    f"{peak:,} bytes, expected at most {most:,}; lower max_tokens, shorten the prompt, begin a new "
                    f"conversation, choose a policy that compresses, or have the operator raise {option}"
                )

    def turn_took(self, seconds: float) -> None:
        """How long a turn ran, once it was over."""
        self._mean_turn_s += (seconds - self._mean_turn_s) * (NEWEST if self._mean_turn_s else 1.0)

    def _wait_s(self, num_waiting: int) -> int:
        """Seconds until so many turns have had a place, if turns go on taking what they took."""
        return max(1, math.ceil(self._mean_turn_s * num_waiting / self._limits.max_batch_size))

    # Waiting turns

    def may_run(self, conversation: Conversation, running: Sequence[Conversation]) -> bool:
        """Whether a waiting turn can run to its end beside those that run."""
        if not running:
            return True
        if self.is_tenant_full(conversation.tenant, running):
            return False
        budget = self._manager.budget
        claimed = self._claimed(running) + self._final_bytes(conversation)
        return claimed <= budget.total_bytes - budget.headroom_bytes

    def is_tenant_full(self, tenant: str, running: Sequence[Conversation]) -> bool:
        """Whether a tenant has all the places that it may have while others run."""
        most = self._config.max_tenant_running
        return bool(most) and sum(other.tenant == tenant for other in running) >= most

    def _claimed(self, running: Iterable[Conversation]) -> int:
        return sum(max(self._final_bytes(other), self._held_bytes(other)) for other in running)

    def _final_bytes(self, conversation: Conversation) -> int:
        turn = conversation.turn
        assert turn is not None
        return self.peak_bytes(conversation, turn.prompt_end, turn.request.sampling.max_tokens)

    def peak_bytes(self, conversation: Conversation, num_tokens: int, max_tokens: int) -> int:
        """The most that a conversation comes to hold in a turn of `num_tokens` (all so far) and an answer."""
        manager, policy = self._manager, conversation.policy
        # The last token of an answer is not in the cache.
        cached = max(num_tokens, min(num_tokens + max_tokens, self._limits.max_seq_len) - 1)
        held_tokens, tail_room, protected = 0, 0, 0
        if conversation.handle in manager:  # not yet, for a conversation that begins
            kv = manager[conversation.handle]
            held_tokens = kv.num_tokens
            tail_room = kv.tail_room + manager.shared.num_waiting(conversation.handle, kv)
            protected = sum(end - start for start, end in kv.protected_ranges())
        in_pages = self._held_bytes(conversation) + self._page_bytes(cached - held_tokens - tail_room)
        if not policy.compresses or not policy.schedule.at_watermark:
            return in_pages
        # Tokens that came since the last commit: a step's, and the pages that a commit waits for.
        fresh = self._config.tokens_per_step + WATERMARK_MIN_PAGES * manager.page_tokens
        compressed = peak_memory(manager.spec, self._limits, policy, cached, protected + fresh)
        if held_tokens < policy.schedule.min_tokens:  # it grows in pages until then
            compressed = max(compressed, self._page_bytes(policy.schedule.min_tokens + fresh))
        return min(in_pages, compressed)

    def _page_bytes(self, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._manager.page_tokens)) * self._manager.page_layout.page_bytes

    def _held_bytes(self, conversation: Conversation) -> int:
        """Pages and blocks; tables are not part of the budget. Shared pages count for one of those that hold them."""
        manager = self._manager
        if conversation.handle not in manager:
            return 0
        kv = manager[conversation.handle]
        block_bytes = manager.block_layouts[kv.blocks.format].stored_bytes
        num_pages = len(kv.pages) - manager.shared.num_borrowed(conversation.handle)
        return num_pages * manager.page_layout.page_bytes + kv.blocks.num_blocks * block_bytes
