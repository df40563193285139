"""Training of the merging network: spans and errors are what they say, what can be learned is, and a run loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from perf.train_merge import WAYS, Told, compare, error, main, make_spans, train
from runtime import gates

D, LAYERS, GROUP = 8, 2, 2


def told(num_tokens: int = 400, seed: int = 0) -> Told:
    """Two layers of one KV head. Queries look for keys with a large first channel, which scores say nothing of."""
    gen = torch.Generator().manual_seed(seed)
    kv = torch.randn(LAYERS, num_tokens, 2, D, generator=gen)
    positions = torch.arange(0, num_tokens, 8)
    queries = 0.1 * torch.randn(LAYERS, positions.shape[0], GROUP, D, generator=gen)
    queries[..., 0] = 8.0
    loose = torch.arange(num_tokens) >= 4
    return Told(kv, torch.rand(LAYERS, num_tokens, generator=gen), loose, queries, positions)


def test_spans_are_what_falls_below_one_line_in_runs() -> None:
    one = told()
    spans = [make_spans(one, 5, 0.3, row) for row in range(LAYERS)]
    older = 240 - 128 - 4
    kept = 0
    for row, found in enumerate(spans):
        assert found is not None
        count = found.number.shape[0]
        assert count % 5 == 0 and found.number.tolist() == [i // 5 for i in range(count)]
        line = one.scores[:, 4:112].flatten().topk(round(0.3 * LAYERS * older)).values[-1]
        below = [i for i in range(4, 112) if one.scores[row, i] < line]
        kept += older - len(below)
        torch.testing.assert_close(found.members.keys, one.kv[row, below[:count], 0])
        assert found.queries.shape == (20 * GROUP, D), "positions 240, 248, ..., 392"
    assert kept == round(0.3 * LAYERS * older)
    assert make_spans(one, 200, 0.3, 0) is None


def test_an_error_is_that_of_attention() -> None:
    one = told()
    spans = make_spans(one, 10, 0.3, 1)
    assert spans is not None
    count = spans.number.shape[0]
    alone = error(spans, torch.arange(count), torch.ones(count))
    assert float(alone) == pytest.approx(0.0, abs=1e-8), "sets of one merge nothing"
    q, last = spans.queries[0], 240
    logits = one.kv[1, : last + 1, 0] @ q * D**-0.5
    torch.testing.assert_close(logits.softmax(0) @ one.kv[1, : last + 1, 1], spans.full_out[0], atol=1e-5, rtol=1e-4)
    dropped = error(spans, None, torch.ones(count))
    expected = (spans.rest_out - spans.full_out).square().sum() / spans.full_out.square().sum()
    assert float(dropped) == pytest.approx(float(expected)) and float(dropped) > 0


def test_what_can_be_learned_is() -> None:
    def spans_of(seed: int) -> list[tuple[int, object]]:
        return [(row, make_spans(told(seed=seed), 10, 0.1, row)) for row in range(LAYERS)]

    made = {row: [spans] for row, spans in spans_of(0)}
    weights = train(made, LAYERS, hidden=4, steps=150)  # type: ignore[arg-type]
    found = compare(spans_of(0), weights)  # type: ignore[arg-type]
    assert tuple(found) == WAYS and found["learned"] < 0.7 * min(found["weighted"], found["mean"])
    untrained = train(made, LAYERS, hidden=4, steps=1)  # type: ignore[arg-type]
    assert compare(spans_of(0), untrained)["learned"] == pytest.approx(found["weighted"], rel=0.05), "it begins there"


def test_a_run_writes_weights_that_load(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"talk{i}.jsonl" for i in range(2)]
    words = "Some words about trains and towns. " * 8
    lines = [{"role": "user", "content": f"Turn {i}. {words}"} for i in range(3)]
    for data in files:
        data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "tiny.merge.safetensors"
    arguments = ["--engine", str(tiny_engine_dir), "--steps", "4", "--max-tokens", "2", "--hidden", "3"]
    assert main([*arguments, "--data", *map(str, files), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "held out" in printed and all(f"| {size} | " in printed for size in (5, 10, 20, 50))
    monkeypatch.setattr(gates, "GATES_DIR", tmp_path)
    weights = gates.load_merger(output.name, torch.device("cpu"))
    assert weights.hidden.shape == (4, 2 * 16 + 1, 3) and weights.score.shape == (4,)
    assert float(weights.score.mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--keep", "1.5"], "--keep"),
    (["--steps", "0"], "--steps"),
    (["--hidden", "0"], "--hidden"),
    (["--data", "one.jsonl"], "--data"),
    (["--data", "nowhere.jsonl", "nowhere.jsonl"], "nowhere.jsonl"),
])  # fmt: skip
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
