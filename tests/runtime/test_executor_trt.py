"""The TensorRT executor without TensorRT: everything on its side of the engine, proven on the CPU.

TensorRT needs a driver, so `TorchStepEngine` stands in for it behind the same call: it is given nothing but addresses
and sizes, reads the tables and arenas there as the interface declares them, and runs the step with torch forms. What
remains is TensorRT's own: loading a plan, running it, capturing graphs (`make gpu` on a card).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_executor_torch import SPEC, Conversation, LogitsSpy, close, commit, conversation, empty_table, tokens_of

from builder.lower_torch import TORCH_DECODER_FORMS
from plugins.append.cpu import append
from plugins.append.params import AppendParams
from plugins.attend.cpu import attend
from plugins.attend.params import AttendParams, AttendTables, StepTables
from plugins.layout import CODE_BITS, BlockLayout
from runtime.config import EngineLimits
from runtime.engine_interface import EngineInterface, StepLimits, make_interface
from runtime.errors import ConfigError, DeviceError, ManifestError, TableError
from runtime.executor_torch import TORCH_FORMS, TorchExecutor
from runtime.executor_trt import TrtExecutor, TrtParts, check_arenas
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.paged_executor import CommitForms
from runtime.step import CommitRules, ProbePlan, SampleSpec, StepPlan, int32
from runtime.step_tables import StepRows
from runtime.trt_engine import (
    StepBindings,
    TensorFacts,
    bound_shape,
    check_interface,
    check_sm,
    import_tensorrt,
)
from runtime.trt_tables import StepPacker

LIMITS = EngineLimits(dtype="fp32", kv_dtype="fp32", page_tokens=8, block_entries=16, max_batch_size=6, max_seq_len=256)
FORMAT = "int8"
STEP = StepLimits(max_step_tokens=64, block_format=FORMAT, max_tile_words=64)
INTERFACE = make_interface(SPEC, LIMITS, STEP)
TORCH_TYPES = {
    "int32": torch.int32, "bool": torch.bool, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip
GREEDY = SampleSpec()


def no_tiles(tables: StepTables) -> torch.Tensor:
    """One word a layer: the stand-in reads none."""
    return torch.zeros(tables.blocks.starts.shape[0], 1, dtype=torch.int32)


def at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The memory at an address as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(shape)


class TorchStepEngine:
    """`runtime.executor_trt.StepEngine` from addresses alone."""

    def __init__(self, spy: LogitsSpy, interface: EngineInterface) -> None:
        self.spy, self.interface = spy, interface
        self.calls: list[tuple[StepBindings, bool]] = []

    def run(self, bindings: StepBindings, replay: bool) -> torch.Tensor:
        self.calls.append((bindings, replay))
        names = {binding.name for binding in self.interface.inputs}
        assert set(bindings.addresses) == names
        self.inputs = {
            binding.name: at(bindings.addresses[binding.name], TORCH_TYPES[binding.dtype],
                             bound_shape(binding, bindings.sizes))
            for binding in self.interface.inputs
        }  # fmt: skip
        x = self.inputs
        logits = self.spy.forward(x["token_ids"], x["positions"], self, x["logit_rows"])
        assert logits.shape == (bindings.sizes["N"], SPEC.vocab_size)
        return logits

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Rows that pad have slot -1: rotated, stored nowhere."""
        x, real = self.inputs, self.inputs["slots"] >= 0
        pages, seen = x[f"pages_{layer}"], x[f"seen_{layer}"]
        out = q.clone()
        cos, sin = (table[real] for table in rotary)
        out[real] = append(AppendParams(q[real], k[real], v[real], cos, sin, x["slots"][real], pages, seen))
        return out

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        x, out = self.inputs, torch.zeros_like(q)
        row_tables = (x[name] for name in ("row_starts", "page_starts", "page_ids", "page_lens"))
        block_tables = (x[name][layer] for name in ("block_starts", "block_ids", "block_lens"))
        tables = AttendTables(*row_tables, *block_tables, x["record"].to(torch.uint8), x["record_skip"])
        layout = BlockLayout(FORMAT, LIMITS.block_entries, SPEC.head_dim)
        arenas = (x[f"pages_{layer}"], x[f"seen_{layer}"], x["blocks"].view(torch.uint8), x["score"], layout)
        attend(AttendParams(q, out, *arenas, tables, SPEC.head_dim**-0.5))
        return out


class Pair:
    """The same steps through the TensorRT executor and through the torch executor."""

    def __init__(self) -> None:
        self.spies = [LogitsSpy(TORCH_DECODER_FORMS) for _ in range(2)]
        self.storages = [make_storage() for _ in range(2)]
        self.engine = TorchStepEngine(self.spies[0], INTERFACE)
        parts = TrtParts(self.engine, INTERFACE, StepPacker(SPEC, INTERFACE, FORMAT, no_tiles), FORMAT)
        forms = CommitForms(TORCH_FORMS.draw_line, TORCH_FORMS.publish)
        self.trt = TrtExecutor(SPEC, LIMITS, self.storages[0], forms, parts)
        self.torch = TorchExecutor(self.spies[1], SPEC, LIMITS, self.storages[1])
        self.executor = self.torch  # what `commit` drives

    def run(self, *sequences: Any) -> None:
        results = [executor.run(StepPlan(sequences)) for executor in (self.trt, self.torch)]
        by_handle = [sorted((t.handle, t.token_id, t.logprob) for t in result.tokens) for result in results]
        assert [t[:2] for t in by_handle[0]] == [t[:2] for t in by_handle[1]]
        for a, b in zip(*by_handle, strict=True):
            assert a[2] == pytest.approx(b[2], abs=1e-4)

    def commit(self, c: Conversation, num_staged: int, keep: int) -> None:
        before = replace(c, pages=list(c.pages))
        self.executor = self.trt  # type: ignore[assignment]
        counts = commit(self, before, num_staged, keep, CommitRules(floor_entries=2))  # type: ignore[arg-type]
        self.executor = self.torch
        assert commit(self, c, num_staged, keep, CommitRules(floor_entries=2)) == counts  # type: ignore[arg-type]
        assert before.blocks.ids == c.blocks.ids
        before.blocks = c.blocks

    def scores_agree(self) -> None:
        for mine, other in zip(self.storages[0].seen, self.storages[1].seen, strict=True):
            close(mine.float().nan_to_num(-1), other.float().nan_to_num(-1), 2e-3)
        mine, other = (storage.blocks(FORMAT) for storage in self.storages)
        close(mine.score.float().nan_to_num(-1), other.score.float().nan_to_num(-1), 2e-3)
        assert torch.equal(mine.raw, other.raw)


def make_storage() -> KvStorage:
    return KvStorage(SPEC, LIMITS, 96, dict.fromkeys(CODE_BITS, 200), ArenaPlace(poison=True))


def new_conversation(handle: int) -> Conversation:
    c = conversation(handle)
    c.blocks = empty_table(FORMAT)
    return c


LOGPROB = SampleSpec(want_logprob=True)


def test_steps_commits_and_probes_are_those_of_the_torch_executor() -> None:
    pair, held = Pair(), [new_conversation(i) for i in range(3)]
    pair.run(held[0].plan(tokens_of(1, 40)), held[1].plan(tokens_of(2, 9), LOGPROB))
    pair.run(held[2].plan(tokens_of(3, 17), LOGPROB), held[1].plan([5], LOGPROB), held[0].plan([6], LOGPROB))
    pair.commit(held[0], 24, 30)
    for token in (7, 8, 9):
        pair.run(*(c.plan([token], LOGPROB) for c in held))
    probe = replace(held[0], pages=list(held[0].pages), tokens=list(held[0].tokens)).plan(tokens_of(4, 12))
    plan = ProbePlan(0, probe.token_ids, probe.first_position, probe.slots, probe.view, 4, 3)
    assert pair.trt.probe(plan, lambda: False) and pair.torch.probe(plan, lambda: False)
    close(pair.trt.logits(plan), pair.torch.logits(plan))
    pair.scores_agree()
    pair.commit(held[0], 8, 20)
    pair.run(*(c.plan([11], LOGPROB) for c in held))
    pair.scores_agree()


def test_decode_batches_take_few_shapes_and_keep_their_addresses() -> None:
    pair, held = Pair(), [new_conversation(i) for i in range(4)]
    for c in held:
        pair.run(c.plan(tokens_of(c.handle, 6 + c.handle)))
    pair.engine.calls.clear()
    for step in range(12):
        pair.run(*(c.plan([step], GREEDY) for c in held[: 3 + step % 2]))
    keys = {bindings.key for bindings, _ in pair.engine.calls}
    assert all(replay for _, replay in pair.engine.calls)
    assert {bindings.sizes["R"] for bindings, _ in pair.engine.calls} == {4}, "three rows run as a batch of four"
    pages = {bindings.sizes["P"] for bindings, _ in pair.engine.calls}
    assert len(keys) == len(pages) and pages < {2**i for i in range(6)}, "one graph for each power of two of pages"
    pair.run(held[0].plan(tokens_of(9, 5), GREEDY))
    assert not pair.engine.calls[-1][1], "a prefill is not captured"


def test_block_tables_go_down_after_commits_only() -> None:
    pair, c = Pair(), new_conversation(0)
    staging = pair.trt._block_staging
    pair.run(c.plan(tokens_of(1, 40)))
    pair.commit(c, 16, 10**6)
    copies = []
    for step in range(4):
        pair.run(c.plan([step], GREEDY))
        copies.append(staging.num_copies)
    assert copies == [2] * 4, "one for the empty table of the prefill, one after the commit"


def test_a_probe_gives_way_before_it_starts() -> None:
    pair, c = Pair(), new_conversation(0)
    pair.run(c.plan(tokens_of(1, 20)))
    calls = len(pair.engine.calls)
    probe = replace(c, pages=list(c.pages), tokens=list(c.tokens)).plan(tokens_of(4, 8))
    plan = ProbePlan(0, probe.token_ids, probe.first_position, probe.slots, probe.view, 0, 0)
    assert not pair.trt.probe(plan, lambda: True) and len(pair.engine.calls) == calls
    pair.torch.probe(plan, lambda: True)
    pair.scores_agree()


def test_steps_beyond_the_engine_are_refused_before_it_runs() -> None:
    pair, c = Pair(), new_conversation(0)
    with pytest.raises(ConfigError, match=r"token_ids needs 65 for R, expected 1 to 64.* tokens_per_step"):
        pair.trt.run(StepPlan((c.plan(tokens_of(1, 65)),)))
    held = [new_conversation(i) for i in range(4)]
    with pytest.raises(ConfigError, match="needs 7 for S, expected at most 6"):
        pair.trt.run(StepPlan(tuple(held[i % 4].plan([1]) for i in range(7))))
    wrong = new_conversation(1)
    pair.torch.run(StepPlan((wrong.plan(tokens_of(1, 30)),)))
    wrong.blocks = empty_table("int4")
    commit(pair, wrong, 16, 10**6, CommitRules())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got a conversation with int4 blocks, expected int8"):
        pair.trt.run(StepPlan((wrong.plan([1]),)))
    with pytest.raises(TableError, match="slots: got"):
        pair.trt.run(StepPlan((replace(c.plan([1]), slots=int32([96 * 8])),)))
    assert pair.engine.calls == []


def test_packed_tables_pad_as_the_interface_says() -> None:
    packer = StepPacker(SPEC, INTERFACE, FORMAT, no_tiles)
    c = new_conversation(0)
    c.tokens, c.slots = tokens_of(1, 20), []
    rows = [StepRows.of(c.plan([3])), StepRows.of(new_conversation(1).plan([4])), StepRows.of(c.plan([5]))]
    packed = packer.pack(rows, int32([0, 2]))
    step = packed.step
    assert packed.decodes and packed.num_logits == 2
    assert packed.sizes == {
        "R": 4,
        "N": 2,
        "S": 4,
        "S+1": 5,
        "S*G+1": 4 * SPEC.num_kv_heads + 1,
        "P": 8,
        "B": 1,
        "X": 1,
    }
    assert step["slots"].tolist()[-1] == -1 and step["record"].tolist() == [True, True, True, False]
    assert step["row_starts"].tolist() == [0, 1, 2, 3, 4]
    assert step["page_starts"].tolist() == [0, 3, 4, 7, 7]
    assert step["page_ids"].tolist()[-1] == -1 and step["page_lens"].tolist() == [8, 8, 5, 1, 8, 8, 6, 0]
    assert packed.blocks["block_ids"].tolist() == [[-1]] * SPEC.num_layers
    chunk = packer.pack([StepRows.of(new_conversation(2).plan(tokens_of(1, 5)))], int32())
    assert not chunk.decodes and chunk.sizes["R"] == 5 and chunk.sizes["N"] == 1 and chunk.num_logits == 0


def test_arenas_must_be_those_of_the_engine() -> None:
    pair = Pair()
    from runtime.executor_trt import arena_tensors

    arenas = arena_tensors(pair.storages[0], FORMAT)
    assert check_arenas(INTERFACE, arenas) == {"pages": 96, "blocks": 200}
    for name, wrong, message in (
        ("score", arenas["score"][:150], r"score: got an arena of \[150, 16\], expected \[200, 16\]"),
        ("blocks", arenas["blocks"][:, :-1].contiguous(), "blocks: got an arena of"),
        ("pages_1", arenas["pages_1"][:, :1].contiguous(), "pages_1: got an arena of"),
        ("seen_0", arenas["seen_0"][:0], "gives 0 pages|seen_0: got an arena"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_arenas(INTERFACE, {**arenas, name: wrong})
    flat = torch.empty(arenas["score"].numel() + 1, dtype=torch.float16)[1:]
    with pytest.raises(TableError, match="score: got address"):
        check_arenas(INTERFACE, {**arenas, "score": flat.view_as(arenas["score"])})


def facts_of(interface: EngineInterface) -> dict[str, TensorFacts]:
    """What an engine built as `interface` says would say about itself."""
    inputs = {
        b.name: TensorFacts(True, b.dtype, interface.network_shape(b), interface.profile(b), "")
        for b in interface.inputs
    }
    outputs = {
        b.name: TensorFacts(False, b.dtype, interface.network_shape(b), (), b.aliases or "") for b in interface.outputs
    }
    return {**inputs, **outputs}


def test_a_plan_of_another_interface_is_refused() -> None:
    facts = facts_of(INTERFACE)
    check_interface(INTERFACE, facts)
    other = facts_of(make_interface(SPEC, replace(LIMITS, max_batch_size=4), STEP))
    with pytest.raises(ManifestError, match="it was built for other limits"):
        check_interface(INTERFACE, other)
    with pytest.raises(ManifestError, match="pages_1_out shares memory with nothing in the plan, expected pages_1"):
        check_interface(INTERFACE, {**facts, "pages_1_out": replace(facts["pages_1_out"], aliases="")})
    with pytest.raises(ManifestError, match="score is fp32"):
        check_interface(INTERFACE, {**facts, "score": replace(facts["score"], dtype="fp32")})
    with pytest.raises(ManifestError, match="tensors seen_2, seen_2_out are in the plan or in the manifest"):
        check_interface(INTERFACE, {n: f for n, f in facts.items() if not n.startswith("seen_2")})


def test_another_card_is_refused() -> None:
    check_sm(90, 90, "NVIDIA H100")
    with pytest.raises(DeviceError, match=r"built for sm_90, got NVIDIA RTX 5090 \(sm_120\); build it with --sm 120"):
        check_sm(90, 120, "NVIDIA RTX 5090")


def test_missing_tensorrt_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(DeviceError, match=r"Python package tensorrt cannot be imported .* install TensorRT 11"):
        import_tensorrt()
