"""Arguments for Triton's own trace; that Triton takes them is tested with a real server in tests/triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.request_trace import request_trace_arguments
from runtime.errors import ConfigError


def test_a_file_is_written_in_pieces(tmp_path: Path) -> None:
    arguments = request_trace_arguments(str(tmp_path / "trace.json"), 10)
    assert f"--trace-config=triton,file={tmp_path}/trace.json" in arguments
    assert "--trace-config=rate=10" in arguments
    assert any(argument.startswith("--trace-config=triton,log-frequency=") for argument in arguments)


def test_a_url_is_a_collector() -> None:
    arguments = request_trace_arguments("http://127.0.0.1:4318/v1/traces", 1)
    assert "--trace-config=mode=opentelemetry" in arguments
    assert "--trace-config=opentelemetry,url=http://127.0.0.1:4318/v1/traces" in arguments
    assert not any("file=" in argument for argument in arguments)


def test_no_trace_is_no_argument() -> None:
    assert request_trace_arguments(None, 1) == ()


@pytest.mark.parametrize(
    ("target", "every", "part"),
    [("trace.json", 0, "--request-trace-every: got 0"), ("nowhere/at/all.json", 1, "--request-trace: no directory")],
)
def test_what_cannot_work_is_refused(tmp_path: Path, target: str, every: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        request_trace_arguments(str(tmp_path / target), every)
