"""Geometries and the arithmetic that tests of commit.cu share."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace

import torch

from plugins import blocks as block_bytes
from plugins.commit import reference
from plugins.commit.cuda import CudaPublish
from plugins.commit.line import draw_line
from plugins.commit.params import Decision, LineParams, PublishParams
from plugins.commit.traffic import CommitTraffic
from plugins.emulation.runner import EmulatedRunner
from plugins.memory import KvMemory
from tests.plugins.commit_cases import CommitCase, CommitState, make_state, plan_publish

FP16, BF16 = torch.float16, torch.bfloat16
GEOMETRIES = (
    CommitCase("int4", format="int4", head_dim=64, page_tokens=8, block_entries=16, kv_dtype=FP16),
    CommitCase("k8v4", format="k8v4", head_dim=128, page_tokens=16, block_entries=64, kv_dtype=BF16),
    CommitCase("int8", format="int8", head_dim=128, page_tokens=8, block_entries=16, kv_dtype=FP16),
    CommitCase("bf16", format="bf16", head_dim=64, page_tokens=32, block_entries=16, kv_dtype=BF16),
    CommitCase("fp16", format="fp16", head_dim=128, page_tokens=16, block_entries=64, kv_dtype=FP16),
    CommitCase("int4_bf16", format="int4", head_dim=64, page_tokens=16, block_entries=64, kv_dtype=BF16),
)


@dataclass(frozen=True, eq=False)
class Commit:
    """One commit that is drawn and planned, and what the reference makes of it."""

    state: CommitState
    params: PublishParams
    decision: Decision
    outcome: reference.PublishOutcome
    expected: KvMemory


def stored_entries(state: CommitState) -> int:
    return int(state.table.lens.sum()) + state.staged.shape[0] * state.memory.num_rows


def draw(case: CommitCase, share: float, gate: float | None, *, seed: int = 0, floor: int = 3,
         dissolve_under: float = 0.6) -> Commit:  # fmt: skip
    """A commit that keeps `share` of everything."""
    state = make_state(case, seed)
    keep = int(share * stored_entries(state))
    decision = draw_line(state.memory, LineParams(state.staged, state.table, keep, floor))
    return plan(state, decision, gate, dissolve_under)


def plan(state: CommitState, decision: Decision, gate: float | None, dissolve_under: float) -> Commit:
    params = plan_publish(state, decision, gate, dissolve_under)
    outcome = reference.publish(state.memory, params, decision)
    return Commit(state, params, decision, outcome, expected_memory(state, params, outcome))


def run(commit: Commit, publish: CudaPublish) -> tuple[tuple[int, int], KvMemory]:
    """Counts, and a copy of the memory that was published into."""
    memory = copy.deepcopy(commit.state.memory)
    return publish(memory, commit.params, commit.decision), memory


def expected_memory(state: CommitState, params: PublishParams, outcome: reference.PublishOutcome) -> KvMemory:
    """Block and score arenas as the reference's outcome says, quantized the one way there is."""
    memory, layout = copy.deepcopy(state.memory), state.memory.layout
    size = layout.block_entries
    for row, entries in enumerate(outcome.written):
        new = [b for b in range(params.new.starts[row], params.new.starts[row + 1]) if params.is_new[b]]
        for b, first in zip(new, range(0, len(entries), size), strict=True):
            part = entries[first : first + size]
            keys, values = torch.zeros(2, 1, size, layout.head_dim)
            bias, score = torch.zeros(2, 1, size)
            for i, entry in enumerate(part):
                keys[0, i], values[0, i], bias[0, i], score[0, i] = entry.key, entry.value, entry.bias, entry.score
            raw = block_bytes.encode(keys, values, bias, torch.tensor([len(part)]), layout)
            memory.blocks[params.new.ids[b]], memory.score[params.new.ids[b]] = raw[0], score[0].half()
    for (block, offset), entry in outcome.rewritten.items():
        where = (torch.tensor([block]), torch.tensor([offset]))
        block_bytes.write_values(memory.blocks, where, entry.value[None].float(), layout)
        block_bytes.write_bias(memory.blocks, where, torch.tensor([entry.bias]), layout)
    return memory


def check(commit: Commit, counts: tuple[int, int], memory: KvMemory) -> None:
    """Counts and blocks against the reference. Keys, scores and whatever is no merged value must be the same bits."""
    params, layout, expected = commit.params, memory.layout, commit.expected
    assert counts == (commit.outcome.absorbed, commit.outcome.dropped)
    touched = torch.zeros(memory.blocks.shape[0], dtype=torch.bool)
    touched[params.new.ids] = True
    assert torch.equal(memory.blocks[~touched], commit.state.memory.blocks[~touched])
    was = commit.state.memory.score[~touched]
    assert torch.equal(memory.score[~touched].view(torch.int16), was.view(torch.int16))
    raw, want = memory.blocks[params.new.ids], expected.blocks[params.new.ids]
    filled = torch.arange(layout.block_entries) < params.new.lens[:, None]
    assert torch.equal(block_bytes.read_keys(raw, layout)[filled], block_bytes.read_keys(want, layout)[filled])
    got_score, want_score = memory.score[params.new.ids], expected.score[params.new.ids]
    assert torch.equal(got_score[filled], want_score[filled])
    written = params.is_new
    assert not bool(got_score[written][~filled[written]].any()), "scores of unfilled entries are zero"
    # fp32 sums in another order: a value near a rounding tie moves by one code, a bias by one step of fp16.
    got, true = block_bytes.read_values(raw, layout)[filled], block_bytes.read_values(want, layout)[filled]
    step = {4: 0.5, 8: 0.04, 16: 0.04}[layout.v_bits]
    torch.testing.assert_close(got, true, atol=step, rtol=0)
    got_bias, want_bias = block_bytes.read_bias(raw, layout)[filled], block_bytes.read_bias(want, layout)[filled]
    torch.testing.assert_close(got_bias, want_bias, atol=2e-3, rtol=1e-3)
    assert raw.numel() == 0 or float((raw == want).float().mean()) > 0.99


def traffic(commit: Commit) -> CommitTraffic:
    """What the commit handles, counted entry by entry with the reference's search."""
    memory, params = commit.state.memory, commit.params
    counts: Counter[str] = Counter(new_blocks=int(params.is_new.sum()))
    for row in range(memory.num_rows):
        moving, staying = reference._row_entries(memory, params, commit.decision, row)
        old = range(params.old.starts[row], params.old.starts[row + 1])
        num_coded = sum(int(params.old.lens[b]) for b in old if params.dissolve[b])
        candidates = [e for e in [e for e in moving if e.kept] + staying if e.kept and e.score != float("inf")]
        merged = set()
        counts["dissolved_blocks"] += sum(bool(params.dissolve[b]) for b in old)
        for i, entry in enumerate(moving):
            kind = "coded" if i < num_coded else "tokens"
            if entry.kept:
                counts[f"kept_{kind}"] += 1
            elif params.absorb_gate is not None:
                counts[f"compared_{kind}"] += 1
                target = reference._nearest(entry, candidates, params.absorb_gate)
                counts[f"absorbed_{kind}"] += target is not None
                if target is not None and candidates[target].place is not None:
                    merged.add(candidates[target].place)
        counts["merged_old"] += len(merged)
        if params.absorb_gate is not None and any(not e.kept for e in moving):
            searched = [b for b in old if not params.dissolve[b] and bool(commit.decision.alive[b].any())]
            counts["searched_blocks"] += len(searched)
            counts["searched_keys"] += sum(int(params.old.lens[b]) for b in searched)
    return CommitTraffic(**{"kept_tokens": 0, **counts})


def emulated(seed: int = 0, shared_bytes: int | None = None) -> tuple[CudaPublish, EmulatedRunner]:
    runner = EmulatedRunner(seed)
    publish = CudaPublish(runner)
    return (publish if shared_bytes is None else replace(publish, shared_bytes=shared_bytes)), runner


def sanitized(runner: EmulatedRunner) -> None:
    """Run by tests in a process with AddressSanitizer: one quantized and one stored format, several seeds."""
    for case in (replace(GEOMETRIES[0], entries=90), replace(GEOMETRIES[4], entries=150)):
        for seed, gate in ((0, 0.6), (1, None), (2, 2.0)):
            commit = draw(replace(case, staged=40 + seed, protected=0.1), 0.4, gate, seed=seed, dissolve_under=0.9)
            check(commit, *run(commit, CudaPublish(runner, 99 << 10)))
