"""Reading of perf_analyzer's files, cut from a run of version 2.51; the tool itself is not part of the suite."""

import json
from pathlib import Path

import pytest

from perf.load.command import ToolError
from perf.load.perf_analyzer import (
    LIBRARIES,
    Point,
    input_data,
    library_path,
    main,
    markdown,
    read_point,
    token_times,
)  # fmt: skip
from perf.server import find_triton

CSV = (
    "Concurrency,Inferences/Second,Response Throughput,Client Send,Network+Server Send/Recv,Server Queue,"
    "Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,"
    "p99 latency\n2,5.93883,20.7859,0,262358,2785,109,20036,10,0,291524,352249,352249,352250\n"
)
BEGIN = 1796032679411730223


def exported(*after_ms: int) -> dict[str, object]:
    return {"timestamp": BEGIN, "response_timestamps": [BEGIN + ms * 1_000_000 for ms in after_ms]}


def test_the_last_response_of_a_stream_is_no_token() -> None:
    first, between = token_times([exported(100, 120, 150, 160), exported(80, 90)], streamed=True)
    assert first == pytest.approx([0.1, 0.08], abs=1e-6) and between == pytest.approx([0.02, 0.03], abs=1e-6)
    whole, none = token_times([exported(100)], streamed=False)
    assert whole == pytest.approx([0.1], abs=1e-6) and none == []
    assert token_times([exported()], streamed=True) == ([], [])


def test_a_point_is_read_from_the_tools_own_files(tmp_path: Path) -> None:
    table, export = tmp_path / "t.csv", tmp_path / "e.json"
    table.write_text(CSV, encoding="utf-8")
    export.write_text(json.dumps({"experiments": [{"requests": [exported(100, 120, 130)]}]}), encoding="utf-8")
    one = read_point(Point("concurrency", 2.0, True), table, export)
    assert one.requests_per_s == pytest.approx(5.93883) and one.requests == 1
    assert one.latency_ms == pytest.approx({"p50": 291.524, "p95": 352.249, "p99": 352.25})
    assert one.ttft_ms.p50 == pytest.approx(100, abs=0.01)
    row = markdown([one]).split("\n")[-1]
    assert row == "| 2 at once, streamed | 5.94 | 292 / 352 / 352 | 100 / 100 | 20 / 20 |"


@pytest.mark.parametrize("text", ["", "Concurrency\n1\n", CSV.replace("5.93883", "fast")])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    table, export = tmp_path / "t.csv", tmp_path / "e.json"
    table.write_text(text, encoding="utf-8")
    export.write_text('{"experiments": [{"requests": []}]}', encoding="utf-8")
    with pytest.raises(ToolError, match=r"cannot read"):
        read_point(Point("concurrency", 1.0, False), table, export)


def test_loads_become_arguments() -> None:
    assert Point("concurrency", 4.0, True).arguments == ["--concurrency-range=4"]
    rate = Point("request_rate", 0.5, False)
    assert rate.arguments[0] == "--request-rate-range=0.5:0.5" and rate.label == "0.5 per s, whole"


def test_prompts_follow_the_seed_and_leave_optional_inputs_out() -> None:
    data = input_data(20, 6, True, seed=1)["data"]
    assert data == input_data(20, 6, True, seed=1)["data"] != input_data(20, 6, True, seed=2)["data"]
    assert set(data[0]) == {"text_input", "streaming", "sampling_param_max_tokens"}
    assert data[0]["streaming"] == {"content": [True], "shape": [1]}


def test_the_wheel_holds_the_libraries_that_the_tool_needs() -> None:
    with library_path(find_triton()) as path:
        directory = Path(path.split(":")[0])
        assert {name: (directory / name).exists() for name in LIBRARIES} == dict.fromkeys(LIBRARIES, True)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--concurrency", "0"], "--concurrency"), (["--rates", "x"], "--rates"), ([], "make load-tools")],
)
def test_faults_are_one_line(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--binary", str(tmp_path / "none"), "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and part in error and error.count("\n") == 1
