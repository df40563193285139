"""The torch engine with our kernels, without a GPU: the kernels' own source runs emulated, everything else is the code
that runs on a card. Answers of whole conversations, with commits and probes, are those of the torch forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_engine import CONFIG, POLICIES, build_kernel_engine, engine_with, make_storage, talk

from builder.lower_torch import load_decoder
from plugins.emulation.runner import EmulatedRunner
from runtime import manifest as manifests
from runtime.config import EngineLimits, ModelSpec, RopeSpec, RuntimeConfig
from runtime.engine import EngineParts
from runtime.errors import ConfigError, DeviceError, ManifestError
from runtime.executor_torch import TorchExecutor
from runtime.gpu import GpuKernels, arena_bytes, check_kernels, gpu_executor
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.policy import registry
from runtime.wiring import load_engine, load_parts

POISON = ArenaPlace(poison=True)


@pytest.fixture(scope="module", autouse=True)
def small_policies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in POLICIES.items():
            patch.setitem(registry.ALL_POLICIES, name, policy)
        yield


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel_engine(tmp_path_factory.mktemp("kernels"), "fp16", "tiny-k8v4")


def load(engine_dir: Path) -> tuple[EngineParts, KvStorage, torch.nn.Module]:
    """The engine's parts, fresh poisoned storage, and the decoder with torch's forms."""
    parts = load_parts(engine_dir, CONFIG)
    decoder = load_decoder(engine_dir / manifests.WEIGHTS_FILE, parts.spec, parts.limits.dtype)
    return parts, make_storage(parts, POISON), decoder  # type: ignore[return-value]


def test_conversations_on_kernels_answer_as_on_torch(engine_dir: Path) -> None:
    parts, storage, decoder = load(engine_dir)
    plain = engine_with(parts, TorchExecutor(decoder, parts.spec, parts.limits, storage))  # type: ignore[arg-type]
    expected = talk(plain, tuple(POLICIES))
    parts, storage, decoder = load(engine_dir)
    kernels = GpuKernels(EmulatedRunner(seed=11), "sm_90a")
    executor = gpu_executor(decoder, parts.spec, parts.limits, storage, kernels)  # type: ignore[arg-type]
    engine = engine_with(parts, executor)
    assert talk(engine, tuple(POLICIES)) == expected
    mine, theirs = engine.stats(), plain.stats()
    assert (mine.commits, mine.probes, mine.dropped, mine.absorbed) == (
        theirs.commits, theirs.probes, theirs.dropped, theirs.absorbed
    )  # fmt: skip
    assert mine.commits > 2 and mine.probes > 2 and mine.dropped > 0, "the conversation must exercise commits"
    assert mine.total_kv_bytes == theirs.total_kv_bytes
    parts.manager.check_invariants()


def test_a_step_needs_one_upload(engine_dir: Path) -> None:
    parts, storage, decoder = load(engine_dir)
    executor = gpu_executor(
        decoder,
        parts.spec,
        parts.limits,
        storage,
        GpuKernels(EmulatedRunner(), "sm_90a"),  # type: ignore[arg-type]
    )
    staging = executor._staging
    assert staging is not None
    copies: list[int] = []
    run = executor.run

    def counted(plan):  # type: ignore[no-untyped-def]
        before = staging.num_copies
        result = run(plan)
        copies.append(staging.num_copies - before)
        return result

    executor.run = counted  # type: ignore[method-assign]
    talk(engine_with(parts, executor), ("tiny-k8v4",), max_tokens=3)
    assert copies and max(copies) == 1


SPEC = ModelSpec("llama", 2, 64, 128, 6, 3, 64, 100, 1e-5, RopeSpec(10000.0), 1024, True)
LIMITS = EngineLimits(dtype="bf16", kv_dtype="bf16")


@pytest.mark.parametrize(
    ("spec", "limits", "message"),
    [
        (SPEC, replace(LIMITS, dtype="fp32", kv_dtype="fp32"), "both in fp16 or both in bf16, got fp32 and fp32"),
        (SPEC, replace(LIMITS, dtype="fp16"), "got fp16 and bf16"),
        (replace(SPEC, head_dim=80), LIMITS, "no kernel fits this engine: head_dim"),
        (replace(SPEC, num_q_heads=51), LIMITS, "query heads per KV head: got 17, expected 1 to 16"),
    ],
)
def test_what_no_kernel_covers_is_refused(spec: ModelSpec, limits: EngineLimits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kernels(spec, limits, POLICIES["tiny-k8v4"])
    check_kernels(SPEC, LIMITS, POLICIES["tiny-k8v4"])


def test_arenas_are_counted_before_they_are_taken() -> None:
    manager = KvManager(SPEC, LIMITS, 64 << 20)
    storage = KvStorage(SPEC, LIMITS, manager.num_pages, manager.num_blocks)
    pages = sum(t.numel() * t.element_size() for t in (*storage.pages, *storage.seen))
    blocks = sum(t.numel() * t.element_size() for t in (storage.blocks("k8v4").raw, storage.blocks("k8v4").score))
    assert arena_bytes(manager, LIMITS, POLICIES["tiny-k8v4"]) == pages + blocks
    assert arena_bytes(manager, LIMITS, registry.get_policy("full")) == pages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_engine_says_what_is_missing(engine_dir: Path) -> None:
    with pytest.raises(DeviceError, match=r"device: got cuda, but .*use device cpu"):
        load_engine(engine_dir, replace(CONFIG, device="cuda"))
    with pytest.raises(ConfigError, match="device: got 'tpu', expected one of cpu, cuda"):
        RuntimeConfig(device="tpu")


def test_an_engine_for_tensorrt_needs_the_gpu(engine_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    engine = shutil.copytree(engine_dir, tmp_path / "engine")
    data = json.loads((engine / "manifest.json").read_text(encoding="utf-8"))
    data["target"] = "trt"
    (engine / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"was built for trt, expected cpu|lists no"):
        load_engine(engine, CONFIG)
