"""The torch engine with our kernels, without a GPU: the kernels' own source runs emulated, everything else is the code
that runs on a card. Answers of whole conversations, with commits and probes, are those of the torch forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_engine import CONFIG, POLICIES, SPEC, Model, make_engine, make_limits, talk
from simulated_engine import drain, text_of

from plugins.attend.params import LayerBlocks
from plugins.emulation.runner import EmulatedRunner
from plugins.kv_launch import ResidentBlocks
from plugins.native_build import find_compiler
from runtime import maintenance
from runtime.config import EngineLimits, ModelSpec, RuntimeConfig
from runtime.errors import ConfigError, DeviceError, ManifestError
from runtime.executor_torch import TorchExecutor
from runtime.gpu import GpuKernels, arena_bytes, check_kernels, gpu_executor
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.policy import registry
from runtime.request import Request, SamplingParams
from runtime.wiring import load_engine

POISON = ArenaPlace(poison=True)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def small_policies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in POLICIES.items():
            patch.setitem(registry.ALL_POLICIES, name, policy)
        yield


def on_torch(model: Model) -> TorchExecutor:
    return TorchExecutor(model.decoder, SPEC, model.limits, model.storage)


def on_kernels(model: Model) -> TorchExecutor:
    kernels = GpuKernels(EmulatedRunner(seed=11), "sm_90a")
    return gpu_executor(model.decoder, SPEC, model.limits, model.storage, kernels)


@needs_compiler
def test_conversations_on_kernels_answer_as_on_torch() -> None:
    """Conversations at once, whose blocks have different formats, so that steps run in two groups."""
    plain, _ = make_engine(on_torch, "fp16", POISON)
    expected = talk(plain, tuple(POLICIES))
    engine, manager = make_engine(on_kernels, "fp16", POISON)
    assert talk(engine, tuple(POLICIES)) == expected
    mine, theirs = engine.stats(), plain.stats()
    for name in ("commits", "probes", "dropped", "absorbed", "total_kv_bytes"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.commits > 2 and mine.probes > 2 and mine.dropped > 0, "the conversation must exercise commits"
    manager.check_invariants()


@needs_compiler
def test_turns_that_end_together_are_drawn_at_once_and_answer_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines of a batch come with one upload; what is written of each stays its own."""
    unread = replace(POLICIES["tiny-k8v4"], name="tiny-seen", score="seen")
    monkeypatch.setitem(registry.ALL_POLICIES, unread.name, unread)
    names, found = ("a", "b", "c"), []
    for most in (1, 3):
        monkeypatch.setattr(maintenance, "MOST_COMMITS", most)
        engine, manager = make_engine(on_kernels, "fp16", POISON)
        executor, batches, said = engine._executor, [], []
        drawing, staging = executor.drawing, executor._staging  # type: ignore[attr-defined]

        def watched(plans, drawing=drawing, staging=staging, batches=batches):  # type: ignore[no-untyped-def]
            before = staging.num_copies
            job = drawing(plans)
            batches.append((len(plans), staging.num_copies - before))
            return job

        monkeypatch.setattr(executor, "drawing", watched)
        for turn in range(3):
            for name in names:
                text = f"{name} {turn} and some more."
                engine.submit(Request(f"{name}{turn}", text, SamplingParams(14), name, policy=unread.name))
            events = drain(engine)
            said += [text_of(events, f"{name}{turn}") for name in names]
        manager.check_invariants()
        assert (most, 1) in batches and all(batch[1] == 1 for batch in batches)
        found.append((said, engine.stats().commits, engine.stats().dropped, engine.stats().total_kv_bytes))
    assert found[0] == found[1] and found[0][1] >= len(names) and found[0][2] > 0


@needs_compiler
def test_a_step_needs_one_upload() -> None:
    copies: list[int] = []

    class Counting(TorchExecutor):
        def run(self, plan):  # type: ignore[no-untyped-def]
            assert self._staging is not None
            before = self._staging.num_copies
            result = super().run(plan)
            copies.append(self._staging.num_copies - before)
            return result

    def counted(model: Model) -> TorchExecutor:
        executor = on_kernels(model)
        return Counting(model.decoder, SPEC, model.limits, model.storage, executor._forms, executor._staging)

    engine, _ = make_engine(counted, "fp16", POISON)
    talk(engine, ("tiny-k8v4",), max_tokens=3)
    assert len(copies) > 5 and max(copies) == 1


BF16 = make_limits("bf16")


@pytest.mark.parametrize(
    ("spec", "limits", "message"),
    [
        (SPEC, make_limits("fp32"), "both in fp16 or both in bf16, got fp32 and fp32"),
        (SPEC, replace(BF16, dtype="fp16"), "got fp16 and bf16"),
        (replace(SPEC, head_dim=80), BF16, "no kernel fits this engine: head_dim"),
        (replace(SPEC, num_q_heads=34), BF16, "query heads per KV head: got 17, expected 1 to 16"),
    ],
)
def test_what_no_kernel_covers_is_refused(spec: ModelSpec, limits: EngineLimits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kernels(spec, limits, POLICIES["tiny-k8v4"])
    check_kernels(SPEC, BF16, POLICIES["tiny-k8v4"])


def test_arenas_are_counted_before_they_are_taken() -> None:
    manager = KvManager(SPEC, BF16, 64 << 20)
    storage = KvStorage(SPEC, BF16, manager.num_pages, manager.num_blocks)
    pages = sum(t.numel() * t.element_size() for t in (*storage.pages, *storage.seen))
    blocks = sum(t.numel() * t.element_size() for t in (storage.blocks("k8v4").raw, storage.blocks("k8v4").score))
    assert arena_bytes(manager, BF16, POLICIES["tiny-k8v4"]) == pages + blocks
    assert arena_bytes(manager, BF16, registry.get_policy("full")) == pages


def edited(engine_dir: Path, copy: Path, part: str | None, **changes: object) -> Path:
    engine = shutil.copytree(engine_dir, copy)
    data = json.loads((engine / "manifest.json").read_text(encoding="utf-8"))
    (data if part is None else data[part]).update(changes)
    (engine / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    return engine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_engine_says_what_is_missing(tiny_engine_dir: Path, tmp_path: Path) -> None:
    cuda = replace(CONFIG, device="cuda")
    with pytest.raises(ConfigError, match="got fp32 and fp32; build the engine with --dtype fp16 or bf16"):
        load_engine(tiny_engine_dir, cuda)
    half = edited(tiny_engine_dir, tmp_path / "half", "limits", dtype="fp16", kv_dtype="fp16")
    data = json.loads((half / "manifest.json").read_text(encoding="utf-8"))
    data["model"]["head_dim"] = 64
    (half / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DeviceError, match=r"device: got cuda, but .*use device cpu"):
        load_engine(half, cuda)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="device: got 'tpu', expected one of cpu, cuda"):
        RuntimeConfig(device="tpu")


def test_an_engine_for_tensorrt_needs_the_gpu(tiny_engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="was built for trt, expected cpu"):
        load_engine(edited(tiny_engine_dir, tmp_path / "trt", None, target="trt"), CONFIG)


@needs_compiler
def test_block_lists_stay_on_the_device_until_a_commit() -> None:
    """Every commit makes new lists; steps between two commits find theirs."""
    copies: list[LayerBlocks] = []

    class Noting(ResidentBlocks):
        def of(self, blocks: LayerBlocks) -> LayerBlocks:
            resident = super().of(blocks)
            if not any(resident is seen for seen in copies):
                copies.append(resident)
            return resident

    def noted(model: Model) -> TorchExecutor:
        executor = on_kernels(model)
        attend = executor._forms.attend
        attend._resident = Noting(model.storage.device)  # type: ignore[attr-defined]
        return executor

    engine, _ = make_engine(noted, "fp16", POISON)
    talk(engine, ("tiny-k8v4",), max_tokens=6)
    stats = engine.stats()
    assert 1 <= len(copies) <= stats.commits + 1 < stats.steps
