"""The quick evaluation on the real model: what CommitKV promises of quality, held to with room for the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from builder.build import main as build

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quick_evaluation_finds_commitkv_near_the_full_cache(tmp_path: Path) -> None:
    engine, output = tmp_path / "engine", tmp_path / "eval"
    assert build(["--output", str(engine)]) == 0
    # A process of its own, since tests before this one may have taken threads from torch here.
    command = [sys.executable, "-m", "perf.evaluate", "--engine", str(engine), "--output", str(output), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scores = {score["policy"]: score for score in json.loads((output / "quality.json").read_text())["scores"]}
    full, ours, int4 = (scores[name] for name in ("full", "commitkv", "quantize-int4"))
    assert full["kl"]["value"] == 0.0 and full["questions"] >= 60
    assert ours["kv_share"] < 0.35 < int4["kv_share"]
    assert ours["kl"]["value"] < min(0.04, int4["kl"]["value"])
    assert ours["equivalent"]["value"] > 0.85
    assert abs(ours["accuracy_change"]["value"]) < 0.07
    assert (output / "index.html").is_file() and (output / "quality.png").is_file()
