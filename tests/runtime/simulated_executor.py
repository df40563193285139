"""An executor of plain dictionaries that checks every plan it is given.

It stores in each slot which token of which conversation lies there, so that a page given to two conversations, a
token read twice, lost, or out of order is seen at once. Its "model" is a hash of all token ids and positions it can
read, so with nothing dropped the text depends only on the conversation's own tokens.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.kv_state import twin_of
from runtime.step import (
    BlockTable,
    KvView,
    LinePlan,
    LineResult,
    ProbePlan,
    PublishPlan,
    PublishResult,
    SampledToken,
    SequencePlan,
    StepPlan,
    StepResult,
    int32,
)

Token = tuple[int, int, int]  # handle, position, token id


@dataclass
class SimulatedExecutor:
    """Entries carry their token; `keep` draws which staged tokens stay, row by row."""

    page_tokens: int
    block_entries: int
    num_rows: int
    eos: int = 0
    vocab_size: int = 97
    seed: int = 0
    slots: dict[int, Token] = field(default_factory=dict)
    entries: dict[tuple[str, int], list[Token]] = field(default_factory=dict)
    decisions: dict[int, tuple[list[list[Token]], list[list[bool]]]] = field(default_factory=dict)
    exact: dict[int, list[Token]] = field(default_factory=dict)
    fail_next: bool = False
    lossless: bool = False
    text_of: Callable[[int], Sequence[int]] | None = None  # all tokens of a conversation, by handle

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, plan: StepPlan) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the simulated device broke")
        assert plan.num_tokens > 0
        written = [slot for sequence in plan.sequences for slot in sequence.slots]
        assert len(written) == len(set(written)), "two rows write one slot"
        sampled = []
        for sequence in plan.sequences:
            self._write(sequence)
            tokens = self._read(sequence.handle, sequence.view)
            last = sequence.first_position + len(sequence.token_ids) - 1
            assert tokens[-1][1] == last, "the newest token must be the last in table order"
            assert max(position for _, position, _ in tokens) == last
            if sequence.sample is not None:
                token = self._next(tokens, sequence.sample.forbidden)
                logprob = -1.0 / (token + 1) if sequence.sample.want_logprob else None
                sampled.append(SampledToken(sequence.handle, token, logprob))
        return StepResult(tuple(sampled))

    def _next(self, tokens: list[Token], forbidden: tuple[int, ...]) -> int:
        value = 7
        for position, token_id in sorted({(p, t) for _, p, t in tokens}):
            value = (value * 31 + position * 17 + token_id) % 1_000_003
        token = value % self.vocab_size
        while token in forbidden:
            token = (token + 1) % self.vocab_size
        return token

    def _write(self, sequence: SequencePlan | ProbePlan) -> None:
        assert len(sequence.slots) == len(sequence.token_ids)
        for i, (slot, token_id) in enumerate(zip(sequence.slots, sequence.token_ids, strict=True)):
            self.slots[slot] = (_owner(sequence.handle), sequence.first_position + i, token_id)

    def _read(self, handle: int, view: KvView) -> list[Token]:
        tokens = []
        for page_id, length in zip(view.page_ids, view.page_lens, strict=True):
            assert 0 < length <= self.page_tokens
            tokens += [self.slots[page_id * self.page_tokens + i] for i in range(length)]
        assert len({t[1] for t in tokens}) == len(tokens), "a token is read twice"
        in_blocks = [t for row in self._rows(view.blocks) for t in row]
        if self.text_of is None:
            assert all(t[0] == _owner(handle) for t in tokens + in_blocks), "a conversation reads another one's tokens"
        else:  # pages may be shared
            text = self.text_of(handle)
            assert all(t[0] == _owner(handle) for t in in_blocks), "a conversation reads another one's blocks"
            assert all(t[1] < 0 or text[t[1]] == t[2] for t in tokens + in_blocks), "reads what was never said"
        assert not {t[1] for t in tokens} & {t[1] for t in in_blocks}, "a token is both in a page and committed"
        return [*in_blocks, *tokens]

    def _rows(self, table: BlockTable) -> list[list[Token]]:
        rows: list[list[Token]] = []
        for first, last in zip(table.starts, table.starts[1:], strict=False):
            row: list[Token] = []
            for i in range(first, last):
                stored = self.entries[table.format, table.ids[i]]
                assert len(stored) == table.lens[i] <= self.block_entries
                row += stored
            assert len({t[1] for t in row}) == len(row), "an entry stands twice in a row"
            rows.append(row)
        assert len(rows) == self.num_rows
        return rows

    def probe(self, plan: ProbePlan, interrupted: Callable[[], bool]) -> bool:
        pages = list(plan.view.page_ids)
        scratch = {slot // self.page_tokens for slot in plan.slots}
        assert scratch <= set(pages) and len(set(pages)) == len(pages)
        for slot in plan.slots:
            self.slots[slot] = (_owner(plan.handle), -1 - slot, 0)
        if interrupted():
            return False
        if plan.handle < 0 and plan.first_scored_row == len(plan.token_ids):  # text that is computed anew
            self._write(plan)
            tokens = self._read(plan.handle, plan.view)
            assert [t[1] for t in tokens] == list(range(len(tokens))), "a twin lacks some of what came before"
        return True

    def draw_line(self, plan: LinePlan) -> LineResult:
        staged = [self.slots[slot] for slot in plan.staged_slots]
        assert all(t[0] == _owner(plan.handle) for t in staged)
        old = self._rows(plan.blocks)
        self.exact[plan.handle] = self._random.sample(staged, min(plan.rules.exact_entries, len(staged)))
        exact = set(self.exact[plan.handle])
        kept: list[list[Token]] = []
        alive: list[list[bool]] = []
        share = 1.0 if self.lossless else 0.4
        for row in old:
            kept.append([t for t in staged if t not in exact and self._random.random() < share])
            alive.append([self._random.random() < (1.0 if self.lossless else 0.9) for _ in row])
        self.decisions[plan.handle] = (kept, alive)
        counts = int32()
        for row_alive, (first, last) in zip(alive, _spans(plan.blocks.starts), strict=True):
            done = 0
            for i in range(first, last):
                counts.append(sum(row_alive[done : done + plan.blocks.lens[i]]))
                done += plan.blocks.lens[i]
        lost = sum(t not in row and t not in exact for row in kept for t in staged[: plan.num_exact])
        return LineResult(0.0, int32(len(row) for row in kept), counts, int32(), len(exact), lost)

    def publish(self, plan: PublishPlan) -> PublishResult:
        old = plan.line.blocks
        kept, alive = self.decisions.pop(plan.line.handle)
        for source, target in zip(plan.move_from, plan.move_to, strict=True):
            self.slots[target] = self.slots[source]
        exact = self.exact.pop(plan.line.handle)
        self.slots.update(zip(plan.exact_to, exact, strict=True))
        dropped = 0
        new_spans = _spans(plan.blocks.starts)
        for row, (first, last) in enumerate(_spans(old.starts)):
            moving: list[Token] = []
            done = 0
            for i in range(first, last):
                entries = self.entries[old.format, old.ids[i]]
                flags = alive[row][done : done + len(entries)]
                done += len(entries)
                if plan.dissolve[i]:
                    moving += [t for t, above in zip(entries, flags, strict=True) if above]
                    dropped += flags.count(False)
            moving += kept[row]
            dropped += len(plan.line.staged_slots) - len(kept[row]) - len(exact)
            for i in range(*new_spans[row]):
                if plan.new_block[i]:
                    size = plan.blocks.lens[i]
                    self.entries[plan.blocks.format, plan.blocks.ids[i]] = moving[:size]
                    moving = moving[size:]
            assert not moving, "the table has no room for all entries"
        return PublishResult(0, dropped)

    def drawing(self, plans: Sequence[LinePlan]) -> Callable[[], tuple[LineResult, ...]]:
        """All of it is done in the second half, as late as may be."""
        return lambda: tuple(self.draw_line(plan) for plan in plans)

    def publishing(self, plan: PublishPlan, line: LineResult) -> Callable[[], PublishResult]:
        return lambda: self.publish(plan)

    def release(self, page_ids: array[int], blocks: BlockTable | None) -> None:
        for page_id in page_ids:
            for slot in range(page_id * self.page_tokens, (page_id + 1) * self.page_tokens):
                self.slots.pop(slot, None)
        if blocks is not None:
            for block_id in blocks.ids:
                self.entries.pop((blocks.format, block_id), None)


def _spans(starts: array[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts))


def _owner(handle: int) -> int:
    """The conversation of a cache or of its twin."""
    return max(handle, twin_of(handle))
