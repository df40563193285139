"""runtime/serving/README.md against the code: its tensors, flags, metrics and the tests that its claims name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from perf import serve
from runtime.serving import contract, older_names, responses
from runtime.serving.metric_table import ALL_METRICS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "runtime" / "serving" / "README.md").read_text(encoding="utf-8")
DTYPES = {"STRING", "BOOL", "INT32", "INT64", "UINT64", "FP32"}
INPUTS = {"`tensorrt_llm`": contract.INPUTS, "`ensemble`": older_names.INPUTS}
OUTPUTS = {"`tensorrt_llm`": responses.OUTPUTS, "`ensemble`": older_names.OUTPUTS}


def section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def tables(heading: str) -> dict[str, list[list[str]]]:
    """Rows of cells by the first word of the table's head, without head and rule."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n?)+", section(heading), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()]
        assert all(len(row) == len(head) for row in rows), head
        found[head[0].split()[0]] = rows
    return found


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tensors(heading: str, kind: str) -> dict[str, str]:
    """Name of every tensor in a table: its type, with its shape."""
    listed = [(name, row[1]) for row in tables(heading)[kind] for name in names_in(row[0])]
    assert len(dict(listed)) == len(listed), "a tensor stands there twice"
    return dict(listed)


@pytest.mark.parametrize("model", INPUTS)
def test_every_input_is_in_the_table_with_its_type(model: str) -> None:
    listed = tensors(model, "input")
    assert {name: text.split()[0] for name, text in listed.items()} == {n: s.dtype for n, s in INPUTS[model].items()}
    shapes = {"one": "", "list": "[n]", "pairs": "[n, 2]"}
    for name, spec in INPUTS[model].items():
        assert listed[name].removeprefix(spec.dtype).strip() == shapes[spec.kind], name


@pytest.mark.parametrize("model", OUTPUTS)
def test_every_output_is_in_the_table_with_its_type(model: str) -> None:
    known: Mapping[str, str] = OUTPUTS[model]
    assert {name: text.split()[0] for name, text in tensors(model, "output").items()} == dict(known)


def test_defaults_of_limits_are_those_of_the_command() -> None:
    parser = serve._parser()
    defaults = {option: action.default for action in parser._actions for option in action.option_strings}
    for row in tables("Limits")["flag"]:
        for flag in names_in(row[0]):
            assert float(row[1].split(":")[0]) == defaults[flag], flag
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= defaults.keys()


def test_metrics_that_are_named_are_exported() -> None:
    named = set(re.findall(r"`((?:commitkv|nv_trt_llm|nv_llm)_\w+)`", section("Seen from outside")))
    assert len(named) > 5 and named <= {spec.name for spec in ALL_METRICS}


def test_every_row_of_the_security_table_names_tests_that_there_are() -> None:
    rows = tables("Security")["what"]
    assert len(rows) > 12
    for what, shown_by in rows:
        tests = names_in(shown_by)
        assert tests, what
        for test in tests:
            path, _, name = test.partition("::")
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), test


def test_links_lead_somewhere() -> None:
    for path in re.findall(r"\]\(([^)]+)\)|`(\.\./[^`]+\.\w+)`", README):
        assert (ROOT / "runtime" / "serving" / (path[0] or path[1])).is_file(), path
