"""Run in a process of its own, which TensorRT-RTX may end: `rtx_plugin_build.py CASE:DTYPE:SM ...`.

Builds networks of our real plugin classes, kernels compiled, with TensorRT-RTX's builder through its ONNX parser, and
prints what came out as a line of JSON for each. The folder of a link libtensorrt_rtx.so must be on LD_LIBRARY_PATH: the
parser loads the library by that name when it meets a plugin, and ends the process without it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tensorrt_rtx as trt
import torch

from builder.lower_trt import EngineShape, Operation, build_network
from builder.model import weight_recipes
from builder.trt_insert import ONNX_TYPES, ParserInsert, base_fields, plugin_step, step_fields
from plugins.commit.plugin import commit_fields
from plugins.compile import compile_cubin
from plugins.errors import DriverError
from plugins.score.plugin import score_fields
from plugins.trt_fields import PluginFields
from plugins.trt_operations import BODIES, register
from plugins.trt_plugin import PluginTensor
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.errors import BuildError

TINY = ModelSpec("llama", 2, 128, 256, 4, 2, 64, 256, 1e-5, RopeSpec(10000.0), 512, True)
MODELS = {
    "llama": TINY,
    "mistral": replace(TINY, family="mistral", tied_embeddings=False, num_kv_heads=1),
    "qwen2": replace(TINY, family="qwen2", qkv_bias=True, num_kv_heads=4),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True, head_dim=128),
    "smollm2": ModelSpec("llama", 30, 576, 1536, 9, 3, 64, 49152, 1e-5, RopeSpec(100000.0), 8192, True),
}
NUM_LAYERS = TINY.num_layers
LARGEST = 512  # of every size of a network of one plugin
STEP: tuple[Operation, ...] = ("append", "attend")


class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
    """Keeps errors, and what the builder says of the memory that its largest layer takes."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.scratch_bytes = 0

    def log(self, severity: Any, msg: str) -> None:
        if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
            self.errors.append(msg)
        found = re.search(r"Max Scratch Memory: (\d+) bytes", msg)
        self.scratch_bytes = int(found.group(1)) if found else self.scratch_bytes


def no_device(sm: str, cubins: Any) -> Any:
    raise DriverError("no plugin may want a device while an engine is built")


class Bench:
    """One network that is built."""

    def __init__(self, dtype: str, sm: int) -> None:
        self.dtype, self.sm, self.logger, self.aliases = dtype, sm, Logger(), True
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.profile = self.builder.create_optimization_profile()
        self.largest: dict[str, int] = {}

    def workspace_bytes(self, all_fields: list[PluginFields]) -> int:
        """What the plugins ask for at the profile's largest sizes."""
        creators = {body.fields_type: PLUGINS.creators[name] for name, body in BODIES.items()}
        return max(
            creators[type(fields)].make(fields).workspace_bytes({**self.largest, **fields.sizes()})
            for fields in all_fields
        )

    def build(self) -> bytes | None:
        config = self.builder.create_builder_config()
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, self.aliases)
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{self.sm}"), 0)
        config.add_optimization_profile(self.profile)
        plan = self.builder.build_serialized_network(self.network, config)
        return None if plan is None else bytes(plan)

    def shape(self, spec: ModelSpec) -> EngineShape:
        limits = EngineLimits(self.dtype, self.dtype, max_batch_size=4, max_seq_len=spec.max_positions)
        return EngineShape(spec, limits, plugin_step(spec, limits, 64, "k8v4", self.sm))

    def step(self, spec: ModelSpec, **other: Any) -> tuple[list[PluginFields], Any]:
        """The step network of a model with random weights; what must live until it is built.

        other: attributes in which the plugins differ from the network.
        """
        shape = self.shape(spec)
        fields_of = step_fields(shape, self.sm, compile_cubin)
        layers = range(spec.num_layers)
        nodes = {(name, layer): replace(fields_of(name, layer), **other) for layer in layers for name in STEP}
        insert = ParserInsert(trt, self.network, self.logger, nodes)
        generator = torch.Generator().manual_seed(0)
        weights = {
            recipe.name: torch.randn(recipe.shape, generator=generator).half() * 0.02 for recipe in weight_recipes(spec)
        }
        kept = build_network(trt, self.network, shape, weights, insert)
        for binding in shape.interface.inputs:
            self.profile.set_shape(binding.name, *shape.interface.profile(binding))
        self.largest = {dim.name: dim.most for dim in shape.interface.dims}
        return list(nodes.values()), (insert, kept)

    def alone(self, operation: str, fields: PluginFields) -> tuple[list[PluginFields], Any]:
        """A network of one plugin, whose tensors are the network's."""
        insert = ParserInsert(trt, self.network, self.logger, {(operation, 0): fields})
        spec = BODIES[operation].spec
        inputs = [self.add_input(tensor, fields) for tensor in spec.inputs]
        for tensor, output in zip(spec.outputs, insert(self.network, operation, 0, inputs), strict=True):
            output.name = tensor.name
            self.network.mark_output(output)
        return [fields], insert

    def add_input(self, tensor: PluginTensor, fields: PluginFields) -> Any:
        types = {"fp32": trt.DataType.FLOAT, "fp16": trt.DataType.HALF, "bf16": trt.DataType.BF16,
                 "int32": trt.DataType.INT32, "int64": trt.DataType.INT64, "bool": trt.DataType.BOOL}  # fmt: skip
        assert set(types) == set(ONNX_TYPES)
        kind = fields.element if tensor.kind == "element" else tensor.kind
        fixed = fields.sizes()
        shape = tuple(fixed.get(name, -1) for name in tensor.dims)
        self.profile.set_shape(
            tensor.name, *(tuple(fixed.get(name, size) for name in tensor.dims) for size in (1, 64, LARGEST))
        )
        self.largest |= dict.fromkeys(tensor.dims, LARGEST)
        return self.network.add_input(tensor.name, types[kind], shape)

    def case(self, name: str) -> tuple[list[PluginFields], Any]:
        base = base_fields(self.shape(TINY), self.sm)
        if name == "score":
            return self.alone("score", score_fields(base, NUM_LAYERS, 0.125, compile_cubin))
        if name == "commit":
            return self.alone("commit", commit_fields(base, NUM_LAYERS, 9, 0.35, compile_cubin))
        if name == "other_element":
            return self.step(TINY, element="bf16" if self.dtype == "fp16" else "fp16")
        if name == "other_heads":
            return self.step(TINY, kv_heads=4)
        if name == "other_pages":
            return self.step(TINY, page_tokens=32)
        if name == "not_aliased":
            self.aliases = False
            return self.step(TINY)
        return self.step(MODELS[name])


def build(name: str, dtype: str, sm: str) -> dict[str, Any]:
    """What came out of one case."""
    print(f"case {name}", file=sys.stderr, flush=True)  # what plugins raise goes there, behind this line
    bench, started = Bench(dtype, int(sm)), time.monotonic()
    try:
        fields, kept = bench.case(name)
    except (BuildError, RuntimeError) as error:
        return {"case": name, "plan_bytes": 0, "errors": [*bench.logger.errors, f"{type(error).__name__}: {error}"]}
    layers = [bench.network.get_layer(index) for index in range(bench.network.num_layers)]
    plan = bench.build()
    del kept
    cubins = {value for one in fields for name, value in vars(one).items() if name.endswith("_cubin")}
    return {
        "case": name,
        "plan_bytes": 0 if plan is None else len(plan),
        "plugins": sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers),
        "cubins": [0 if plan is None else plan.count(cubin) for cubin in cubins],
        "errors": bench.logger.errors,
        "scratch_bytes": bench.logger.scratch_bytes,
        "workspace_bytes": bench.workspace_bytes(fields),
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    PLUGINS = register(trt, trt.get_plugin_registry(), no_device)
    for case in sys.argv[1:]:
        print(json.dumps(build(*case.split(":"))), flush=True)
