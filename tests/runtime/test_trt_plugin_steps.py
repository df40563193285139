"""The TensorRT path but for TensorRT: the executor's packed steps through the plugins' own launches, kernels emulated.

`PluginStepEngine` stands where the plan runs: it reads tables and arenas at the addresses that the executor binds, runs
the model's other layers in torch, and calls the real plugins' `launch` for what they do in an engine. Conversations
with commits and probes answer as on the torch executor.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_engine import POLICIES, SPEC, Model, make_engine, make_limits, talk

from plugins.append.plugin import AppendPlugin, append_fields
from plugins.attend.plugin import AttendPlugin, attend_fields
from plugins.commit.cuda import SHARED_BYTES, CudaPublish
from plugins.commit.line import draw_line
from plugins.emulation.runner import EmulatedRunner
from plugins.native_build import find_compiler
from plugins.trt_fields import PluginFields
from plugins.trt_plugin import Call, TrtPlugin
from runtime.engine_interface import EngineInterface, StepLimits, make_interface
from runtime.errors import UnsupportedPolicyError
from runtime.executor_torch import TorchExecutor
from runtime.executor_trt import TrtExecutor, TrtParts
from runtime.gpu import GpuKernels
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace
from runtime.paged_executor import CommitForms
from runtime.policy import registry
from runtime.trt_engine import StepBindings, bound_shape
from runtime.trt_loading import make_packer

SM, FORMAT, POLICY = "sm_90a", "k8v4", "tiny-k8v4"
TYPES = {"int32": torch.int32, "bool": torch.bool, "fp16": torch.float16, "fp32": torch.float32}
POISON = ArenaPlace(poison=True)
# A name of the interface is that of the plugins but for sizes that TensorRT computes itself.
ROTARY = ("cos", "sin")


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, policy in POLICIES.items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)
    yield


def plugin(body: type[TrtPlugin[Any]], fields: PluginFields) -> TrtPlugin[Any]:
    """A plugin without the TensorRT classes it is joined with; `launch` is its own."""
    made = object.__new__(body)
    made.fields = fields
    return made


class PluginStepEngine:
    """`runtime.executor_trt.StepEngine` and the decoder's `KvStep`, by plugin launches."""

    def __init__(self, model: Model, interface: EngineInterface, runner: EmulatedRunner) -> None:
        self.model, self.interface, self.runner = model, interface, runner
        base = PluginFields(
            sm=SM, element="fp16", block_format=FORMAT, q_heads=SPEC.num_q_heads, kv_heads=SPEC.num_kv_heads,
            head_dim=SPEC.head_dim, page_tokens=model.limits.page_tokens, block_entries=model.limits.block_entries,
        )  # fmt: skip
        no_cubin = lambda kernel, sm: b""  # noqa: E731  # the emulation compiles sources
        self._append = plugin(AppendPlugin, append_fields(base, no_cubin))
        attend = attend_fields(base, SPEC.num_layers, SPEC.head_dim**-0.5, no_cubin)
        self._attend = [
            plugin(AttendPlugin, type(attend)(**{**vars_of(attend), "layer": layer}))
            for layer in range(SPEC.num_layers)
        ]
        self.replays: list[bool] = []

    def run(self, bindings: StepBindings, replay: bool) -> torch.Tensor:
        self.replays.append(replay)
        self.bindings = bindings
        tables = {
            binding.name: at(
                bindings.addresses[binding.name], TYPES[binding.dtype], bound_shape(binding, bindings.sizes)
            )
            for binding in self.interface.inputs
            if binding.name in ("token_ids", "positions", "logit_rows")
        }
        logits = self.model.decoder.forward(tables["token_ids"], tables["positions"], self, tables["logit_rows"])
        assert logits is not None
        return logits

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Any) -> torch.Tensor:
        held = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous(), **dict(zip(ROTARY, rotary, strict=True))}
        out = torch.empty_like(held["q"])
        self._launch(self._append, layer, {**held, "q_out": out})
        return out

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        self._launch(self._attend[layer], layer, {"q": q, "out": out})
        return out

    def _launch(self, made: TrtPlugin[Any], layer: int, own: dict[str, torch.Tensor]) -> None:
        bound = self.bindings.addresses
        address = {name: tensor.data_ptr() for name, tensor in own.items()}
        for tensor in made.spec.inputs:
            if tensor.name not in address:
                arena = f"{tensor.name}_{layer}" if tensor.name in ("pages", "seen") else tensor.name
                address[tensor.name] = bound[arena]
        for tensor in made.spec.outputs:
            if tensor.alias is not None:
                address[tensor.name] = address[tensor.alias]
        size = {**made.fields.sizes(), **self.bindings.sizes}
        workspace = torch.full((made.workspace_bytes(size) + 256,), 255, dtype=torch.uint8)
        start = -(-workspace.data_ptr() // 256) * 256
        made.launch(Call(self.runner, address, size, start, 0))


def vars_of(fields: PluginFields) -> dict[str, Any]:
    return {field.name: getattr(fields, field.name) for field in dataclasses.fields(fields)}


def at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The memory at an address as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(shape)


@pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
@pytest.mark.parametrize("policy", [POLICY, "tiny-norm"])
def test_conversations_through_plugins_answer_as_on_torch(policy: str) -> None:
    engines: list[PluginStepEngine] = []

    def on_plugins(model: Model) -> TrtExecutor:
        step = StepLimits(max_step_tokens=64, block_format=FORMAT, max_tile_words=1 << 16)
        interface = make_interface(SPEC, model.limits, step)
        kernels = GpuKernels(EmulatedRunner(seed=7), SM)
        engines.append(PluginStepEngine(model, interface, kernels.runner))  # type: ignore[arg-type]
        packer = make_packer(SPEC, model.limits, step, interface, kernels)
        forms = CommitForms(draw_line, CudaPublish(kernels.runner, SHARED_BYTES[SM]))
        return TrtExecutor(SPEC, model.limits, model.storage, forms, TrtParts(engines[-1], interface, packer, FORMAT))

    def on_torch(model: Model) -> TorchExecutor:
        return TorchExecutor(model.decoder, SPEC, model.limits, model.storage)

    plain, _ = make_engine(on_torch, "fp16", POISON)
    expected = talk(plain, (policy,))
    engine, manager = make_engine(on_plugins, "fp16", POISON)
    assert talk(engine, (policy,)) == expected
    mine, theirs = engine.stats(), plain.stats()
    assert (mine.commits, mine.probes, mine.dropped) == (theirs.commits, theirs.probes, theirs.dropped)
    assert mine.commits > 2 and mine.probes > 2
    assert True in engines[0].replays and False in engines[0].replays, "decode steps replay, chunks and probes do not"
    manager.check_invariants()


def test_policies_of_another_block_format_are_refused_when_a_conversation_begins() -> None:
    manager = KvManager(SPEC, make_limits("fp16"), 64 << 20, only_format="k8v4")
    manager.open(0, POLICIES["tiny-k8v4"])
    manager.open(1, registry.get_policy("full"))
    with pytest.raises(UnsupportedPolicyError, match="policy tiny-int8: keeps int8 blocks, expected k8v4"):
        manager.open(2, POLICIES["tiny-int8"])
