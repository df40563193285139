"""TensorRT's real Python bindings on a machine without TensorRT."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plugins.native_build import find_compiler

if TYPE_CHECKING:
    from plugins.trt_operations import Plugins


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libraries that the bindings can be imported over; they do nothing."""
    from tests.plugins.stub_libs.stub_bindings import build_libraries

    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("tensorrt-cu13-bindings is not installed")
    if find_compiler() is None:
        pytest.skip("stub libraries need a C++ compiler")
    folder = tmp_path_factory.mktemp("tensorrt")
    build_libraries(folder)
    return folder


@pytest.fixture(scope="session")
def trt(stub_folder: Path) -> Any:
    """The bindings' module."""
    from tests.plugins.stub_libs.stub_bindings import load_bindings

    return load_bindings(stub_folder)


@pytest.fixture
def plugins(trt: Any) -> Plugins:
    """Creators on the bindings, whose plugins launch on the emulation."""
    from tests.plugins.plugin_driver import make_plugins

    return make_plugins(trt)
