"""What goes down to the device half and what comes up: frozen records, flat int32 tables, no states.

The engine issues these kinds of work:
    StepPlan     prefill chunks and decode rows of many conversations  -> StepResult
    ProbePlan    a re-read of one span, nothing kept                   -> bool (False: it gave way)
    LinePlan     draw the line for one conversation's commit           -> LineResult
    PublishPlan  write the blocks that the commit keeps                -> PublishResult

Arrays are `array('i')` (int32). A *slot* is page_id * page_tokens + offset: one token's place in every layer.
A *row* of a block table is layer * num_kv_heads + kv_head.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plugins.commit.choices import PLAIN, LineChoices

FADE = 0.25


def int32(values: object = ()) -> array[int]:
    """An int32 array."""
    return array("i", values)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The committed blocks one conversation holds, ragged per (layer, KV head).

    version: unique over all tables of the process, so that device copies can be cached by it.
    format: block format, see `plugins.layout.BlockFormat`.
    starts: [num_rows + 1]; row r owns entries [starts[r], starts[r + 1]) of `ids` and `lens`.
    ids: [num_blocks] block ids.   lens: [num_blocks] entries filled in each block, 1..block_entries.
    """

    version: int
    format: str
    starts: array[int]
    ids: array[int]
    lens: array[int]

    @property
    def num_blocks(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class KvView:
    """What the rows of one conversation may read.

    page_ids, page_lens: [num_pages]; tokens filled per page, the rows being run included. The rows being run
    are the last ones in this order, so row i of n sees all but the last n - 1 - i of the page tokens, and
    every committed entry.
    """

    page_ids: array[int]
    page_lens: array[int]
    blocks: BlockTable


@dataclass(frozen=True)
class SampleSpec:
    """How to choose the next token after a sequence's last row.

    uniform: a number in [0, 1) from the request's seeded stream; the token is the first whose cumulative
    probability exceeds it, so a seed gives the same text whatever else is in the batch.
    history: tokens the penalties count (generated so far in this turn).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    uniform: float = 0.0
    history: tuple[int, ...] = ()
    want_logprob: bool = False
    forbidden: tuple[int, ...] = ()


@dataclass(frozen=True)
class Watch:
    """What a step shall report of a sequence for the signals of its policy; see `runtime.policy.signals`.

    attention: shares of pages and entropy, a *look*.   hidden: how far neighbouring hidden states differ.
    """

    attention: bool = False
    hidden: bool = False

    def __bool__(self) -> bool:
        return self.attention or self.hidden


NO_WATCH = Watch()


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Rows of one conversation: a prefill chunk, or one decode row.

    first_position: logical position of token_ids[0]; the rest follow.
    slots: [num_tokens] where `append` writes each token's K and V.
    record_seen: whether attention updates `seen` and `score`; for chunks the executor samples the rows
        (the last `SEEN_LAST_ROWS` and every `SEEN_EVERY`-th).
    record_skip: page tokens up to and including a row whose weights are not recorded for that row: the recent
        window, which stays active whatever its scores (see `plugins.attend.params`).
    record_last: only so many last rows record; 0: the sample above.
    record_sum: every row records, and weights are added up instead of compared.
    watch: what the result shall say of the sequence besides.
    sample: None for a chunk that is not the last of its prompt.
    """

    handle: int
    token_ids: tuple[int, ...]
    first_position: int
    slots: array[int]
    view: KvView
    record_seen: bool
    record_skip: int
    sample: SampleSpec | None
    record_last: int = 0
    record_sum: bool = False
    watch: Watch = NO_WATCH


@dataclass(frozen=True, eq=False)
class StepPlan:
    sequences: tuple[SequencePlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True)
class SampledToken:
    """logprob: natural log of the probability under the unmodified distribution, or None if not asked for."""

    handle: int
    token_id: int
    logprob: float | None = None


@dataclass(frozen=True, eq=False)
class SignalResult:
    """What a step showed of a watched sequence.

    page_shares: page id -> share of attention, 0 to 1, averaged over KV heads and over some layers and rows; empty
        without a look.   entropy: of the same weights, each in units of ln(things read), averaged likewise.
    jumps: [n] 1 - cosine of each row's last hidden state with that of the token before it, for the last n rows:
        a conversation's first token has none before it.
    """

    handle: int
    page_shares: dict[int, float] = field(default_factory=dict)
    entropy: float = 0.0
    jumps: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepResult:
    tokens: tuple[SampledToken, ...] = ()
    signals: tuple[SignalResult, ...] = ()


@dataclass(frozen=True, eq=False)
class ProbePlan:
    """Re-read of a span: like a prefill chunk whose pages are scratch. `first_scored_row` and later rows
    raise the scores of what they look at, all but the newest `record_skip` page tokens up to themselves.

    squares: squares of weights are added up, as RECORD_SQUARES of `plugins.attend.params`, instead of compared.
    fades: the scores of committed entries are multiplied by `FADE` first, so that what is read from now on counts more.
    exact_pages: ids of the pages that hold committed entries.
    """

    handle: int
    token_ids: tuple[int, ...]
    first_position: int
    slots: array[int]
    view: KvView
    first_scored_row: int
    record_skip: int
    fades: bool = False
    squares: bool = False
    exact_pages: array[int] = field(default_factory=int32)


@dataclass(frozen=True)
class CommitRules:
    """The device's share of a policy.

    floor_entries: least number of entries each (layer, KV head) keeps.
    absorb_gate: absorb what falls below the line into the nearest kept entry of the head if
        |k - k'| < absorb_gate * |k|; None drops it.
    layer_scale: [num_layers] factors on scores before the line, or empty for 1.
    protect_outlier_z: entries whose score lies more than z standard deviations over the mean of their head
        at their first commit are protected for good; None switches the rule off.
    choices: how entries are ranked and what becomes of those below.
    gate: file of the trained scorer that choices.score "gate" asks for.   merger: of the network that tiers which say
        "learned" ask for.
    exact_entries: staged entries of each row, the best, that stay in pages at full precision.
    """

    floor_entries: int = 16
    absorb_gate: float | None = 0.35
    layer_scale: tuple[float, ...] = ()
    protect_outlier_z: float | None = None
    choices: LineChoices = PLAIN
    gate: str = ""
    merger: str = ""
    exact_entries: int = 0


@dataclass(frozen=True, eq=False)
class LinePlan:
    """Draw the line over everything one conversation has committed or staged.

    staged_slots: [num_staged] tokens to commit, protected ones not among them; before them slots of exact entries, each
        with another token in every row.
    keep_entries: entries to keep over all rows together (the floor may raise it).
    quotas: the same for each group of consecutive rows, of equal size: layers, or single rows; empty: one line.
    positions: [num_staged] logical positions of the staged tokens, -1 of exact entries.   num_exact: slots of those.
    num_tokens: length of the conversation.
    """

    handle: int
    staged_slots: array[int]
    blocks: BlockTable
    keep_entries: int
    rules: CommitRules
    quotas: tuple[int, ...] = ()
    positions: array[int] = field(default_factory=int32)
    num_exact: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, eq=False)
class LineResult:
    """Counts only; scores stay on the device.

    new_kept: [num_rows] staged tokens above the line that go into blocks.   alive: [num_blocks] entries above it per
        old block.
    repooled: [num_blocks] 1 for old blocks that must dissolve since entries of theirs merge; empty: none.
    num_exact: staged entries of each row that are exact from now on.   exact_lost: entries over all rows that were
        exact and stay nowhere.
    decision: the executor's own, for its `publishing`; nobody else looks into it.
    """

    line: float
    new_kept: array[int]
    alive: array[int]
    repooled: array[int] = field(default_factory=int32)
    num_exact: int = 0
    exact_lost: int = 0
    decision: object = None


@dataclass(frozen=True, eq=False)
class PublishPlan:
    """Second half of a commit: no rows of that cache ran since its LinePlan was made.

    dissolve: [num_blocks of the old table] 1 where the block is emptied: entries above the line move to new
        blocks, those below are absorbed or dropped. Other blocks keep their codes; entries below the line in
        them stay readable until they are dissolved (state *evictable*).
    blocks: the table after the commit: per row the blocks that stay, in their old order, then the new ones.
    new_block: [num_blocks of `blocks`] 1 where the block is new.
    move_from, move_to: protected tokens copied whole from staged pages to pages that stay.
    exact_to: slots of the entries that are exact from now on.
    """

    line: LinePlan
    dissolve: array[int]
    blocks: BlockTable
    new_block: array[int]
    move_from: array[int] = field(default_factory=int32)
    move_to: array[int] = field(default_factory=int32)
    exact_to: array[int] = field(default_factory=int32)


@dataclass(frozen=True)
class PublishResult:
    absorbed: int
    dropped: int


class Executor(Protocol):
    """The device half, as the engine sees it. Calls are made one at a time from one thread.

    The halves of a commit come in two halves each: the call reads tables, what it returns works. Executors that are
    given a `CommitWorker` let another thread run that, while calls go on here that concern other caches.
    """

    def run(self, plan: StepPlan) -> StepResult: ...

    def probe(self, plan: ProbePlan, interrupted: Callable[[], bool]) -> bool:
        """Asks `interrupted` between operations; True when the scores were raised, False when it gave way."""
        ...

    def drawing(self, plans: Sequence[LinePlan]) -> Callable[[], tuple[LineResult, ...]]:
        """Draws the lines of several caches; a device is waited for once."""
        ...

    def publishing(self, plan: PublishPlan, line: LineResult) -> Callable[[], PublishResult]:
        """Writes the blocks of one.   line: what `drawing` gave for `plan.line`."""
        ...

    def release(self, page_ids: array[int], blocks: BlockTable | None) -> None:
        """Pages and blocks that nobody owns any more: memory may go back to the system."""
        ...
