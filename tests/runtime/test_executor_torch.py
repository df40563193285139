"""The torch executor end to end on a tiny random model: storage, batching and commits against dense attention."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import torch

from builder.lower_torch import TORCH_DECODER_FORMS, DecoderForms, TorchDecoder
from builder.model import weight_recipes
from plugins.layout import CODE_BITS, MIXED
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.executor_torch import TORCH_FORMS, TorchExecutor
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.step import (
    BlockTable,
    CommitRules,
    KvView,
    LinePlan,
    ProbePlan,
    PublishPlan,
    SampleSpec,
    SequencePlan,
    StepPlan,
    int32,
)
from runtime.wiring import choose_forms

SPEC = ModelSpec("qwen3", 3, 64, 96, 6, 2, 16, 97, 1e-5, RopeSpec(10000.0), 4096, True, qkv_bias=True, qk_norm=True)
LIMITS = EngineLimits(dtype="fp32", kv_dtype="fp32", page_tokens=8, block_entries=16)
ROWS = SPEC.num_kv_rows
VERSIONS = count(1)


class LogitsSpy:
    """A decoder that remembers its last logits and asks `interrupted` as the real one does."""

    def __init__(self, forms: DecoderForms) -> None:
        gen = torch.Generator().manual_seed(5)
        weights = {r.name: torch.randn(r.shape, generator=gen) * 0.3 + 1.5 * r.is_norm for r in weight_recipes(SPEC)}
        self.decoder = TorchDecoder(SPEC, weights, "fp32", forms=forms)
        self.logits = torch.zeros(0)

    def forward(self, token_ids, positions, kv, logit_rows, interrupted=None):  # type: ignore[no-untyped-def]
        logits = self.decoder.forward(token_ids, positions, kv, logit_rows, interrupted)
        self.logits = self.logits if logits is None else logits.clone()
        return logits


class DenseStep:
    """Contiguous causal attention over one sequence, by torch's own kernel and complex rotation."""

    def append(self, layer, q, k, v, rotary):  # type: ignore[no-untyped-def]
        turn = torch.complex(*rotary)[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            half = x.shape[-1] // 2
            turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
            return torch.cat((turned.real, turned.imag), dim=-1)

        self.k, self.v = (x.repeat_interleave(SPEC.group_size, dim=1) for x in (rotate(k), v))
        return rotate(q)

    def attend(self, layer, q):  # type: ignore[no-untyped-def]
        q, k, v = (x.transpose(0, 1) for x in (q, self.k, self.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def empty_table(block_format: str = "fp32") -> BlockTable:
    return BlockTable(next(VERSIONS), block_format, int32([0] * (ROWS + 1)), int32(), int32())


@dataclass
class Conversation:
    """A conversation's pages and blocks, kept by hand; page ids are taken out of order."""

    handle: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    blocks: BlockTable = field(default_factory=empty_table)
    first_in_pages: int = 0

    def plan(
        self, token_ids: list[int], sample: SampleSpec | None = None, record: bool = True, skip: int = 0
    ) -> SequencePlan:
        first, size = len(self.tokens), LIMITS.page_tokens
        self.tokens += token_ids
        held = len(self.tokens) - self.first_in_pages
        used = self.pages[: -(-held // size)]
        slots = [used[i // size] * size + i % size for i in range(held)]
        self.slots = slots
        lens = [size] * (held // size) + ([held % size] if held % size else [])
        view = KvView(int32(used), int32(lens), self.blocks)
        new = int32(slots[held - len(token_ids) :])
        return SequencePlan(self.handle, tuple(token_ids), first, new, view, record, skip, sample)


@dataclass
class Bench:
    spy: LogitsSpy
    storage: KvStorage
    executor: TorchExecutor

    def run(self, *sequences: SequencePlan) -> torch.Tensor:
        self.executor.run(StepPlan(sequences))
        return self.spy.logits


NATIVE_DECODER, NATIVE = choose_forms(2)


@pytest.fixture(params=["torch", "native"])
def bench(request: pytest.FixtureRequest) -> Bench:
    spy = LogitsSpy(TORCH_DECODER_FORMS if request.param == "torch" else NATIVE_DECODER)
    storage = KvStorage(SPEC, LIMITS, 64, dict.fromkeys((*CODE_BITS, *MIXED), 200), ArenaPlace(poison=True))
    return Bench(
        spy, storage, TorchExecutor(spy, SPEC, LIMITS, storage, TORCH_FORMS if request.param == "torch" else NATIVE)
    )


def tokens_of(seed: int, number: int) -> list[int]:
    return torch.randint(0, 97, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def conversation(handle: int) -> Conversation:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(handle)).tolist()
    return Conversation(handle, [handle * 16 + i for i in order])


def dense_logits(bench: Bench, tokens: list[int]) -> torch.Tensor:
    logits = bench.spy.decoder.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), DenseStep(), torch.tensor([len(tokens) - 1])
    )
    assert logits is not None
    return logits[0]


GREEDY = SampleSpec()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunks", [(45,), (20, 25), (1, 7, 8, 9, 20), (44, 1)], ids=str)
def test_paged_equals_dense_however_chunked(bench: Bench, chunks: tuple[int, ...]) -> None:
    tokens, c, done = tokens_of(1, 48), conversation(0), 0
    for size in chunks:
        done += size
        logits = bench.run(c.plan(tokens[done - size : done], GREEDY if done == 45 else None))
    close(logits[0], dense_logits(bench, tokens[:45]))
    for i in range(45, 48):
        close(bench.run(c.plan([tokens[i]], GREEDY))[0], dense_logits(bench, tokens[: i + 1]))


def test_batched_equals_alone(bench: Bench) -> None:
    conversations = [conversation(i) for i in range(3)]
    tokens = [tokens_of(i, n) for i, n in enumerate((30, 9, 17))]
    logits = bench.run(
        conversations[0].plan(tokens[0][:12]),
        conversations[1].plan(tokens[1], GREEDY),
        conversations[2].plan(tokens[2], GREEDY),
    )
    close(logits[0], dense_logits(bench, tokens[1]))
    close(logits[1], dense_logits(bench, tokens[2]))
    logits = bench.run(conversations[0].plan(tokens[0][12:], GREEDY), conversations[2].plan([5], GREEDY))
    close(logits[0], dense_logits(bench, tokens[0]))
    close(logits[1], dense_logits(bench, [*tokens[2], 5]))


def test_sampled_tokens_come_back_by_handle(bench: Bench) -> None:
    a, b = conversation(1), conversation(2)
    spec = SampleSpec(want_logprob=True)
    result = bench.executor.run(StepPlan((a.plan(tokens_of(1, 10)), b.plan(tokens_of(2, 11), spec))))
    expected = dense_logits(bench, tokens_of(2, 11))
    assert [t.handle for t in result.tokens] == [2]
    assert result.tokens[0].token_id == int(expected.argmax())
    assert result.tokens[0].logprob == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-4)
    assert bench.executor.run(StepPlan(())).tokens == ()


def commit(bench: Bench, c: Conversation, num_staged: int, keep: int, rules: CommitRules) -> tuple[int, int, int]:
    """Commits the first `num_staged` page tokens; whatever else is in pages moves to fresh ones by the publish."""
    assert num_staged % LIMITS.page_tokens == 0
    line_plan = LinePlan(c.handle, int32(c.slots[:num_staged]), c.blocks, keep, rules)
    (line,) = bench.executor.draw_lines([line_plan])
    size = LIMITS.block_entries
    dissolve = int32([int(n < 0.75 * size) for n in line.alive])
    used = set(c.blocks.ids)
    free = iter([b for b in range(199, -1, -1) if b not in used and b % 3 == c.handle % 3])
    starts, ids, lens, new = int32([0]), int32(), int32(), int32()
    for row in range(ROWS):
        written = line.new_kept[row]
        for b in range(c.blocks.starts[row], c.blocks.starts[row + 1]):
            if dissolve[b]:
                written += line.alive[b]
            else:
                ids.append(c.blocks.ids[b])
                lens.append(c.blocks.lens[b])
                new.append(0)
        for first in range(0, written, size):
            ids.append(next(free))
            lens.append(min(size, written - first))
            new.append(1)
        starts.append(len(ids))
    table = BlockTable(next(VERSIONS), c.blocks.format, starts, ids, lens)
    result = bench.executor.publish(PublishPlan(line_plan, dissolve, table, new), line)
    gone = BlockTable(0, table.format, int32(), int32(b for b, d in zip(c.blocks.ids, dissolve, strict=True) if d),
                      int32())  # fmt: skip
    num_pages = num_staged // LIMITS.page_tokens
    bench.executor.release(int32(c.pages[:num_pages]), gone)
    c.pages = c.pages[num_pages:] + c.pages[:num_pages]
    c.blocks, c.first_in_pages = table, c.first_in_pages + num_staged
    return sum(line.new_kept) + sum(line.alive), result.absorbed, result.dropped


@pytest.mark.parametrize(("block_format", "tolerance"), [("fp32", 3e-3), ("bf16", 0.3), ("int8", 0.5)])
def test_commits_at_full_budget_leave_logits_unchanged(bench: Bench, block_format: str, tolerance: float) -> None:
    tokens, c = tokens_of(3, 70), conversation(0)
    c.blocks = empty_table(block_format)
    bench.run(c.plan(tokens[:40]))
    assert commit(bench, c, 24, 10**6, CommitRules()) == (24 * ROWS, 0, 0)
    bench.run(c.plan(tokens[40:60]))
    assert commit(bench, c, 32, 10**6, CommitRules()) == (56 * ROWS, 0, 0)
    close(bench.run(c.plan(tokens[60:69], GREEDY))[0], dense_logits(bench, tokens[:69]), tolerance)
    close(bench.run(c.plan(tokens[69:], GREEDY))[0], dense_logits(bench, tokens), tolerance)


def test_bits_of_keys_cost_less_than_they_bring(bench: Bench) -> None:
    """Everything kept, quantized: 8-bit keys over 4-bit values lie between int4 and int8, a quarter of them below."""
    tokens, close_to_dense = tokens_of(3, 70), []
    for handle, block_format in enumerate(("int4", "k84v4", "k8v4", "int8")):
        c = conversation(handle)
        c.blocks = empty_table(block_format)
        bench.run(c.plan(tokens[:64]))
        assert commit(bench, c, 56, 10**6, CommitRules()) == (56 * ROWS, 0, 0)
        logits = bench.run(c.plan(tokens[64:], GREEDY))[0]
        close_to_dense.append(torch.cosine_similarity(logits, dense_logits(bench, tokens), dim=0).item())
    assert close_to_dense == sorted(close_to_dense) and close_to_dense[2] > 0.98, close_to_dense


@pytest.mark.parametrize("block_format", ["int4", "k8v4", "k84v4"])
def test_lossy_commits_keep_running_and_respect_the_budget(bench: Bench, block_format: str) -> None:
    tokens, c = tokens_of(4, 120), conversation(0)
    c.blocks = empty_table(block_format)
    for turn in range(5):
        bench.run(c.plan(tokens[turn * 24 : turn * 24 + 23]))
        logits = bench.run(c.plan([tokens[turn * 24 + 23]], GREEDY))
        assert logits.isfinite().all()
        staged = (len(c.slots) - 8) // 8 * 8
        keep = int(0.4 * ROWS * (c.first_in_pages + staged))
        kept, absorbed, dropped = commit(bench, c, staged, keep, CommitRules(floor_entries=2, absorb_gate=0.35))
        assert kept == keep and absorbed + dropped >= 0
    close_enough = torch.nn.functional.cosine_similarity(logits[0], dense_logits(bench, tokens), dim=0)
    assert close_enough > 0.5


def test_formats_mix_in_one_batch(bench: Bench) -> None:
    conversations = [conversation(i) for i in range(3)]
    tokens = [tokens_of(10 + i, 40) for i in range(3)]
    conversations[0].blocks, conversations[2].blocks = empty_table("bf16"), empty_table("fp32")
    for c, t in zip(conversations, tokens, strict=True):
        bench.run(c.plan(t[:32]))
    for i in (0, 2):
        commit(bench, conversations[i], 16, 10**6, CommitRules())
    result = bench.executor.run(
        StepPlan(tuple(c.plan(t[32:], GREEDY) for c, t in zip(conversations, tokens, strict=True)))
    )
    by_handle = {t.handle: t.token_id for t in result.tokens}
    assert by_handle == {i: int(dense_logits(bench, tokens[i]).argmax()) for i in range(3)}


def probe_plan(c: Conversation, token_ids: list[int], first_scored: int, skip: int = 0) -> ProbePlan:
    scratch = Conversation(c.handle, list(c.pages), list(c.tokens), [], c.blocks, c.first_in_pages)
    plan = scratch.plan(token_ids)
    return ProbePlan(c.handle, plan.token_ids, plan.first_position, plan.slots, plan.view, first_scored, skip)


def scores_of(bench: Bench, c: Conversation) -> list[torch.Tensor]:
    pages, blocks = torch.tensor(c.slots) // 8, torch.tensor(list(c.blocks.ids), dtype=torch.int64)
    return [*(s[pages].clone() for s in bench.storage.seen), bench.storage.blocks("fp32").score[blocks].clone()]


def committed_conversation(bench: Bench) -> Conversation:
    c = conversation(0)
    bench.run(c.plan(tokens_of(6, 40)))
    commit(bench, c, 16, 10**6, CommitRules())
    bench.run(c.plan([3], GREEDY))
    return c


def test_probe_raises_scores_and_keeps_nothing(bench: Bench) -> None:
    c = committed_conversation(bench)
    before = scores_of(bench, c)
    blocks = bench.storage.blocks("fp32").raw.clone()
    assert bench.executor.probe(probe_plan(c, tokens_of(6, 20), 4), lambda: False)
    after = scores_of(bench, c)
    raised = []
    for old, new in zip(before, after, strict=True):
        old, new = old.nan_to_num(0), new.nan_to_num(0)
        assert bool((new >= old).all())
        raised.append(bool((new > old).any()))
    assert all(raised), "pages of every layer, and blocks"
    assert torch.equal(bench.storage.blocks("fp32").raw, blocks)
    expected = dense_logits(bench, [*tokens_of(6, 40), 3, 9])
    close(bench.run(c.plan([9], GREEDY))[0], expected, 3e-3)


@pytest.mark.parametrize("asked_before", [0, 1, 2, 4, 9])
def test_interrupted_probe_leaves_scores_as_they_were(bench: Bench, asked_before: int) -> None:
    c = committed_conversation(bench)
    before, asked = scores_of(bench, c), []

    def interrupted() -> bool:
        asked.append(1)
        return len(asked) > asked_before

    assert not bench.executor.probe(probe_plan(c, tokens_of(6, 20), 0), interrupted)
    assert len(asked) == asked_before + 1, "it stops there, between four products and one attention a layer"
    for old, new in zip(before, scores_of(bench, c), strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, atol=0, rtol=0)


def test_only_sampled_rows_of_a_chunk_record(bench: Bench) -> None:
    c = conversation(0)
    bench.run(c.plan(tokens_of(7, 30), record=False))
    assert all(bool((s[torch.tensor(c.slots) // 8, :, torch.tensor(c.slots) % 8] == 0).all())
               for s in bench.storage.seen)  # fmt: skip
    bench.run(c.plan(tokens_of(8, 80)))
    seen = bench.storage.seen[0][torch.tensor(c.slots) // 8, :, torch.tensor(c.slots) % 8]
    assert bool((seen[46:] > 0).all()), "each of the last 64 rows saw itself"
    assert bool((seen > 0).any(dim=1)[:30].any())


def test_the_newest_tokens_are_not_recorded(bench: Bench) -> None:
    c = conversation(0)
    other = conversation(1)
    bench.run(c.plan(tokens_of(7, 30), skip=10), other.plan(tokens_of(8, 30)))
    for held, num_raised in ((c, 20), (other, 30)):
        seen = bench.storage.seen[1][torch.tensor(held.slots) // 8, :, torch.tensor(held.slots) % 8]
        assert (seen > 0).all(dim=1).tolist() == [i < num_raised for i in range(30)]
    raised = bench.storage.seen[1].clone()
    assert bench.executor.probe(probe_plan(c, tokens_of(6, 20), 4, skip=10**6), lambda: False)
    torch.testing.assert_close(bench.storage.seen[1][torch.tensor(c.pages[:3])], raised[torch.tensor(c.pages[:3])])


def test_publish_needs_the_line_of_its_own_plan(bench: Bench) -> None:
    c = committed_conversation(bench)
    plan, other = (LinePlan(0, int32(c.slots[:8]), c.blocks, 10**6, CommitRules()) for _ in range(2))
    (line,) = bench.executor.draw_lines([other])
    with pytest.raises(AssertionError, match="line of another commit"):
        bench.executor.publish(PublishPlan(plan, int32(), c.blocks, int32()), line)


def test_moved_tokens_answer_from_their_new_slots(bench: Bench) -> None:
    tokens, c = tokens_of(9, 40), conversation(0)
    bench.run(c.plan(tokens[:30]))
    size, fresh = LIMITS.page_tokens, c.pages[10]
    plan = LinePlan(0, int32(), c.blocks, 0, CommitRules())
    (line,) = bench.executor.draw_lines([plan])
    to = int32(range(fresh * size, (fresh + 1) * size))
    bench.executor.publish(PublishPlan(plan, int32(), empty_table(), int32(), int32(c.slots[:size]), to), line)
    bench.executor.release(int32([c.pages[0]]), None)
    c.pages[0], c.pages[10] = c.pages[10], c.pages[0]
    close(bench.run(c.plan(tokens[30:], GREEDY))[0], dense_logits(bench, tokens))


def test_plan_arrays_are_not_changed(bench: Bench) -> None:
    c = conversation(0)
    plan = c.plan(tokens_of(1, 20), GREEDY)
    copies = [array("i", a) for a in (plan.slots, plan.view.page_ids, plan.view.page_lens, plan.view.blocks.starts)]
    bench.run(plan)
    bench.run(replace(c.plan([1], GREEDY)))
    now = [plan.slots, plan.view.page_ids, plan.view.page_lens, plan.view.blocks.starts]
    assert now == copies
