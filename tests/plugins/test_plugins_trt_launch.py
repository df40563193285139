"""Launches of the TensorRT plugins, called as TensorRT calls them: emulated kernels against float64 references."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from plugins.append import reference as append_reference
from plugins.append.params import AppendParams
from plugins.attend import reference as attend_reference
from plugins.attend.params import RECORD_SQUARES, AttendParams, LayerBlocks, StepTables
from plugins.attend.plugin import AttendFields
from plugins.attend.tile_words import pack_score, pack_step
from plugins.emulation.runner import EmulatedRunner
from plugins.errors import PluginError, UnsupportedSmError
from plugins.kernel import Kernel, KernelRunner
from plugins.trt_operations import Plugins, make_creators
from tests.plugins.attend_cases import AttendCase, make_attend_case
from tests.plugins.commit_cases import CommitCase
from tests.plugins.commit_cuda_cases import check, draw
from tests.plugins.plugin_driver import BASE, CUBIN, NUM_LAYERS, describe, fields_of, loaded, run


def append_case(rows: int) -> tuple[AppendParams, dict[str, torch.Tensor]]:
    gen = torch.Generator().manual_seed(rows)
    page_tokens, dim, pages = BASE.page_tokens, BASE.head_dim, 5
    heads = (BASE.q_heads, BASE.kv_heads, BASE.kv_heads)
    q, k, v = (torch.randn(rows, count, dim, generator=gen).half() for count in heads)
    angle = torch.rand(rows, dim // 2, generator=gen) * 50
    slots = torch.randperm(pages * page_tokens, generator=gen)[:rows].int()
    slots[1::4] = -1
    inputs = {
        "q": q, "k": k, "v": v, "cos": angle.cos(), "sin": angle.sin(), "slots": slots,
        "pages": torch.full((pages, BASE.kv_heads, 2, page_tokens, dim), torch.nan, dtype=torch.float16),
        "seen": torch.full((pages, BASE.kv_heads, page_tokens), 0.5, dtype=torch.float16),
    }  # fmt: skip
    stored = slots >= 0
    exact = AppendParams(
        *(inputs[name].double()[stored] for name in ("q", "k", "v", "cos", "sin")), slots[stored].long(),
        inputs["pages"].double(), inputs["seen"].clone(),
    )  # fmt: skip
    return exact, inputs


def test_append_equals_the_reference_in_emulation(plugins: Plugins) -> None:
    exact, inputs = append_case(rows=9)
    expected_q = append_reference.append(exact)
    out = run(plugins, loaded(plugins, "append", fields_of("append")), inputs)["q_out"]
    torch.testing.assert_close(out[inputs["slots"] >= 0].double(), expected_q, atol=2e-6, rtol=2.0**-10)
    torch.testing.assert_close(inputs["pages"].double(), exact.pages, atol=2e-6, rtol=2.0**-10, equal_nan=True)
    assert torch.equal(inputs["seen"], exact.seen)


STEPS = {
    "decode": {"rows": (1, 1, 1), "tokens": (5, 33, 1)},
    "chunks": {"rows": (30, 1, 6), "tokens": (40, 12, 6), "record": "some"},
    "rows_as_many_as_a_tile": {"rows": (5, 2), "tokens": (40, 12), "record_skip": 3},
    "squares_of_a_row": {"rows": (1, 1), "tokens": (33, 9), "marks": (RECORD_SQUARES, 1)},
    "squares": {"rows": (30, 1, 6), "tokens": (40, 12, 6), "record_skip": 3, "marks": (RECORD_SQUARES,)},
}


def step_case(name: str) -> AttendParams:
    shape: dict[str, Any] = {"kv_heads": BASE.kv_heads, "group_size": 3, "head_dim": 64, "dtype": "fp16", **STEPS[name]}
    return make_attend_case(AttendCase(name, **shape, kv_dtype="fp16"))


def step_tables(params: AttendParams) -> tuple[StepTables, dict[str, torch.Tensor]]:
    """Tables of NUM_LAYERS layers: layer 1 has the case's blocks, the others none; and those tables as inputs."""
    t = params.tables
    num_blocks = max(1, t.block_ids.shape[0])
    starts = torch.zeros((NUM_LAYERS, t.block_starts.shape[0]), dtype=torch.int32)
    starts[1] = t.block_starts
    ids, lens = (torch.full((NUM_LAYERS, num_blocks), -1, dtype=torch.int32) for _ in range(2))
    ids[1, : t.block_ids.shape[0]], lens[1, : t.block_lens.shape[0]] = t.block_ids, t.block_lens
    blocks = LayerBlocks(starts, t.block_ids, t.block_lens, (0, 0, t.block_ids.shape[0]))
    tables = StepTables(t.row_starts, t.page_starts, t.page_ids, t.page_lens, t.record, t.record_skip, blocks)
    return tables, {
        "row_starts": t.row_starts, "page_starts": t.page_starts, "page_ids": t.page_ids, "page_lens": t.page_lens,
        "record": t.record.bool(), "record_skip": t.record_skip, "block_starts": starts, "block_ids": ids,
        "block_lens": lens,
    }  # fmt: skip


def arenas_of(params: AttendParams) -> dict[str, torch.Tensor]:
    return {"pages": params.pages, "seen": params.seen.clone(), "blocks": params.blocks.view(torch.int32),
            "score": params.score.clone()}  # fmt: skip


def padded(words: torch.Tensor) -> torch.Tensor:
    """As the executor rounds sizes up, with words that are no tile."""
    return torch.cat([words, torch.full((words.shape[0], 8), -7, dtype=torch.int32)], dim=1)


def check_raised(arenas: dict[str, torch.Tensor], seen: torch.Tensor, score: torch.Tensor) -> None:
    for name, want in (("seen", seen), ("score", score)):
        torch.testing.assert_close(arenas[name].double(), want, atol=2e-3, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("name", STEPS)
def test_attend_equals_the_reference_in_emulation(plugins: Plugins, name: str) -> None:
    params = step_case(name)
    out, seen, score = attend_reference.attend(params)
    plugin = loaded(plugins, "attend", fields_of("attend"))
    tables, inputs = step_tables(params)
    assert isinstance(plugin.fields, AttendFields)
    tiles = pack_step(tables, plugin.fields.kernels, BASE.kv_heads, EmulatedRunner().num_multiprocessors)
    arenas = arenas_of(params)
    got = run(plugins, plugin, {"q": params.q, **inputs, "tiles": padded(tiles), **arenas})["out"]
    torch.testing.assert_close(got.double(), out, atol=2e-3, rtol=1e-2)
    check_raised(arenas, seen, score)


def log_sum_exp(params: AttendParams) -> torch.Tensor:
    """[rows, q_heads] fp32: from a probe token whose weight the reference reports."""
    heads = params.q.shape[1]
    lse = torch.empty(params.q.shape[0], heads)
    row_starts, group = params.tables.row_starts.tolist(), heads // params.pages.shape[1]
    for s in range(len(row_starts) - 1):
        for g in range(params.pages.shape[1]):
            pages = attend_reference._page_tokens(params, s, g)
            entries = attend_reference._block_entries(params, s, g)
            for row in range(row_starts[s], row_starts[s + 1]):
                visible = pages[: max(0, len(pages) - (row_starts[s + 1] - 1 - row))] + entries
                for h in range(g * group, (g + 1) * group):
                    q = params.q[row, h].double()
                    logits = [float(key @ q) * params.scale + bias for key, _, bias, _ in visible]
                    top = max(logits, default=-math.inf)
                    lse[row, h] = top + math.log(sum(math.exp(x - top) for x in logits)) if logits else -math.inf
    return lse


@pytest.mark.parametrize("name", ["chunks", "squares"])
def test_score_equals_the_reference_in_emulation(plugins: Plugins, name: str) -> None:
    params = step_case(name)
    _, seen, score = attend_reference.attend(params)
    plugin: Any = loaded(plugins, "score", fields_of("score"))
    tables, inputs = step_tables(params)
    tiles = pack_score(tables, plugin.fields.kernel, BASE.kv_heads, EmulatedRunner().num_multiprocessors)
    arenas = arenas_of(params)
    run(plugins, plugin, {"q": params.q, "lse": log_sum_exp(params), **inputs, "tiles": padded(tiles), **arenas})
    check_raised(arenas, seen, score)


def test_commit_equals_the_reference_in_emulation(plugins: Plugins) -> None:
    case = CommitCase("int4", format="int4", head_dim=64, page_tokens=8, block_entries=16, kv_dtype=torch.float16)
    commit = draw(case, share=0.4, gate=0.35, seed=4)
    memory, params, decision = commit.state.memory, commit.params, commit.decision
    plugin = loaded(plugins, "commit", fields_of("commit"))
    blocks, score = memory.blocks.clone(), memory.score.clone()
    addresses = torch.tensor(memory.addresses, dtype=torch.int64).T.contiguous()
    counts = torch.zeros(2, dtype=torch.int32)
    inputs = {
        "layer_pages": addresses[0], "layer_seen": addresses[1], "pages": memory.pages[0],
        "staged": params.staged, "dissolve": params.dissolve, "alive": decision.alive, "is_new": params.is_new,
        "marks": decision.staged_keep, "staged_score": decision.staged_score,
        "old_starts": torch.tensor(params.old.starts), "old_ids": params.old.ids, "old_lens": params.old.lens,
        "new_starts": torch.tensor(params.new.starts), "new_ids": params.new.ids, "new_lens": params.new.lens,
        "move_from": params.move_from, "move_to": params.move_to,
        "blocks": blocks.view(torch.int32), "score": score, "counts": counts,
    }  # fmt: skip
    for name, tensor in inputs.items():
        wide = tensor.dtype == torch.int64 and not name.startswith("layer_")
        inputs[name] = (tensor.int() if wide else tensor).contiguous()
    run(plugins, plugin, inputs)
    absorbed, dropped = counts.tolist()
    check(commit, (absorbed, dropped), replace(memory, blocks=blocks, score=score))


def test_nothing_is_launched_while_an_engine_is_built(plugins: Plugins) -> None:
    _, inputs = append_case(rows=3)
    plugin: Any = plugins.creators["append"].make(fields_of("append"))
    before = inputs["pages"].clone()
    run(plugins, plugin.attach_to_context(None), inputs)
    assert torch.equal(inputs["pages"].view(torch.int16), before.view(torch.int16))


def test_launches_that_must_not_be_are_refused(plugins: Plugins) -> None:
    _, inputs = append_case(rows=3)
    plugin: Any = loaded(plugins, "append", fields_of("append"))
    descs = describe(plugins, plugin, {name: tuple(x.shape) for name, x in inputs.items()})
    plugin.on_shape_change(descs, [])
    addresses = [inputs[tensor.name].data_ptr() for tensor in plugin.spec.inputs]
    out = torch.empty_like(inputs["q"])
    targets = [out.data_ptr(), inputs["pages"].data_ptr(), inputs["seen"].data_ptr()]
    with pytest.raises(PluginError, match=r"pages_out: .*edited in place"):
        plugin.enqueue(descs, [], addresses, [targets[0], targets[1] + 4096, targets[2]], 0, 0)
    with pytest.raises(PluginError, match="multiple of 16"):
        plugin.enqueue(descs, [], [addresses[0] + 2, *addresses[1:]], targets, 0, 0)
    stored = plugin.get_fields_to_serialize()
    unattached: Any = plugins.creators["append"].create_plugin("x", stored, plugins.setup.trt.TensorRTPhase.RUNTIME)
    with pytest.raises(PluginError, match="not attached"):
        unattached.enqueue(descs, [], addresses, targets, 0, 0)


def test_tile_lists_that_are_too_short_are_refused(plugins: Plugins) -> None:
    params = step_case("chunks")
    tables, inputs = step_tables(params)
    plugin: Any = loaded(plugins, "attend", fields_of("attend"))
    tiles = pack_step(tables, plugin.fields.kernels, BASE.kv_heads, EmulatedRunner().num_multiprocessors)
    short = tiles[:, :-8].contiguous()
    with pytest.raises(PluginError, match=r"tiles: got .* words a layer"):
        run(plugins, plugin, {"q": params.q, **inputs, "tiles": short, **arenas_of(params)})


def test_a_wrong_device_is_refused_when_an_engine_is_loaded(trt: Any) -> None:
    """The plugin hands its SM and cubins to what knows the device, which refuses."""

    def refuse(sm: str, cubins: Mapping[Kernel, bytes]) -> KernelRunner:
        assert sm == "sm_90a" and {cubin[: len(CUBIN)] for cubin in cubins.values()} == {CUBIN} and len(cubins) == 3
        raise UnsupportedSmError(f"got sm_80, expected {sm}")

    with pytest.raises(UnsupportedSmError, match="sm_80"):
        loaded(make_creators(trt, refuse), "attend", fields_of("attend"))
