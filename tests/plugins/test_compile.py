"""Cubins: caching, errors, and what the hardware words become on each architecture."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emulation_cases import SOURCES, exchange_kernel, pipeline_kernel

from plugins import compile as compiling
from plugins.compile import SMS, compile_cubin, resource_usage, sass
from plugins.errors import CompileError, MissingPackageError, UnsupportedSmError
from plugins.kernel import Kernel


def have_nvrtc() -> bool:
    try:
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="needs cuda-python and nvidia-cuda-nvrtc")


def instructions(kernel: Kernel, sm: str, entry: str) -> set[str]:
    """Names of the instructions of an entry, without their suffixes."""
    text = sass(compile_cubin(kernel, sm))[entry]
    return {name.split(".")[0] for name in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", text)}


@needs_nvrtc
@pytest.mark.parametrize("element", (0, 1))
@pytest.mark.parametrize("sm", SMS)
def test_words_become_the_instructions_of_each_architecture(sm: str, element: int) -> None:
    found = instructions(pipeline_kernel(element), sm, "pipeline")
    bulk = sm in ("sm_90a", "sm_120")
    assert {"HMMA", "LDSM", "BAR"} <= found
    assert ("UBLKCP" in found) == bulk and ("LDGSTS" in found) == (not bulk)
    assert ("SYNCS" in found) == bulk  # before sm_90 barriers are plain atomics on shared memory
    assert not found & {"LDL", "STL"}
    exchange = instructions(exchange_kernel(), sm, "exchange")
    assert ("UBLKCP" in exchange) == bulk and {"SHFL", "BAR"} <= exchange


@needs_nvrtc
def test_copies_without_the_bulk_unit_on_hopper() -> None:
    found = instructions(pipeline_kernel(no_bulk=1), "sm_90a", "pipeline")
    assert {"LDGSTS", "ARRIVES", "SYNCS"} <= found and "UBLKCP" not in found


@needs_nvrtc
def test_a_cubin_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin(exchange_kernel(), "sm_90a", cache_dir=tmp_path)
    assert first[:4] == b"\x7fELF" and len(list(tmp_path.iterdir())) == 1

    def never(*_: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_compile", never)
    assert compile_cubin(exchange_kernel(), "sm_90a", cache_dir=tmp_path) == first
    for kernel, sm, options in (
        (exchange_kernel(no_bulk=1), "sm_90a", ()),
        (exchange_kernel(), "sm_89", ()),
        (exchange_kernel(), "sm_90a", ("-DHW_DEBUG",)),
    ):
        with pytest.raises(AssertionError, match="compiled again"):
            compile_cubin(kernel, sm, options, tmp_path)


@needs_nvrtc
def test_a_changed_source_or_header_is_compiled_again(tmp_path: Path) -> None:
    source, header = tmp_path / "exchange.cu", tmp_path / "own.cuh"
    source.write_text((SOURCES / "exchange.cu").read_text() + '\n#include "own.cuh"\n')
    cache, kernel = tmp_path / "cache", Kernel("exchange", source, ())
    for text in ("// one", "// two"):
        header.write_text(text)
        compile_cubin(kernel, "sm_90a", cache_dir=cache)
    source.write_text(source.read_text() + "// longer\n")
    compile_cubin(kernel, "sm_90a", cache_dir=cache)
    assert len(list(cache.iterdir())) == 3


@needs_nvrtc
def test_checks_cost_nothing_unless_debugging(tmp_path: Path) -> None:
    def traps(*options: str) -> bool:
        return "BPT.TRAP" in sass(compile_cubin(exchange_kernel(), "sm_90a", options, tmp_path))["exchange"]

    assert traps("-DHW_DEBUG") and not traps()


@needs_nvrtc
def test_what_a_kernel_takes() -> None:
    (used,) = resource_usage(compile_cubin(pipeline_kernel(), "sm_90a"))
    assert used.entry == "pipeline" and 16 <= used.registers <= 64 and used.stack_bytes == 0


@needs_nvrtc
def test_the_compilers_log_is_in_the_error(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('#include "hw.cuh"\nstruct P { int x; };\nHW_KERNEL(broken, P, 32, 1) { int y = p.z; }\n')
    with pytest.raises(CompileError, match=r'(?s)broken\(A=1\) for sm_90a.*broken.cu\(3\): error: .*no member "z"'):
        compile_cubin(Kernel("broken", source, (("A", 1),)), "sm_90a", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [source]


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedSmError, match="got 'sm_75', expected one of sm_80, sm_89, sm_90a, sm_120"):
        compile_cubin(exchange_kernel(), "sm_75")


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(compiling.importlib, "import_module", missing)
    with pytest.raises(MissingPackageError, match=r"No module named 'cuda.bindings.nvrtc'.*pip install cuda-python"):
        compile_cubin(exchange_kernel(), "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize("call", (resource_usage, sass))
def test_missing_headers_and_tools_say_what_to_install(
    call: Callable[[bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = compile_cubin(exchange_kernel(), "sm_90a")
    monkeypatch.setattr(compiling, "_wheel_folders", lambda: [])
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"cuda_fp16.h of nvidia-cuda-runtime; pip install"):
        compile_cubin(exchange_kernel(), "sm_90a")
    with pytest.raises(MissingPackageError, match=r"nvidia-cuda-(cuobjdump|nvdisasm); pip install"):
        call(cubin)


@needs_nvrtc
def test_no_cubin_at_all() -> None:
    for call in (resource_usage, sass):
        with pytest.raises(CompileError, match=r"(cuobjdump|nvdisasm)"):
            call(b"not a cubin")
