"""Owns the KV memory: reserve takes pages and blocks before a step, settle records its outcome after it.

These are the only two writers of cache state. A reservation that fails changes nothing; one that is not settled
must be cancelled. Commits are planned and settled here too; their arithmetic is in `commit_planner`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set

from plugins.layout import STORABLE, BlockLayout, PageLayout
from runtime.commit_planner import draft_commit, is_unscored, make_line_plan
from runtime.config import DTYPE_BYTES, EngineLimits, ModelSpec
from runtime.errors import ConfigError, OutOfMemoryError
from runtime.kv_checks import check_conversations, check_pools
from runtime.kv_state import ConversationKv, make_block_table, twin_of
from runtime.lifecycle import Event, State, transition
from runtime.page_pool import ByteBudget, IdPool
from runtime.policy.base import Policy
from runtime.policy.check import check_engine, check_model
from runtime.request import KvStats
from runtime.reservations import CommitReservation, Freed, OpenCommits, RowReservation
from runtime.shared_prefix import SharedPrefixes
from runtime.step import LinePlan, LineResult, int32


class KvManager:
    """Pages and blocks of all conversations, and of their twins, within `kv_memory_bytes`."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: EngineLimits,
        kv_memory_bytes: int,
        only_format: str | None = None,
        most: tuple[int, int] | None = None,
    ) -> None:
        """only_format: of all blocks, where the executor reads one block format alone.

        most: pages and blocks that an arena may hold, where the executor counts its elements in 31 bits.
        """
        self._only_format = only_format
        self.spec = spec
        self.page_tokens = limits.page_tokens
        self.block_entries = limits.block_entries
        self.page_layout = PageLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, limits.page_tokens, DTYPE_BYTES[limits.kv_dtype]
        )
        self._kv_dtype = limits.kv_dtype
        self.block_layouts: dict[str, BlockLayout] = {
            name: BlockLayout(name, limits.block_entries, spec.head_dim) for name in (*STORABLE, limits.kv_dtype)
        }
        # Before it frees anything a commit writes about two blocks per row and moves protected tokens to a page.
        block_bytes = max(self.block_layouts[name].stored_bytes for name in STORABLE)
        headroom = 2 * (spec.num_kv_rows * block_bytes + self.page_layout.page_bytes)
        if kv_memory_bytes < (least := headroom + 8 * self.page_layout.page_bytes):
            raise ConfigError(
                f"kv_memory_bytes: got {kv_memory_bytes:,}, expected at least {least:,} for this model "
                f"(8 pages and the room a commit works in); raise it"
            )
        self.budget = ByteBudget(kv_memory_bytes, headroom)
        most_pages, most_blocks = most or (None, None)
        self._pages = self._pool(self.page_layout.page_bytes, most_pages)
        self._blocks = {
            name: self._pool(layout.stored_bytes, most_blocks) for name, layout in self.block_layouts.items()
        }
        self._conversations: dict[int, ConversationKv] = {}
        self.shared = SharedPrefixes(limits.page_tokens)
        self.open_commits = OpenCommits()
        self._scratch_pages = 0
        self._may_have_staged: set[int] = set()

    def _pool(self, item_bytes: int, most: int | None) -> IdPool:
        fits = self.budget.total_bytes // item_bytes
        return IdPool(fits if most is None else min(fits, most), item_bytes, self.budget)

    @property
    def num_pages(self) -> int:
        """Pages the arenas must be able to hold."""
        return self._pages.capacity

    @property
    def num_blocks(self) -> dict[str, int]:
        """Blocks the arena of each format must be able to hold."""
        return {name: pool.capacity for name, pool in self._blocks.items()}

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when nothing is compressed."""
        return (self.budget.total_bytes - self.budget.headroom_bytes) // self.page_layout.page_bytes * self.page_tokens

    # Conversations

    def open(self, handle: int, policy: Policy) -> None:
        """Starts an empty cache; its first tokens are protected as the policy says.

        Raises UnsupportedPolicyError, with nothing changed, for a policy that this model or engine cannot have.
        """
        assert handle not in self._conversations, handle
        check_model(policy, self.spec)
        block_format = self._kv_dtype if policy.block_format == "kv" else policy.block_format
        check_engine(policy, block_format, self._only_format)
        kv = ConversationKv(policy, block_format, self.spec.num_kv_rows, self.page_tokens)
        kv.protect(0, policy.protection.sink_tokens)
        self._conversations[handle] = kv

    def __getitem__(self, handle: int) -> ConversationKv:
        return self._conversations[handle]

    def __contains__(self, handle: int) -> bool:
        return handle in self._conversations

    def release(self, handle: int) -> Freed:
        """Frees everything a conversation holds that nobody shares, and its twin."""
        self.open_commits.conclude(handle)
        page_ids = self.drop_twin(handle).page_ids
        kv = self._conversations.pop(handle)
        for state in State:
            if state is not State.GONE:
                kv.ledger.move(state, Event.RELEASED, kv.ledger[state])
        page_ids += self._give_pages(handle, [page.page_id for page in kv.pages])
        self.shared.forget(handle)
        self._blocks[kv.blocks.format].give(kv.blocks.ids)
        return Freed(page_ids, kv.blocks)

    def take_room(self, handle: int, num_pages: int, num_blocks: int) -> tuple[array[int], array[int]]:
        """Pages and blocks for a cache that comes from a checkpoint. OutOfMemoryError changes nothing."""
        page_ids = self._pages.take(num_pages)
        self._may_have_staged.add(handle)
        try:
            return page_ids, self._blocks[self[handle].blocks.format].take(num_blocks)
        except OutOfMemoryError:
            self._pages.give(page_ids)
            raise

    def reset(self, handle: int) -> Freed:
        """Frees the cache of a conversation that goes on; protected positions, the prefix that it may share and the
        peak are remembered."""
        self.open_commits.conclude(handle)
        before = self._conversations[handle]
        prefix = self.shared.prefix(handle)
        freed = self.release(handle)
        self.open(handle, before.policy)
        self.shared.announce(handle, *prefix)
        after = self._conversations[handle]
        after.peak_bytes = before.peak_bytes
        for start, end in before.protected_ranges():
            after.protect(start, end)
        return freed

    def truncate(self, handle: int, num_tokens: int) -> Freed | None:
        """Undoes the tokens from `num_tokens` on. None, with nothing changed, if one of them was committed.

        Of a page that is shared nothing can be undone alone: fewer tokens are left then, up to its start.
        """
        self.open_commits.conclude(handle)
        kv = self._conversations[handle]
        num_shared = len(self.shared.held(handle))
        if num_tokens < num_shared * self.page_tokens:
            num_shared = num_tokens // self.page_tokens
            num_tokens = num_shared * self.page_tokens
        if num_tokens >= kv.num_tokens:
            self.shared.cut(handle, num_tokens)  # tokens that are not computed yet are others too
            return Freed(int32())
        gone = kv.undo(num_tokens)
        if gone is None:
            return None
        freed = self._give_pages(handle, gone, num_shared)
        self.shared.cut(handle, num_tokens)
        twin = self._conversations.get(twin_of(handle))
        if twin is not None and twin.num_tokens > num_tokens:
            freed += self.drop_twin(handle).page_ids
        return Freed(freed)

    def rollback(self, handle: int, num_tokens: int) -> Freed:
        """Undoes the tokens from `num_tokens` on and forgets their protection. Where some of them were committed
        nothing before them is exact either: the whole cache goes, to be computed again."""
        freed = self.truncate(handle, num_tokens)
        if freed is None:
            freed = self.reset(handle)
            self.shared.cut(handle, num_tokens)
        kv = self._conversations[handle]
        kv.unprotect_from(max(num_tokens, kv.policy.protection.sink_tokens))
        return freed

    def _give_pages(self, handle: int, page_ids: list[int], num_shared: int = 0) -> array[int]:
        """Gives up pages, of which the first `num_shared` shared ones are not; returns those that nobody holds."""
        shared = set(self.shared.held(handle)[num_shared:])
        freed = int32(page_id for page_id in page_ids if page_id not in shared)
        freed.extend(self.shared.leave(handle, num_shared))
        self._pages.give(freed)
        return freed

    # Twins: caches that are computed anew, whole, to take the place of compressed ones

    def open_twin(self, handle: int) -> None:
        """Starts an empty cache beside that of a conversation, for the same tokens."""
        twin = twin_of(handle)
        self.open(twin, self[handle].policy)
        self.shared.announce(twin, *self.shared.prefix(handle))

    def stage_twin(self, handle: int) -> None:
        """Freezes what lies behind the recent window of a twin, under the conversation's own protection."""
        for start, end in self[handle].protected_ranges():
            self[twin_of(handle)].protect(start, end)
        self.stage(twin_of(handle), Event.TURN_ENDED)

    def replace(self, handle: int) -> Freed:
        """The twin takes the place of the cache, which is freed. Both have the same tokens."""
        before, twin = self[handle], self._conversations.pop(twin_of(handle))
        assert twin.num_tokens == before.num_tokens, (twin.num_tokens, before.num_tokens)
        freed = self.release(handle)
        self._conversations[handle] = twin
        self._may_have_staged.add(handle)
        self.shared.rename(twin_of(handle), handle)
        twin.peak_bytes, twin.reread_at = before.peak_bytes, twin.num_tokens
        return freed

    def drop_twin(self, handle: int) -> Freed:
        """Gives up a twin, if there is one."""
        self.open_commits.conclude(handle)
        if handle < 0 or twin_of(handle) not in self:
            return Freed(int32())
        return self.release(twin_of(handle))

    @property
    def twins(self) -> list[int]:
        """Handles of the conversations that have one."""
        return [twin_of(handle) for handle in self._conversations if handle < 0]

    # Shared prefixes

    def announce_prefix(self, handle: int, tenant: str, token_ids: Sequence[int]) -> None:
        """What a conversation begins with, its system prompt: whole pages of it are stored once per tenant.

        Only what can never be staged is shared: protected tokens, where the policy compresses.
        """
        kv = self._conversations[handle]
        last = len(token_ids)
        if kv.policy.compresses:
            last = next((position for position in range(last) if not kv.is_protected(position)), last)
        self.shared.announce(handle, tenant, token_ids[:last])

    def adopt_prefix(self, handle: int) -> int:
        """Takes over pages that others hold of what comes next; returns the number of tokens that they save."""
        return self.shared.adopt(handle, self._conversations[handle])

    # Rows

    def reserve_rows(self, handle: int, num_tokens: int) -> RowReservation:
        """Slots for new tokens. Raises OutOfMemoryError with nothing changed."""
        self.open_commits.conclude(handle)
        kv = self._conversations[handle]
        in_tail = min(num_tokens, kv.tail_room)
        new_ids = self._pages.take(-(-(num_tokens - in_tail) // self.page_tokens))
        slots = int32()
        if in_tail:
            first = kv.pages[-1].page_id * self.page_tokens + kv.pages[-1].num_tokens
            slots.extend(range(first, first + in_tail))
        slots.extend(self._slots_of(new_ids, num_tokens - in_tail))
        return RowReservation(handle, num_tokens, new_ids, slots, kv.view(num_tokens, new_ids))

    def reserve_scratch(self, handle: int, num_tokens: int) -> RowReservation:
        """Slots for rows that are read once and forgotten, in pages of their own."""
        self.open_commits.conclude(handle)
        kv = self._conversations[handle]
        new_ids = self._pages.take(-(-num_tokens // self.page_tokens))
        self._scratch_pages += len(new_ids)
        view = kv.view(num_tokens, new_ids, use_tail=False)
        return RowReservation(handle, num_tokens, new_ids, int32(self._slots_of(new_ids, num_tokens)), view, True)

    def _slots_of(self, page_ids: array[int], num_tokens: int) -> list[int]:
        size = self.page_tokens
        return [page_id * size + offset for page_id in page_ids for offset in range(size)][:num_tokens]

    def settle_rows(self, reservation: RowReservation) -> Freed:
        """The step ran: its tokens are active now. Scratch pages go back, and pages that somebody else has too."""
        if reservation.scratch:
            self.cancel_rows(reservation)
            return Freed(reservation.new_page_ids)
        kv = self._conversations[reservation.handle]
        kv.append(reservation.num_tokens, reservation.new_page_ids)
        spare = int32(self.shared.offer(reservation.handle, kv))
        self._pages.give(spare)
        if reservation.new_page_ids:
            kv.peak_bytes = max(kv.peak_bytes, self.kv_bytes(reservation.handle))
        return Freed(spare)

    def cancel_rows(self, reservation: RowReservation) -> None:
        """The step did not run."""
        if reservation.scratch:
            self._scratch_pages -= len(reservation.new_page_ids)
        self._pages.give(reservation.new_page_ids)

    # Lifecycle

    def stage(self, handle: int, event: Event, only: Set[int] | None = None) -> int:
        """Freezes pages older than the recent window; returns the number of tokens staged.

        The tail page, compacted pages and wholly protected ones stay. Nothing happens below `min_tokens`.
        only: positions of first tokens of the pages that may be staged; None: all.
        """
        self.open_commits.conclude(handle)
        kv = self._conversations[handle]
        schedule = kv.policy.schedule
        if not kv.policy.compresses or kv.num_tokens < schedule.min_tokens:
            return 0
        oldest_recent = kv.num_tokens - schedule.recent_tokens
        num_staged = 0
        for page in kv.pages[:-1]:
            if page.state is not State.ACTIVE or page.compacted or page.positions[-1] >= oldest_recent:
                continue
            if (only is not None and page.positions[0] not in only) or not (loose := kv.loose_positions(page)):
                continue
            page.state = transition(page.state, event)
            kv.ledger.move(State.ACTIVE, event, len(loose) * kv.num_rows)
            kv.add_unprobed(page.positions[0], page.positions[-1] + 1)
            num_staged += len(loose)
        self._may_have_staged.add(handle)
        return num_staged

    @property
    def staged(self) -> list[int]:
        """Handles of the caches with staged text, oldest first. The others are not looked at."""
        caches = self._conversations
        self._may_have_staged = {h for h in self._may_have_staged if h in caches and caches[h].num_staged}
        return sorted(self._may_have_staged)

    def plan_commit(self, handle: int) -> LinePlan | None:
        """First half of a commit of everything staged; None if there is nothing to do."""
        self.open_commits.conclude(handle)
        kv = self._conversations[handle]
        return make_line_plan(handle, kv, self.spec.num_layers, self.pressure) if kv.commit_due else None

    def reserve_publish(self, plan: LinePlan, line: LineResult) -> CommitReservation:
        """Second half: which blocks dissolve, and room for the new ones. OutOfMemoryError changes nothing."""
        kv = self._conversations[plan.handle]
        draft = draft_commit(kv, line, self.block_entries)
        pool = self._blocks[kv.blocks.format]
        block_ids = pool.take(draft.num_new_blocks, for_commit=True)
        try:
            page_ids = self._pages.take(draft.num_new_pages, for_commit=True)
        except Exception:
            pool.give(block_ids)
            raise
        publish = draft.publish_plan(kv, plan, block_ids, page_ids)
        return CommitReservation(plan.handle, publish, draft, block_ids, page_ids)

    def settle_commit(self, reservation: CommitReservation) -> Freed:
        """The commit was published: swap tables, then free staged pages and dissolved blocks."""
        kv = self._conversations[reservation.handle]
        kv.peak_bytes = max(kv.peak_bytes, self._bytes_during(reservation))
        policy = kv.policy.at_commit(kv.num_commits)
        kv.whole = policy.redraw and is_unscored(policy, kv)
        page_ids, block_ids = reservation.draft.apply(kv, reservation.plan, reservation.new_page_ids)
        kv.reread_at = kv.reread_at or kv.num_tokens
        self._pages.give(page_ids)
        self._blocks[kv.blocks.format].give(block_ids)
        return Freed(page_ids, make_block_table(kv.blocks.format, [[(i, self.block_entries) for i in block_ids]]))

    def cancel_commit(self, reservation: CommitReservation) -> None:
        """It was not published."""
        self._blocks[self[reservation.handle].blocks.format].give(reservation.new_block_ids)
        self._pages.give(reservation.new_page_ids)

    def _bytes_during(self, reservation: CommitReservation) -> int:
        layout = self.block_layouts[self[reservation.handle].blocks.format]
        extra = len(reservation.new_page_ids) * self.page_layout.page_bytes
        return self.kv_bytes(reservation.handle) + extra + len(reservation.new_block_ids) * layout.stored_bytes

    # Figures

    def kv_bytes(self, handle: int) -> int:
        """Bytes one conversation holds: pages, blocks with scales, biases and scores, and tables.

        A shared page counts once, for whoever has held it longest, so that the bytes of all add up to what is used.
        """
        kv = self._conversations[handle]
        block_bytes = self.block_layouts[kv.blocks.format].stored_bytes
        num_bytes = (len(kv.pages) - self.shared.num_borrowed(handle)) * self.page_layout.page_bytes
        return num_bytes + kv.blocks.num_blocks * block_bytes + kv.table_bytes

    def stats(self, handle: int) -> KvStats:
        shared_bytes = len(self.shared.held(handle)) * self.page_layout.page_bytes
        return self[handle].stats(self.kv_bytes(handle), self.spec.kv_token_bytes("fp16"), shared_bytes)

    @property
    def pressure(self) -> float:
        """Share of the KV memory in use."""
        return self.budget.used_bytes / self.budget.total_bytes

    def check_invariants(self) -> None:
        """Adds everything up; called by tests and the idle loop. No reservation may be open."""
        check_conversations(self._conversations, self.shared)
        assert self.staged == sorted(h for h, kv in self._conversations.items() if kv.num_staged)
        check_pools(self._conversations.values(), self.shared, self._pages, self._scratch_pages, self._blocks)
        used = sum(pool.num_owned * pool.item_bytes for pool in (self._pages, *self._blocks.values()))
        assert used == self.budget.used_bytes, (used, self.budget.used_bytes)
