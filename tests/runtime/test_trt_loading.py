"""Loading a TensorRT engine where something is missing: one typed error each, before any memory is taken."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_engine import SPEC, make_limits

from plugins.attend.tile_words import most_step_words
from plugins.emulation.runner import EmulatedRunner
from runtime.config import RuntimeConfig
from runtime.engine_interface import StepLimits, make_interface
from runtime.errors import ConfigError, DeviceError, ManifestError
from runtime.gpu import GpuKernels
from runtime.kv_manager import KvManager
from runtime.manifest import Manifest, SourceModel, TokenInfo, TrtFacts
from runtime.trt_loading import check_facts, step_kernels, storage_bytes, trt_executor
from runtime.wiring import check_step_tokens

LIMITS = make_limits("bf16")
STEP = StepLimits(max_step_tokens=64, block_format="k8v4", max_tile_words=4096)


def manifest(**changes: object) -> Manifest:
    facts = TrtFacts(90, "tensorrt", "11.4.0", "plugin", STEP, make_interface(SPEC, LIMITS, STEP).sha256())
    return Manifest(
        "trt", SPEC, LIMITS, TokenInfo("", "", False, ()), SourceModel("tiny", "huggingface", "0"), (), (), "",
        trt=replace(facts, **changes),  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_plan_of_plain_layers_is_refused() -> None:
    assert check_facts(manifest()).sm == 90
    for wrong in (manifest(form="native"), replace(manifest(), trt=None)):
        with pytest.raises(ManifestError, match="expected plugin, whose arenas are edited in place"):
            check_facts(wrong)


def test_without_tensorrt_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # type: ignore[arg-type]
    manager = KvManager(SPEC, LIMITS, 16 << 20, "k8v4")
    with pytest.raises(DeviceError, match=r"target trt runs on TensorRT 11, but .* cannot be imported"):
        trt_executor(tmp_path / "engine.plan", manifest(), manager, GpuKernels(EmulatedRunner(), "sm_90a"))


def test_memory_is_counted_for_one_block_format() -> None:
    manager = KvManager(SPEC, LIMITS, 16 << 20, "k8v4")
    pages, blocks = manager.page_layout, manager.block_layouts["k8v4"]
    expected = manager.num_pages * pages.page_bytes + manager.num_blocks["k8v4"] * blocks.stored_bytes
    assert storage_bytes(manager, "k8v4") == expected <= 2 * (16 << 20)


def test_tile_lists_are_for_the_kernels_of_the_plan() -> None:
    kernels = step_kernels(SPEC, LIMITS, STEP, "sm_90a")
    shape = kernels.decode.shape
    assert (shape.group, shape.element, shape.block.format) == (2, "bf16", "k8v4")
    assert most_step_words(kernels, SPEC.num_kv_heads, LIMITS.max_batch_size, STEP.max_step_tokens) > 0


def test_arenas_stay_within_what_tensorrt_counts() -> None:
    """Ids beyond the cap are never handed out, however large the KV memory is."""
    free = KvManager(SPEC, LIMITS, 1 << 30, "k8v4")
    capped = KvManager(SPEC, LIMITS, 1 << 30, "k8v4", most=(1000, 2000))
    assert free.num_pages > 1000 and free.num_blocks["k8v4"] > 2000
    assert (capped.num_pages, capped.num_blocks["k8v4"]) == (1000, 2000)
    few = KvManager(SPEC, LIMITS, 16 << 20, "k8v4", most=(10**9, 10**9))
    assert few.num_pages == KvManager(SPEC, LIMITS, 16 << 20, "k8v4").num_pages


def test_steps_larger_than_the_engine_are_refused_at_start() -> None:
    check_step_tokens(RuntimeConfig(tokens_per_step=64, probe_tokens_per_step=52), STEP, prompt_tokens=12)
    with pytest.raises(ConfigError, match=r"tokens_per_step: got 65, expected at most 64 .*--max-step-tokens"):
        check_step_tokens(RuntimeConfig(tokens_per_step=65, probe_tokens_per_step=1), STEP, 12)
    with pytest.raises(ConfigError, match="probe_tokens_per_step: got 53, expected at most 52"):
        check_step_tokens(RuntimeConfig(tokens_per_step=64, probe_tokens_per_step=53), STEP, 12)
