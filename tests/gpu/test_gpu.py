"""The checks of `checks.py`: on a card with the marker gpu, and some of them here with emulated kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from plugins.emulation.runner import EmulatedRunner
from plugins.native_build import find_compiler
from runtime.gpu import GpuKernels, open_gpu, open_kernels
from tests.gpu import checks


@pytest.fixture(scope="module")
def kernels() -> GpuKernels:
    return open_kernels(open_gpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", checks.CHECKS)
def test_on_a_card(kernels: GpuKernels, name: str) -> None:
    checks.CHECKS[name](kernels)


@pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
def test_the_checks_hold_for_emulated_kernels_and_catch_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = GpuKernels(EmulatedRunner(seed=3), "sm_90a")
    checks.check_append(emulated)
    named = ("small chunks over history", "small squares")
    chunks = [case for case in checks.ATTEND_CASES if case.name in named]
    checks.check_attend(emulated, tuple(chunks))
    right = checks.attend_reference.attend

    def wrong(params):  # type: ignore[no-untyped-def]
        return right(dataclasses.replace(params, scale=1.1 * params.scale))

    monkeypatch.setattr(checks.attend_reference, "attend", wrong)
    with pytest.raises(AssertionError, match="attend small chunks over history, out: differs by"):
        checks.check_attend(emulated, tuple(chunks))


def test_texts_may_part_at_near_ties_only() -> None:
    expected = ["abcdef", "ghijkl"]
    near = [False] * 12
    checks.same_text("same", list(expected), expected, near)
    near[8] = True
    checks.same_text("near tie", ["abcdef", "ghXXXX"], expected, near)
    with pytest.raises(AssertionError, match="token 7 of 12 is 'X', expected 'h'"):
        checks.same_text("wrong", ["abcdef", "gXXXXX"], expected, near)
    near[1] = True
    with pytest.raises(AssertionError, match="part at token 1 already"):
        checks.same_text("too early", ["aXcdef", "ghijkl"], expected, near)


def test_lost_and_leaked_nan_are_seen() -> None:
    held = torch.tensor([1.0, torch.nan, torch.inf])
    checks.close("same", held, held.double())
    for got in (torch.tensor([1.0, 2.0, torch.inf]), torch.tensor([torch.nan, torch.nan, torch.inf])):
        with pytest.raises(AssertionError, match="NaN leaked or was lost"):
            checks.close("x", got, held.double())
    with pytest.raises(AssertionError, match="differs by"):
        checks.close("x", torch.tensor([1.0, torch.nan, 5.0]), held.double())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert checks.main() == 2
    assert "gpu: device: got cuda, but" in capsys.readouterr().err
