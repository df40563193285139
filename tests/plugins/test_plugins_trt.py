"""The TensorRT plugins on TensorRT's real Python bindings, over stub libraries: fields, types, shapes, aliases.

Launches are in test_plugins_trt_launch.py, what a real builder makes of them in tests/builder/test_trt_plugin_build.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.attend.plugin import attend_fields
from plugins.commit.plugin import commit_fields
from plugins.errors import KernelError, PluginError, UnsupportedShapeError, UnsupportedSmError
from plugins.trt_fields import PluginFields, pack, unpack
from plugins.trt_operations import Plugins
from tests.plugins.plugin_driver import (
    BASE,
    NUM_LAYERS,
    OPERATIONS,
    describe,
    dynamic_desc,
    fields_of,
    kind_of,
    names_of,
    no_compiler,
    shapes_of,
    sizes_of,
)
from tests.plugins.stub_libs.stub_bindings import environment_of, type_stubs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fields_travel_through_serialization_clone_and_creator(plugins: Plugins, operation: str) -> None:
    fields, creator = fields_of(operation), plugins.creators[operation]
    plugin: Any = creator.make(fields)
    stored = plugin.get_fields_to_serialize()
    named: Any = creator.field_names
    assert [item.name for item in stored] == [named[i].name for i in range(len(named))]
    assert [item.type for item in stored] == [named[i].type for i in range(len(named))]
    phases = plugins.setup.trt.TensorRTPhase
    for phase, building in ((phases.BUILD, True), (phases.RUNTIME, False)):
        made: Any = creator.create_plugin("layer", stored, phase)
        assert made.fields == fields and made.building == building
        copy = made.clone()
        assert type(copy) is type(made) and copy is not made
        assert copy.fields == fields and copy.building == building
        for name in ("plugin_name", "plugin_version", "plugin_namespace", "num_outputs"):
            assert getattr(copy, name) == getattr(plugin, name)
        assert made in plugins.setup.alive and copy in plugins.setup.alive


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_attribute_is_a_field(operation: str) -> None:
    """A changed attribute must change what is serialized."""
    fields = fields_of(operation)
    changes: dict[type, Any] = {int: lambda x: x + 1, float: lambda x: x + 1.0, bytes: lambda x: x + b"!"}
    for name in pack(fields):
        value = getattr(fields, name)
        if isinstance(value, str) or name in PluginFields.__annotations__:
            continue  # checked values; below
        other = replace(fields, **{name: changes[type(value)](value)})
        assert unpack(type(fields), pack(other)) == other != fields
    other = replace(fields, sm="sm_80", element="bf16", block_format="int8", q_heads=4, page_tokens=16)
    assert unpack(type(fields), pack(other)) == other


def test_texts_may_end_with_a_zero_byte(plugins: Plugins) -> None:
    """As TensorRT-RTX's parser hands them over."""
    packed = pack(fields_of("append"))
    packed["sm"] = np.append(packed["sm"], np.int8(0))
    assert unpack(type(fields_of("append")), packed) == fields_of("append")


def test_missing_and_wrong_fields_are_refused() -> None:
    fields = fields_of("append")
    packed = pack(fields)
    for name in packed:
        with pytest.raises(PluginError, match=f"{name}: missing"):
            unpack(type(fields), {key: value for key, value in packed.items() if key != name})
    with pytest.raises(PluginError, match="q_heads"):
        unpack(type(fields), {**packed, "q_heads": np.array([1, 2], np.int32)})
    with pytest.raises(PluginError, match="q_heads"):
        unpack(type(fields), {**packed, "q_heads": np.array([1], np.int64)})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sm": "sm_100"}, UnsupportedSmError, "sm_100.*sm_90a.*trt-rtx"),
        ({"element": "fp32"}, UnsupportedShapeError, "fp32.*fp16, bf16"),
        ({"block_format": "bf16"}, UnsupportedShapeError, "block format: got 'bf16'.*fp16"),
        ({"block_format": "fp32"}, UnsupportedShapeError, "block format"),
        ({"head_dim": 80}, UnsupportedShapeError, "head_dim: got 80.*64, 128"),
        ({"page_tokens": 12}, UnsupportedShapeError, "page_tokens: got 12.*multiple of 8"),
        ({"page_tokens": 264}, UnsupportedShapeError, "page_tokens"),
        ({"block_entries": 20}, UnsupportedShapeError, "block_entries: got 20"),
        ({"q_heads": 34}, UnsupportedShapeError, "34 / 2.*1 to 16"),
        ({"q_heads": 5}, UnsupportedShapeError, "5 / 2"),
        ({"kv_heads": 0}, UnsupportedShapeError, "6 / 0"),
    ],
)
def test_what_no_kernel_covers_is_refused_at_build(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        replace(BASE, **change)
    assert isinstance(raised.value, KernelError)


def test_pages_and_blocks_too_large_for_shared_memory_are_refused_at_build() -> None:
    base = replace(BASE, head_dim=128, page_tokens=256, block_format="fp16", sm="sm_120")
    with pytest.raises(UnsupportedShapeError, match="shared memory"):
        attend_fields(base, NUM_LAYERS, 0.1, no_compiler)
    with pytest.raises(UnsupportedShapeError, match="block_entries"):
        commit_fields(replace(BASE, block_entries=256), 2, 5, None, no_compiler)


TYPES = {
    "append": ["fp16", "fp16", "fp16"],
    "attend": ["fp16", "fp16", "fp16"],
    "score": ["fp16", "fp16"],
    "commit": ["int32", "fp16", "int32"],
}
ALIASES = {
    "append": [None, "pages", "seen"],
    "attend": [None, "seen", "score"],
    "score": ["seen", "score"],
    "commit": ["blocks", "score", "counts"],
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_output_types_and_aliases(plugins: Plugins, operation: str) -> None:
    plugin: Any = plugins.creators[operation].make(fields_of(operation))
    types, inputs = names_of(plugins), [tensor.name for tensor in plugin.spec.inputs]
    given = [types[kind_of(tensor, plugin.fields)] for tensor in plugin.spec.inputs]
    assert plugin.get_output_data_types(given) == [types[name] for name in TYPES[operation]]
    aliases = [plugin.get_aliased_input(index) for index in range(plugin.num_outputs)]
    assert aliases == [-1 if name is None else inputs.index(name) for name in ALIASES[operation]]
    bf16: Any = plugins.creators[operation].make(replace(plugin.fields, element="bf16"))
    if operation != "commit":
        with pytest.raises(PluginError, match=f"{plugin.spec.name} q"):
            bf16.get_output_data_types(given)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_tensor_takes_its_own_type_in_linear_layout_only(plugins: Plugins, operation: str) -> None:
    module: Any = plugins.setup.trt
    plugin: Any = plugins.creators[operation].make(fields_of(operation))
    types, shapes = names_of(plugins), shapes_of(plugin)
    right = [types[kind_of(tensor, plugin.fields)] for tensor in plugin.spec.tensors]
    descs = [
        dynamic_desc(module, dtype, shapes[tensor.name], shapes[tensor.name])
        for tensor, dtype in zip(plugin.spec.tensors, right, strict=True)
    ]
    for position, dtype in enumerate(right):
        for name, other in types.items():
            descs[position].desc.type = other
            accepted = plugin.supports_format_combination(position, descs, len(plugin.spec.inputs))
            assert accepted == (other == dtype), (plugin.spec.tensors[position].name, name)
        descs[position].desc.type = dtype
        descs[position].desc.format = module.TensorFormat.CHW2
        assert not plugin.supports_format_combination(position, descs, len(plugin.spec.inputs))
        descs[position].desc.format = module.TensorFormat.LINEAR


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shapes_of_another_engine_are_refused(plugins: Plugins, operation: str) -> None:
    module: Any = plugins.setup.trt
    plugin: Any = plugins.creators[operation].make(fields_of(operation))
    types, shapes, fixed = names_of(plugins), shapes_of(plugin), plugin.fields.sizes()

    def dynamic(changed: dict[str, tuple[int, ...]]) -> list[Any]:
        return [
            dynamic_desc(module, types[kind_of(t, plugin.fields)], shapes[t.name], {**shapes, **changed}[t.name])
            for t in plugin.spec.inputs
        ]

    plugin.configure_plugin(dynamic({}), [])
    assert plugin.get_workspace_size(dynamic({}), []) >= 0
    for tensor in plugin.spec.inputs:
        shape = shapes[tensor.name]
        with pytest.raises(PluginError, match=f"{tensor.name}: .*dimensions"):
            plugin.configure_plugin(dynamic({tensor.name: (*shape, 1)}), [])
        for axis, name in enumerate(tensor.dims):
            larger = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
            if name in fixed:
                with pytest.raises(PluginError, match=f"{tensor.name}: .*{re.escape(name)}"):
                    plugin.configure_plugin(dynamic({tensor.name: larger}), [])
    with pytest.raises(PluginError, match="as in inputs before it"):
        shared = next(t for t in reversed(plugin.spec.inputs) if t.dims[0] in ("R", "pages", "blocks", "moves"))
        changed = (shapes[shared.name][0] + 1, *shapes[shared.name][1:])
        plugin.on_shape_change(describe(plugins, plugin, {**shapes, shared.name: changed}), [])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_workspace_grows_with_the_sizes(plugins: Plugins, operation: str) -> None:
    """What is reserved for an engine's largest step must do for every smaller one."""
    plugin: Any = plugins.creators[operation].make(fields_of(operation))
    large = sizes_of(plugin.fields)
    for name in ("R", "S", "P", "B", "staged", "old"):
        small = {**large, name: 1}
        assert plugin.workspace_bytes(small) <= plugin.workspace_bytes(large)


CHECKED = """
import tensorrt
from plugins.trt_fields import PluginFields
from plugins.trt_plugin import PluginCreator, TensorRT, TrtPlugin

module: TensorRT = tensorrt


class Plugin(
    TrtPlugin[PluginFields], tensorrt.IPluginV3, tensorrt.IPluginV3OneCore, tensorrt.IPluginV3OneBuildV2,
    tensorrt.IPluginV3OneRuntime,
): ...


class Creator(PluginCreator, tensorrt.IPluginCreatorV3One): ...
"""
WRONG = """
import tensorrt
from plugins.trt_fields import PluginFields
from plugins.trt_plugin import TrtPlugin


class Other(TrtPlugin[PluginFields]):
    def get_valid_tactics(self) -> str:
        return ""


class Plugin(Other, tensorrt.IPluginV3, tensorrt.IPluginV3OneBuildV2): ...  # line 12


tensorrt.PluginField("name", 3.5, tensorrt.PluginFieldType.FLOAT32)  # line 15
"""


@pytest.mark.slow
def test_calls_fit_the_signatures_of_the_real_bindings(stub_folder: Path, tmp_path: Path) -> None:
    """mypy over everything that names TensorRT, and over classes joined with its interfaces as `bind` joins them."""
    pytest.importorskip("mypy")
    typings = type_stubs(tmp_path, environment_of(stub_folder))
    config = tmp_path / "pyproject.toml"
    config.write_text(
        (ROOT / "pyproject.toml").read_text()
        + '\n[[tool.mypy.overrides]]\nmodule = ["tensorrt"]\nignore_errors = true\n'
        + '\n[[tool.mypy.overrides]]\nmodule = ["torch.*", "numpy.*"]\nfollow_imports = "skip"\n'
    )
    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "wrong.py").write_text(WRONG)
    files = [path for folder in ("plugins", "builder", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    using = [path for path in files if "import tensorrt as trt" in path.read_text()]
    assert len(using) >= 3
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "--no-warn-unused-ignores"]
    paths = [str(path) for path in (*using, tmp_path / "checked.py", tmp_path / "wrong.py")]
    environment = {**os.environ, "MYPYPATH": str(typings)}
    command = [sys.executable, "-m", "mypy", *options, *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    expected = [line for line in errors if re.search(r"wrong\.py:(12|15):", line)]
    assert errors == expected and len(expected) == 2, done.stdout + done.stderr
