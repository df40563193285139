"""What judges a soak, and the requests it provokes errors with; the soak itself runs in tests/triton/test_load.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

sys.path.append(str(Path(__file__).parent))
from fuzz_engine import as_input_tensor

from perf.client import tensor
from perf.load.fuzz_cases import FuzzTensor
from perf.load.misuse import BAD_REQUESTS
from perf.load.soak import SoakReport, main, text_of
from runtime.errors import RequestError
from runtime.serving.contract import EndCall, Origin, StatsCall, TurnCall, parse_call
from runtime.serving.tensors import InputTensor

GOOD = SoakReport(600.0, {"take_turn": 9}, 0, (), 700.0, 714.0, {"KV bytes": 0, "conversations": 0})
# What only the engine can refuse: it needs the conversations, the policies or the tokenizer.
LEFT_TO_THE_ENGINE = {
    "text far beyond the longest prompt", "unknown policy", "end of an unknown conversation",
    "figures of an unknown conversation",
}  # fmt: skip


def as_input(made: grpcclient.InferInput) -> InputTensor:
    """A client's tensor as the server's model gets it."""
    plain = as_input_tensor(FuzzTensor(made.name(), made.datatype(), tuple(made.shape()), made._get_content()))
    assert plain is not None
    return plain


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused_by_the_contract_or_left_to_the_engine(name: str) -> None:
    made = [v if isinstance(v, grpcclient.InferInput) else tensor(n, v) for n, v in BAD_REQUESTS[name].items()]
    tensors = [as_input(one) for one in made]
    if name in LEFT_TO_THE_ENGINE:
        assert isinstance(parse_call(tensors, Origin("x")), TurnCall | EndCall | StatsCall)
        return
    with pytest.raises(RequestError, match=r"expected|unknown"):
        parse_call(tensors, Origin("x"))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_problems": 2}, "2 errors"),
        ({"last_third_mib": 722.0}, "resident memory changed by +3.1%"),
        ({"last_third_mib": 678.0}, "resident memory changed by -3.1%"),
        ({"left_behind": {"KV bytes": 64, "conversations": 0}}, "left behind: 64 KV bytes"),
    ],
)
def test_a_soak_fails_for_each_fault_alone(changes: dict[str, object], part: str) -> None:
    assert GOOD.failures == ()
    [failure] = replace(GOOD, **changes).failures  # type: ignore[arg-type]
    assert part in failure


def test_the_report_says_what_was_done_and_seen() -> None:
    text = text_of(replace(GOOD, num_problems=1, problems=("overlap: both were refused",)))
    assert "9 take_turn" in text and "overlap: both were refused" in text and "+2.00%" in text


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "nan"], ["--clients", "0"]])
def test_bad_arguments_are_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: --minutes, --clients")
