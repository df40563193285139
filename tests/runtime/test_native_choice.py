"""Which forms an engine runs: native ones with a compiler, torch's without, said once."""

from __future__ import annotations

import logging

import pytest

from builder.lower_torch import TORCH_DECODER_FORMS
from plugins import native_build
from plugins.append.native import NativeAppend
from plugins.pointwise.native import NativePointwise
from runtime.executor_torch import TORCH_FORMS
from runtime.wiring import choose_forms


def test_without_a_compiler_torch_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "find_compiler", lambda: None)
    assert choose_forms(2) == (TORCH_DECODER_FORMS, TORCH_FORMS)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "compiler" in warnings[0]


@pytest.mark.skipif(native_build.find_compiler() is None, reason="needs a C++ compiler")
def test_with_a_compiler_native_forms_run(caplog: pytest.LogCaptureFixture) -> None:
    decoder_forms, forms = choose_forms(2)
    assert isinstance(decoder_forms.pointwise, NativePointwise) and isinstance(forms.append, NativeAppend)
    assert forms.publish is not TORCH_FORMS.publish and forms.draw_line is not TORCH_FORMS.draw_line
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
