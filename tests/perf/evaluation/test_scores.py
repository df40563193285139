"""Scores are what their definitions give, by hand; results survive an interrupted run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from perf.evaluation.hold import Raw, Store, compare
from perf.evaluation.report import markdown, write
from perf.evaluation.scores import Answer, Held, clustered_mean, score
from perf.evaluation.tasks import Question, Task
from runtime.errors import ConfigError

TASK = Task(3, 100, "", ("a", "b", "c", "d"), (
    Question("fact", "?", "x", (" a", " b", " c", " d"), 0), Question("rule", "?", "x", (" a", " b", " c", " d"), -1),
))  # fmt: skip


def answer(choice: int, kl: float, same: bool = True, age: float = 0.9, kind: str = "fact") -> Answer:
    return Answer(kind, age, choice, 1.0, kl, same, same)


def held(policy: str, seed: int, *answers: Answer, kv_bytes: int = 25) -> Held:
    return Held(policy, 100, seed, 90, kv_bytes, 100, 1.0, answers)


def test_a_mean_over_clusters() -> None:
    mean = clustered_mean([[1.0, 0.0], [1.0, 1.0, 1.0], [0.0]])
    assert mean.value == pytest.approx(4 / 6)
    # By hand: residual sums 1 - 4/3, 3 - 2, 0 - 2/3.
    expected = math.sqrt(1.5 * ((1 / 3) ** 2 + 1.0 + (2 / 3) ** 2)) / 6
    assert mean.error == pytest.approx(expected)
    assert math.isnan(clustered_mean([[1.0]]).error)


def test_scores_by_hand() -> None:
    full = [held("full", 0, answer(0, 0.0), answer(1, 0.0)), held("full", 1, answer(0, 0.0))]
    ours = [
        held("p", 0, answer(0, 0.2), answer(1, 0.0, kind="rule", age=0.1)),
        held("p", 1, answer(2, 0.05, same=False, age=0.5)),
    ]
    result = score(ours, full)
    assert (result.kv_share, result.questions, result.conversations) == (0.25, 3, 2)
    assert result.accuracy.value == pytest.approx(1 / 3)
    assert result.accuracy_change.value == pytest.approx(-1 / 3)
    assert result.kl.value == pytest.approx(0.25 / 3) and result.worst_kl == 0.2
    # The first is too far away (0.2 > 0.1), the last one chose otherwise.
    assert result.equivalent.value == pytest.approx(1 / 3)
    assert result.by_kind == {"fact": (0.5, 0.125), "rule": (0.0, 0.0)}
    assert result.by_age == {"oldest third": (1.0, 0.2), "middle third": (0.0, 0.05), "newest third": (0.0, 0.0)}


def test_a_policy_is_paired_with_the_same_tasks() -> None:
    with pytest.raises(AssertionError):
        score([held("p", 1, answer(0, 0.0))], [held("full", 2, answer(0, 0.0))])


def raw(logits: list[list[float]]) -> Raw:
    return Raw(torch.log_softmax(torch.tensor(logits), dim=1), torch.tensor([[0, 1, 2, 3]] * 2), 90, 25, 100, 1.0)


def test_answers_are_compared_with_the_full_distribution() -> None:
    full, ours = (
        raw([[2.0, 0.0, 0.0, 0.0, 9.0], [0.0, 3.0, 0.0, 0.0, 0.0]]),
        raw([[0.0] * 5, [0.0, 1.0, 0.0, 0.0, 5.0]]),
    )
    first, second = compare(TASK, "p", ours, full.logprobs).answers
    whole = full.logprobs[0]
    assert first.kl == pytest.approx(float((whole.exp() * (whole - ours.logprobs[0])).sum()))
    assert first.nll == pytest.approx(math.log(5.0))
    assert (first.choice, first.age) == (0, 0.75)
    assert (second.choice, second.same_choice, second.same_word, second.age) == (1, True, False, 1.0)
    assert all(
        a.kl == 0.0 and a.same_word and a.same_choice for a in compare(TASK, "full", full, full.logprobs).answers
    )


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path, "key")
    first = dataclasses.replace(held("p", 3, answer(0, 0.1)), num_tokens=100)
    assert store.get("p", TASK) is None and store.full_logprobs(TASK) is None
    store.put(first)
    store.put_full(TASK, torch.randn(2, 5))
    again = Store(tmp_path, "key")
    assert again.get("p", TASK) == first and again.full_logprobs(TASK).shape == (2, 5)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="another engine"):
        Store(tmp_path, "other key")
    with (tmp_path / "held.jsonl").open("a") as stream:
        stream.write('{"policy": "p"\n')
    with pytest.raises(ConfigError, match="line 2"):
        Store(tmp_path, "key")


def test_a_report_shows_every_policy_and_length(tmp_path: Path) -> None:
    full = [held("full", 0, answer(0, 0.0)), held("full", 1, answer(1, 0.0))]
    ours = [held("p budget_ratio=0.2", 0, answer(0, 0.1)), held("p budget_ratio=0.2", 1, answer(1, 0.2))]
    scores = [score(full, full), score(ours, full)]
    scores += [dataclasses.replace(s, num_tokens=4000) for s in scores]
    write(scores, tmp_path, "tiny")
    text, page = markdown(scores), (tmp_path / "index.html").read_text(encoding="utf-8")
    assert text.count("| p budget_ratio=0.2 | 0.250 | 0.500 ± 0.500 | +0.000 ± 0.000 |") == 2
    assert "4,000 tokens" in page and "p budget_ratio=0.2" in page and "data:image/png;base64," in page
    assert (tmp_path / "quality.json").is_file() and (tmp_path / "quality.png").stat().st_size > 1000
