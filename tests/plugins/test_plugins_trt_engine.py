"""A TensorRT engine of our plugins without TensorRT: whole conversations through the TensorRT executor, the tables and
tile lists it packs, and the real plugin classes on emulated kernels. What lies between plugins runs on torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_engine import POLICIES, SPEC, Model, make_engine, make_limits, talk

from builder.lower_torch import Rotary, TorchDecoder
from builder.lower_trt import EngineShape
from builder.trt_insert import plugin_step, step_fields
from plugins.attend.params import StepTables
from plugins.attend.plugin import AttendFields
from plugins.attend.tile_words import pack_step
from plugins.emulation.runner import EmulatedRunner
from plugins.trt_operations import Plugins
from runtime.engine_interface import EngineInterface
from runtime.executor_torch import TORCH_FORMS, TorchExecutor
from runtime.executor_trt import TrtExecutor, TrtParts
from runtime.kv_storage import ArenaPlace
from runtime.paged_executor import CommitForms
from runtime.policy import registry
from runtime.trt_engine import StepBindings, bound_shape
from runtime.trt_tables import StepPacker
from tests.plugins.plugin_driver import DTYPES, loaded, make_plugins, run

POLICY, FORMAT, SM = "tiny-k8v4", "k8v4", 90
POISON = ArenaPlace(poison=True)
LIMITS = make_limits("fp16")
SHAPE = EngineShape(SPEC, LIMITS, plugin_step(SPEC, LIMITS, 64, FORMAT, SM))


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, policy in POLICIES.items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)
    yield


def at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The memory at an address as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(shape)


class PluginEngine:
    """`runtime.executor_trt.StepEngine`, given nothing but addresses and sizes."""

    def __init__(self, plugins: Plugins, decoder: TorchDecoder, interface: EngineInterface) -> None:
        self._plugins, self._decoder, self._interface = plugins, decoder, interface
        fields_of = step_fields(SHAPE, SM, lambda kernel, sm: b"the emulation compiles its own")
        self.attends = [loaded(plugins, "attend", fields_of("attend", layer)) for layer in range(SPEC.num_layers)]
        self._appends = [loaded(plugins, "append", fields_of("append", layer)) for layer in range(SPEC.num_layers)]
        self._inputs: dict[str, torch.Tensor] = {}
        self.num_decodes = self.num_chunks = 0

    def run(self, bindings: StepBindings, replay: bool) -> torch.Tensor:
        self._inputs = x = {
            b.name: at(bindings.addresses[b.name], DTYPES[b.dtype], bound_shape(b, bindings.sizes))
            for b in self._interface.inputs
        }
        decodes = bindings.sizes["R"] == bindings.sizes["S"]
        self.num_decodes, self.num_chunks = self.num_decodes + decodes, self.num_chunks + (not decodes)
        logits = self._decoder.forward(x["token_ids"], x["positions"], self, x["logit_rows"])
        assert logits is not None
        return logits

    def _of_layer(self, layer: int) -> dict[str, torch.Tensor]:
        own = {name: self._inputs[f"{name}_{layer}"] for name in ("pages", "seen")}
        return {**self._inputs, **own}

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        heads = {name: x.contiguous() for name, x in zip("qkv", (q, k, v), strict=True)}
        inputs = {**self._of_layer(layer), **heads, "cos": rotary[0], "sin": rotary[1]}
        return run(self._plugins, self._appends[layer], _of(self._appends[layer], inputs))["q_out"]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        inputs = {**self._of_layer(layer), "q": q}
        return run(self._plugins, self.attends[layer], _of(self.attends[layer], inputs))["out"]


def _of(plugin: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {tensor.name: tensors[tensor.name] for tensor in plugin.spec.inputs}


def test_conversations_on_plugins_answer_as_on_torch(trt: Any) -> None:
    plain, _ = make_engine(
        lambda model: TorchExecutor(model.decoder, SPEC, model.limits, model.storage), "fp16", POISON
    )
    expected = talk(plain, (POLICY,))
    runner, engines = EmulatedRunner(seed=7), []
    plugins = make_plugins(trt, runner)

    def on_plugins(model: Model) -> TrtExecutor:
        step_engine = PluginEngine(plugins, model.decoder, SHAPE.interface)
        engines.append(step_engine)
        fields = step_engine.attends[0].fields
        assert isinstance(fields, AttendFields)

        def tiles(tables: StepTables) -> torch.Tensor:
            return pack_step(tables, fields.kernels, SPEC.num_kv_heads, runner.num_multiprocessors)

        packer = StepPacker(SPEC, SHAPE.interface, FORMAT, tiles)
        parts = TrtParts(step_engine, SHAPE.interface, packer, FORMAT)
        forms = CommitForms(TORCH_FORMS.draw_line, TORCH_FORMS.publish)
        return TrtExecutor(SPEC, model.limits, model.storage, forms, parts)

    engine, manager = make_engine(on_plugins, "fp16", POISON)
    assert talk(engine, (POLICY,)) == expected
    mine, theirs = engine.stats(), plain.stats()
    for name in ("commits", "probes", "dropped", "absorbed", "total_kv_bytes"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.commits > 0 and mine.probes > 0 and mine.dropped > 0, "the conversation must exercise commits"
    assert engines[0].num_decodes > 10 and engines[0].num_chunks > 3
    manager.check_invariants()
