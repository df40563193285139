"""The TensorRT plugins of all operations, and their registration. Importing this registers nothing.

`register` once in a process, before an engine is built or loaded, and keep what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from plugins.append.plugin import AppendPlugin
from plugins.attend.plugin import AttendPlugin
from plugins.commit.plugin import CommitPlugin
from plugins.cuda_runner import CudaRunner
from plugins.errors import PluginError, UnsupportedSmError
from plugins.kernel import Kernel, KernelRunner
from plugins.score.plugin import ScorePlugin
from plugins.trt_plugin import (
    NAMESPACE,
    PluginCreator,
    PluginSetup,
    RunnerFactory,
    TensorRT,
    TrtPlugin,
    bind,
    bind_creator,
)

if TYPE_CHECKING:
    import tensorrt as trt

BODIES: dict[str, type[TrtPlugin[Any]]] = {
    "append": AppendPlugin,
    "attend": AttendPlugin,
    "score": ScorePlugin,
    "commit": CommitPlugin,
}


class CudaRunners:
    """Launches engines' cubins on one GPU: a `RunnerFactory`. Plugins with the same cubins share a runner."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: a CUDA device, default the first. It is looked at when the first plugin is attached."""
        self._device = device
        self._runners: dict[frozenset[tuple[Kernel, bytes]], CudaRunner] = {}

    def __call__(self, sm: str, cubins: Mapping[Kernel, bytes]) -> KernelRunner:
        """Loads the cubins, so that launches may be captured in a graph.

        Raises UnsupportedSmError on a GPU that is no `sm`, DriverError, MissingPackageError.
        """
        key = frozenset(cubins.items())
        if key not in self._runners:
            runner = CudaRunner(self._device, cubins)
            if runner.sm != sm:
                raise UnsupportedSmError(
                    f"{runner.device}: got {runner.sm}, expected {sm}, which the engine's kernels are for; build it "
                    f"again on this GPU"
                )
            runner.warm(cubins)
            self._runners[key] = runner
        return self._runners[key]


@dataclass(frozen=True, eq=False)
class Plugins:
    """Creators by operation. Keep it while networks or engines with the plugins live."""

    setup: PluginSetup
    creators: Mapping[str, PluginCreator]


def make_creators(module: TensorRT, make_runner: RunnerFactory) -> Plugins:
    """The creators of all operations, not registered."""
    setup = PluginSetup(module, make_runner)
    creator_class = bind_creator(module)
    return Plugins(setup, {name: creator_class(bind(module, body), setup) for name, body in BODIES.items()})


def register(module: TensorRT, registry: trt.IPluginRegistry, make_runner: RunnerFactory | None = None) -> Plugins:
    """Creators of all operations, registered. make_runner: default CudaRunners of the first GPU.

    Raises PluginError where the registry has plugins of these names.
    """
    plugins = make_creators(module, CudaRunners() if make_runner is None else make_runner)
    for creator in plugins.creators.values():
        made: Any = creator  # an IPluginCreatorV3One, see `bind_creator`
        if not registry.register_creator(made, NAMESPACE):
            raise PluginError(
                f"{creator.name}: a plugin of this name is registered; register once in a process and keep the result"
            )
    return plugins
