"""What we give to aiperf and read from it; the tool itself is not part of the suite."""

import json
from pathlib import Path

import pytest
from jinja2 import Environment

from perf.load.aiperf import TEMPLATE, _parser, command, dataset, main, markdown, read_figures

REPORT = {
    "request_latency": {"unit": "ms", "avg": 453.71, "p50": 415.3, "p95": 730.5, "p99": 747.1, "min": 200.0},
    "time_to_first_token": {"unit": "ms", "avg": 297.5, "p50": 281.5, "p95": 486.1, "p99": 503.0},
    "request_throughput": {"unit": "requests/sec", "avg": 1.43},
    "request_count": {"unit": "requests", "avg": 6.0},
    "error_request_count": None,
}


def test_figures_are_read_and_missing_ones_left_out() -> None:
    figures = read_figures(REPORT)
    assert (figures.turns, figures.errors) == (6, 0)
    assert figures.metrics["request_latency"] == {"avg": 453.71, "p50": 415.3, "p95": 730.5, "p99": 747.1}
    lines = markdown(figures).split("\n")
    assert lines[0] == "| 6 turns, 0 errors | avg | p50 | p95 | p99 |"
    assert "| whole turn, ms | 453.7 | 415.3 | 730.5 | 747.1 |" in lines and "| turns/s | 1.4 | - | - | - |" in lines
    assert read_figures({**REPORT, "error_request_count": {"avg": 2.0}}).errors == 2


def test_sessions_grow_by_the_seed() -> None:
    records = dataset(3, 2, 200, seed=1)
    assert records == dataset(3, 2, 200, seed=1) != dataset(3, 2, 200, seed=2)
    assert [len(record["turns"]) for record in records] == [2, 2, 2]
    assert all(set(turn) == {"text", "delay"} for record in records for turn in record["turns"])


def test_the_payload_is_json_with_the_sessions_own_id() -> None:
    template = Environment(autoescape=True).from_string(TEMPLATE.replace("MAX_TOKENS", "7"))
    text = 'say "<b>" & é\n'
    payload = json.loads(template.render(text=text, request_info={"x_correlation_id": "s-1"}))
    assert payload == {
        "text_input": text, "conversation_id": "s-1", "streaming": True, "sampling_param_max_tokens": 7,
    }  # fmt: skip


def test_the_command_names_files_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    args = _parser().parse_args(["--engine", str(tmp_path), "--output", str(tmp_path), "--sessions", "2"])
    words = command(args, "127.0.0.1:8000")
    assert "http://127.0.0.1:8000" in words and "/v2/models/tensorrt_llm/generate_stream" in words
    sessions, tokenizer = (Path(words[words.index(name) + 1]) for name in ("--input-file", "--tokenizer"))
    assert len(sessions.read_text(encoding="utf-8").splitlines()) == 2
    assert {path.name for path in tokenizer.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(("has_binary", "part"), [(False, "make load-tools"), (True, "--tokenizer")])
def test_faults_are_one_line(has_binary: bool, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "aiperf"
    if has_binary:
        binary.touch()
    arguments = ["--binary", str(binary), "--engine", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and part in error and error.count("\n") == 1
