"""`python -m perf.train_merge`: learns how spans merge into super tokens from a model's own attention, on a CPU.

Conversations are held with nothing compressed while attention is recorded, spans are re-read and queries are kept. A
line like commitkv's then parts the older tokens; what falls below is merged in spans, everything else stays exact. For
queries of the last part of the conversation the loss is the squared error of attention's output against the full
cache's, over its mean square. One small network for each (layer, KV head) chooses the weights of the merge (see
`plugins.commit.merger`); it begins as "weighted". The last conversation is held out: the table that is printed compares
dropping, the fixed merges and the network there, for each span size.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from perf.train_parts import Tracer, add_trace_arguments, check_arguments, exit_code, save_weights
from perf.workload import Conversation, load_conversation
from plugins.attend.params import AttendForm, AttendStep, StepTables
from plugins.commit.components import part_by_components
from plugins.commit.entries import TINY_WEIGHT, Entries
from plugins.commit.line import staged_kv, staged_scores
from plugins.commit.merger import MergeWeights, merge_weights
from plugins.memory import KvMemory
from runtime.executor_torch import TorchExecutor
from runtime.gates import GATES_DIR
from runtime.policy.check import base_name
from runtime.step import StepPlan, StepResult

SIZES = (5, 10, 20, 50)
QUERY_EVERY = 8
QUERIES_FROM = 0.6  # share of the conversation after which queries are taken; what is merged lies before it
RECENT = 128
ROWS_AT_ONCE = 15
WAYS = ("drop", "mean", "weighted", "pca, 2 for each span", "learned")


@dataclass(frozen=True, eq=False)
class Told:
    """One conversation, all of it exact.

    kv [rows, n, 2, D] fp32 in order of position; scores [rows, n]; loose [n] bool: staged and not protected.
    queries [layers, m, q_heads, D] fp32 at positions [m] int64.
    """

    kv: torch.Tensor
    scores: torch.Tensor
    loose: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class Spans:
    """One row's spans of one size, and what its queries [m, D] read besides them.

    members: [spans * size]; number: the span of each. rest_lse [m], rest_out [m, D]: over everything else;
    full_out [m, D]: with the members themselves.
    """

    members: Entries
    number: torch.Tensor
    queries: torch.Tensor
    rest_lse: torch.Tensor
    rest_out: torch.Tensor
    full_out: torch.Tensor


class _Queries:
    """An `AttendForm` that keeps the queries of every `QUERY_EVERY`-th position of ordinary steps."""

    def __init__(self, form: AttendForm) -> None:
        self._form = form
        self.first = -1  # position of the step's first row; negative: keep nothing
        self.kept: dict[int, list[torch.Tensor]] = {}  # by layer
        self.positions: list[int] = []

    def begin(self, memory: KvMemory, tables: StepTables, scale: float) -> AttendStep:
        step = self._form.begin(memory, tables, scale)
        first, count = self.first, tables.record.shape[0]
        if first < 0:
            return step
        chosen = [p for p in range(first, first + count) if p % QUERY_EVERY == 0]
        self.positions += chosen
        rows = torch.tensor([p - first for p in chosen], dtype=torch.int64)

        def keeping(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            self.kept.setdefault(layer, []).append(q.index_select(0, rows).float())
            step(layer, q, out)

        return keeping


class QueryTracer(Tracer):
    """A tracer that keeps queries too."""

    def __init__(self, engine_dir: Path, kv_mib: int) -> None:
        super().__init__(engine_dir, kv_mib)
        executor = self._engine._executor
        assert isinstance(executor, TorchExecutor)
        self._queries = _Queries(executor._forms.attend)
        executor._forms = replace(executor._forms, attend=self._queries)
        run = executor.run

        def kept(plan: StepPlan) -> StepResult:
            self._queries.first = plan.sequences[0].first_position
            try:
                return run(plan)
            finally:
                self._queries.first = -1

        executor.run = kept  # type: ignore[method-assign]

    def tell(self, conversation: Conversation, max_tokens: int) -> Told:
        """Holds the conversation with answers of `max_tokens`."""
        self._queries.kept, self._queries.positions = {}, []
        kv = self._hold(conversation, max_tokens)
        slots = [(p, page.page_id * kv.page_tokens + i) for page in kv.pages for i, p in enumerate(page.positions)]
        slots.sort()
        staged = {p for page in kv.staged_pages() for p in page.positions}
        where = torch.tensor([slot for _, slot in slots])
        told = Told(
            staged_kv(self._memory, where).float(),
            staged_scores(self._memory, where),
            torch.tensor([p in staged and not kv.is_protected(p) for p, _ in slots]),
            torch.stack([torch.cat(self._queries.kept[layer]) for layer in range(self.spec.num_layers)]),
            torch.tensor(self._queries.positions),
        )
        self._end()
        return told


def make_spans(told: Told, size: int, keep: float, row: int) -> Spans | None:
    """One row's spans of `size` tokens below a line over all rows, in order; None where it has no whole span."""
    rows, count = told.scores.shape
    cut = int(QUERIES_FROM * count)
    older = told.loose & (torch.arange(count) < cut - RECENT)
    line = told.scores[:, older].flatten().topk(max(1, round(keep * rows * int(older.sum())))).values[-1]
    below = (older & (told.scores[row] < line)).nonzero()[:, 0]
    below = below[: below.shape[0] // size * size]
    if below.shape[0] == 0:
        return None
    heads = told.queries.shape[2] // (rows // told.queries.shape[0])
    layer, head = divmod(row, rows // told.queries.shape[0])
    asked = told.positions >= cut
    queries = told.queries[layer, asked][:, head * heads : (head + 1) * heads].flatten(0, 1)
    last = told.positions[asked].repeat_interleave(heads)
    keys, values = told.kv[row, :, 0], told.kv[row, :, 1]
    logits = queries @ keys.T * keys.shape[1] ** -0.5
    logits.masked_fill_(torch.arange(count) > last[:, None], -torch.inf)
    full_out = logits.softmax(dim=1) @ values
    logits[:, below] = -torch.inf
    members = Entries(keys[below], values[below], torch.zeros(below.shape[0]), told.scores[row, below])
    number = torch.arange(below.shape[0]) // size
    return Spans(members, number, queries, logits.logsumexp(dim=1), logits.softmax(dim=1) @ values, full_out)


def error(spans: Spans, number: torch.Tensor | None, raw: torch.Tensor) -> torch.Tensor:
    """Squared error of attention's output over its mean square, after the sets merged with weights `raw` [members].

    number: the set of each member; None drops them.
    """
    out = spans.rest_out
    if number is not None:
        sets, members = int(number.amax()) + 1, spans.members
        p = raw / raw.new_zeros(sets).index_add(0, number, raw)[number]

        def total(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros((sets, *x.shape[1:])).index_add(0, number, x)

        keys, values = total(p[:, None] * members.keys), total(p[:, None] * members.values)
        bias = total(p * (members.bias - p.log()))
        logits = spans.queries @ keys.T * keys.shape[1] ** -0.5 + bias
        weights = torch.cat((spans.rest_lse[:, None], logits), dim=1).softmax(dim=1)
        out = weights[:, :1] * out + weights[:, 1:] @ values
    return (out - spans.full_out).square().sum() / spans.full_out.square().sum()


def train(spans: dict[int, list[Spans]], rows: int, hidden: int, steps: int) -> MergeWeights:
    """spans: by row. Features are scaled row by row while learning; the scaling goes into W."""
    features = 2 * next(iter(spans.values()))[0].members.keys.shape[1] + 1
    gen = torch.Generator().manual_seed(0)
    scale = torch.ones(rows, features, 1)
    for row, of_row in spans.items():
        together = torch.cat([torch.cat((s.members.keys, s.members.values), dim=1) for s in of_row])
        scale[row, :-1, 0] = together.std(dim=0).clamp(min=1e-3)
    weights = MergeWeights(
        torch.randn(rows, features, hidden, generator=gen) * features**-0.5,
        torch.zeros(rows, hidden), torch.zeros(rows, hidden), torch.ones(rows),
    )  # fmt: skip
    learned = [weights.hidden, weights.offset, weights.out, weights.score]
    for tensor in learned:
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(learned, lr=0.01)
    order = sorted(spans)
    for step in tqdm(range(steps), unit="step", file=sys.stdout):
        optimizer.zero_grad()
        loss = torch.zeros(())
        first = step * ROWS_AT_ONCE % len(order)
        for row in order[first : first + ROWS_AT_ONCE]:
            merger = replace(weights.row(row), hidden=weights.hidden[row] / scale[row])
            one = spans[row][step // max(1, len(order) // ROWS_AT_ONCE) % len(spans[row])]
            loss = loss + error(one, one.number, merge_weights(one.members, one.number, _sets(one), merger))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return MergeWeights((weights.hidden / scale).detach(), *(x.detach() for x in learned[1:]))


def _sets(spans: Spans) -> int:
    return int(spans.number.amax()) + 1


def compare(spans: list[tuple[int, Spans]], weights: MergeWeights) -> dict[str, float]:
    """Mean error over (row, spans) by way."""
    found = dict.fromkeys(WAYS, 0.0)
    for row, one in spans:
        members, number = one.members, one.number
        score = members.score.clamp(min=TINY_WEIGHT)
        parts = 2 * number + part_by_components(members.keys, score, number, 2)
        learned = merge_weights(members, number, _sets(one), weights.row(row))
        ways = ((None, score), (number, torch.ones_like(score)), (number, score),
                (torch.unique(parts, return_inverse=True)[1], score), (number, learned))  # fmt: skip
        for name, way in zip(WAYS, ways, strict=True):
            found[name] += float(error(one, *way)) / len(spans)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.train_merge", description="Trains the network that merges spans into super tokens."
    )
    data_help = "conversations as JSONL, two or more; the last is held out (default: the shipped ones)"
    add_trace_arguments(parser, data_help)
    add = parser.add_argument
    add("--keep", type=float, default=0.35, help="share of all older entries above the line (%(default)s)")
    add("--hidden", type=int, default=6, help="width of each network (%(default)s)")
    add("--steps", type=int, default=600, help="optimizer steps, each over a sixth of SmolLM2's heads (%(default)s)")
    add("--output", type=Path, help=f"file to write (default: {GATES_DIR.name}/<model>.merge.safetensors)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Raises CommitKVError."""
    check_arguments(
        args,
        ("data", len(args.data) >= 2, "two files or more, the last to be held out"),
        ("hidden", 1 <= args.hidden <= 64, "1 to 64"),
    )
    started = time.monotonic()
    conversations = [load_conversation(path) for path in args.data]
    tracer = QueryTracer(args.engine, args.kv_mib)
    told = [tracer.tell(c, args.max_tokens) for c in tqdm(conversations, unit="conversation", file=sys.stdout)]
    traced, rows = time.monotonic(), told[0].scores.shape[0]
    made = {
        row: [s for one in told[:-1] for size in SIZES if (s := make_spans(one, size, args.keep, row)) is not None]
        for row in range(rows)
    }
    weights = train({row: spans for row, spans in made.items() if spans}, rows, args.hidden, args.steps)
    path = args.output or GATES_DIR / f"{base_name(tracer.spec.name)}.merge.safetensors"
    tensors = {name: getattr(weights, name).half().contiguous() for name in ("hidden", "offset", "out", "score")}
    save_weights(path, tracer.spec, tensors)
    print(f"error of attention's output on {conversations[-1].name}, held out\n| span | {' | '.join(WAYS)} |")
    print("|---" * (1 + len(WAYS)) + "|")
    with torch.inference_mode():
        for size in SIZES:
            spans = [(row, s) for row in range(rows) if (s := make_spans(told[-1], size, args.keep, row)) is not None]
            found = compare(spans, weights) if spans else {}
            print(f"| {size} | " + " | ".join(f"{found.get(way, float('nan')):.4f}" for way in WAYS) + " |")
    print(f"traces {traced - started:.0f} s, training {time.monotonic() - traced:.0f} s; written: {path}")


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
