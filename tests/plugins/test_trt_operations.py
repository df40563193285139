"""Registration, and how plugins of a loaded engine get to a GPU: against a driver that only takes notes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
from test_cuda_runner import NotingDriver

from plugins import cuda_runner
from plugins.append.cuda import CudaAppendParams
from plugins.errors import DriverError, PluginError, UnsupportedSmError
from plugins.trt_operations import BODIES, CudaRunners, make_creators, register
from tests.plugins.plugin_driver import CUBIN, describe, fields_of, loaded, shapes_of

STREAM = 0x77


class AppendDriver(NotingDriver):
    """Holds the kernel of `append`."""

    ENTRIES = ("append_rows",)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *results = super().answer(name, arguments)
        sizes = {"cuFuncGetParamInfo": (0, ctypes.sizeof(CudaAppendParams)), "cuFuncGetAttribute": (256,)}
        return (status, *sizes.get(name, results))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> AppendDriver:
    noting = AppendDriver()
    monkeypatch.setattr(cuda_runner, "_load_driver", lambda: noting)
    return noting


def test_registering_twice_is_an_error() -> None:
    """In TensorRT-RTX's own registry, which a process has one of."""
    module = pytest.importorskip("tensorrt_rtx")
    registry = module.get_plugin_registry()
    plugins = register(module, registry)
    try:
        for body in BODIES.values():
            assert registry.get_creator(body.spec.name, "1", "commitkv") is not None
        with pytest.raises(PluginError, match="registered"):
            register(module, registry)
    finally:
        assert all(registry.deregister_creator(creator) for creator in plugins.creators.values())


def test_an_engine_launches_its_own_cubins_on_tensorrts_stream(trt: Any, driver: AppendDriver) -> None:
    plugins = make_creators(trt, CudaRunners())
    plugin: Any = loaded(plugins, "append", fields_of("append"))
    assert [arguments[0][: len(CUBIN)] for arguments in driver.named("cuModuleLoadData")] == [CUBIN]
    shapes = shapes_of(plugin)
    descs = describe(plugins, plugin, shapes)
    plugin.on_shape_change(descs, [])
    inputs = [0x1000 * (index + 1) for index in range(len(descs))]
    aliased = [inputs[plugin.get_aliased_input(index)] for index in (1, 2)]
    plugin.enqueue(descs, [], inputs, [0x90000, *aliased], 0, STREAM)
    (launch,) = driver.named("cuLaunchKernel")
    params = CudaAppendParams.from_buffer_copy(launch[9])
    assert (launch[0], launch[8]) == ("function append_rows", STREAM)
    assert (params.q, params.slots, params.pages, params.q_out) == (0x1000, 0x6000, 0x7000, 0x90000)
    assert (params.rows, params.q_heads, params.num_slots) == (shapes["q"][0], 6, shapes["pages"][0] * 8)


def test_nothing_is_loaded_while_a_graph_may_be_captured(trt: Any, driver: AppendDriver) -> None:
    plugins = make_creators(trt, CudaRunners())
    plugin: Any = loaded(plugins, "append", fields_of("append"))
    before = len(driver.named("cuModuleLoadData"))
    for _ in range(2):  # clones and further contexts share what is loaded
        plugin = plugin.attach_to_context(None)
    assert len(driver.named("cuModuleLoadData")) == before == 1
    other = replace(fields_of("append"), append_cubin=b"another engine's")
    loaded(plugins, "append", other)
    assert len(driver.named("cuModuleLoadData")) == 2


def test_a_gpu_of_another_kind_refuses_the_engine(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "_load_driver", lambda: AppendDriver(capability=(8, 9)))
    with pytest.raises(UnsupportedSmError, match=r"got sm_89, expected sm_90a"):
        loaded(make_creators(trt, CudaRunners()), "append", fields_of("append"))


def test_without_a_driver_an_engine_is_built_but_not_loaded(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise DriverError("no NVIDIA driver")

    monkeypatch.setattr(cuda_runner, "_load_driver", refuse)
    plugins = make_creators(trt, CudaRunners())
    built: Any = plugins.creators["append"].make(fields_of("append"))
    built.attach_to_context(None)
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        loaded(plugins, "append", fields_of("append"))
