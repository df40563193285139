"""A real builder takes the real plugin classes: TensorRT-RTX, through its ONNX parser (see builder/trt_insert.py).

It checks types, symbolic shapes, profiles, fields, aliases and workspaces; it runs nothing. NVIDIA does not support
plugins there, so where the parser refuses them or the process dies at the first network, these tests are skipped with
the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.lower_trt import EngineShape
from builder.trt_insert import RegistryInsert, base_fields, plugin_insert, plugin_step, step_fields
from plugins.trt_operations import make_creators
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.errors import BuildError, ConfigError

SCRIPT = Path(__file__).with_name("rtx_plugin_build.py")
NEEDED = ("tensorrt_rtx", "tensorrt_rtx_libs", "cuda.bindings")
# Quick ones have kernels of one geometry to compile.
STEP_NETWORK = "llama:bf16:120"
ALONE = ("score:bf16:120", "commit:bf16:120")
REFUSED = ("other_element:bf16:120", "other_heads:bf16:120", "other_pages:bf16:120", "not_aliased:bf16:120")
FAMILIES = ("mistral:bf16:120", "qwen2:bf16:120", "qwen3:fp16:80", "smollm2:bf16:120")
SPEC = ModelSpec("llama", 2, 128, 256, 4, 2, 64, 256, 1e-5, RopeSpec(10000.0), 512, True)
LIMITS = EngineLimits("bf16", "bf16", max_batch_size=4, max_seq_len=512)


def is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


class Outcome:
    """Results by case, and what was printed to stderr behind each case's name."""

    def __init__(self, folder: Path, cases: tuple[str, ...]) -> None:
        libraries = Path(importlib.util.find_spec("tensorrt_rtx_libs").origin or "").parent  # type: ignore[union-attr]
        (folder / "libtensorrt_rtx.so").symlink_to(libraries / "libtensorrt_rtx.so.1")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, str(SCRIPT), *cases]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
        self.status, self.said = done.returncode, done.stderr
        self.results: dict[str, dict[str, Any]] = {}
        for line in done.stdout.splitlines():
            result = json.loads(line)
            self.results[result["case"]] = result

    def of(self, case: str) -> dict[str, Any]:
        name = case.split(":")[0]
        assert name in self.results, f"ended with {self.status} at {case}: {self.said[-3000:]}"
        return self.results[name]

    def raised(self, case: str) -> str:
        """stderr of one case."""
        return self.said.split(f"case {case.split(':')[0]}\n")[1].split("\ncase ")[0]


def run(folder: Path, cases: tuple[str, ...]) -> Outcome:
    missing = [name for name in NEEDED if is_missing(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    outcome = Outcome(folder, cases)
    first = outcome.results.get(cases[0].split(":")[0])
    if first is None:
        pytest.skip(f"TensorRT-RTX ended the process ({outcome.status}) at the first plugins: {outcome.said[-500:]}")
    if any("parser refused" in error for error in first["errors"]):
        pytest.skip(f"this TensorRT-RTX takes no plugins: {first['errors']}")
    return outcome


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("link"), (STEP_NETWORK, *ALONE, *REFUSED))


def check_built(result: dict[str, Any], plugins: int) -> None:
    """The plan has all plugins, carries each kernel once per plugin that runs it, and reserves their workspace."""
    assert result["errors"] == [] and result["plan_bytes"] > 0, result
    assert result["plugins"] == plugins
    assert min(result["cubins"]) > 0 and sum(result["cubins"]) >= plugins, result
    assert result["scratch_bytes"] >= result["workspace_bytes"], "room for the profile's largest step"


def test_the_step_network_builds(outcome: Outcome) -> None:
    result = outcome.of(STEP_NETWORK)
    check_built(result, plugins=4)
    assert result["cubins"] == [2, 2, 2, 2], "append and three of attend, in each of two layers"


@pytest.mark.parametrize("case", ALONE)
def test_score_and_commit_build_alone(outcome: Outcome, case: str) -> None:
    check_built(outcome.of(case), plugins=1)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (REFUSED[0], r"CommitKVAppend q: got DataType.BF16, expected DataType.HALF"),
        (REFUSED[1], r"expected 4 for kv_heads"),
        (REFUSED[2], r"expected 32 for page_tokens"),
    ],
)
def test_networks_that_do_not_fit_their_plugins_are_refused(outcome: Outcome, case: str, reason: str) -> None:
    assert outcome.of(case)["plan_bytes"] == 0
    assert reason in outcome.raised(case)


def test_the_builder_asks_for_aliases(outcome: Outcome) -> None:
    """Without its preview feature it must refuse, or it never saw that arenas are edited in place."""
    result = outcome.of(REFUSED[3])
    assert result["plan_bytes"] == 0 and "Aliased I/O used by plugin append_0" in " ".join(result["errors"])


@pytest.mark.slow
def test_other_families_and_smollm2_build(tmp_path: Path) -> None:
    found = run(tmp_path, FAMILIES)
    for case in FAMILIES[:3]:
        check_built(found.of(case), plugins=4)
    check_built(found.of(FAMILIES[3]), plugins=60)


def test_limits_that_no_kernel_covers_are_refused_before_anything_is_compiled() -> None:
    for spec, limits, sm, message in (
        (SPEC, LIMITS, 100, "sm: got 100.*90.*trt-rtx"),
        (replace(SPEC, head_dim=80), LIMITS, 90, "head_dim: got 80"),
        (SPEC, replace(LIMITS, dtype="fp16"), 90, "kv_dtype: got bf16 with dtype fp16"),
        (SPEC, replace(LIMITS, dtype="fp32", kv_dtype="fp32"), 90, "dtype: got 'fp32'"),
        (replace(SPEC, num_q_heads=34), LIMITS, 90, "query heads per KV head: got 34 / 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            plugin_step(spec, limits, 64, "k8v4", sm)
        with pytest.raises(ConfigError, match=message):
            module: Any = None  # nothing of TensorRT is asked for
            plugin_insert(module, EngineShape(spec, limits, replace(STEP, max_tile_words=64)), sm)


STEP = plugin_step(SPEC, LIMITS, 64, "k8v4", 90)


def test_attributes_follow_from_the_engine() -> None:
    shape = EngineShape(SPEC, LIMITS, STEP)
    base = base_fields(shape, 90)
    assert (base.sm, base.element, base.block_format, base.head_dim) == ("sm_90a", "bf16", "k8v4", 64)
    assert (base.q_heads, base.kv_heads, base.page_tokens, base.block_entries) == (4, 2, 16, 64)
    compiled: list[str] = []

    def compiler(kernel: Any, sm: str) -> bytes:
        compiled.append(f"{kernel.op} {sm}")
        return b"cubin of " + kernel.op.encode()

    fields_of = step_fields(shape, 90, compiler)
    assert compiled == ["append sm_90a", "attend sm_90a", "attend sm_90a", "score sm_90a"]
    first, second = (fields_of("attend", layer) for layer in (0, 1))
    assert vars(second) == {**vars(first), "layer": 1} and vars(first)["scale"] == 0.125
    assert fields_of("append", 0) == fields_of("append", 1)


def test_a_longer_step_takes_longer_tile_lists() -> None:
    assert 0 < STEP.max_tile_words < plugin_step(SPEC, LIMITS, 256, "k8v4", 90).max_tile_words
    larger = replace(LIMITS, max_batch_size=8)
    assert STEP.max_tile_words < plugin_step(SPEC, larger, 64, "k8v4", 90).max_tile_words


class _Network:
    """Takes plugins; only full TensorRT's network does, which is not here."""

    def __init__(self) -> None:
        self.added: list[tuple[list[Any], list[Any], Any]] = []

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> Any:
        self.added.append((inputs, shape_inputs, plugin))
        outputs = plugin.num_outputs
        return SimpleNamespace(num_outputs=outputs, get_output=lambda index: f"output {index}") if inputs else None


def test_the_registrys_way_adds_the_plugin_of_each_layer() -> None:
    module = pytest.importorskip("tensorrt_rtx")
    fields_of = step_fields(EngineShape(SPEC, LIMITS, STEP), 90, lambda kernel, sm: b"cubin")
    insert, network = RegistryInsert(make_creators(module, no_device), fields_of), _Network()
    found: Any = network
    assert insert(found, "append", 0, ["q", "k"]) == ["output 0", "output 1", "output 2"]
    insert(found, "attend", 1, ["q"])
    (append_inputs, none, append), (_, _, attend) = network.added
    assert (append_inputs, none) == (["q", "k"], [])
    assert append.fields == fields_of("append", 0) and attend.fields == fields_of("attend", 1)
    assert isinstance(append, module.IPluginV3) and append.building and attend.building
    with pytest.raises(BuildError, match="append_0"):
        insert(found, "append", 0, [])


def no_device(sm: str, cubins: Any) -> Any:
    raise AssertionError("no plugin may want a device while an engine is built")
