"""Sampling: greedy, penalties, truncation, reproducible draws, log-probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sampling import sample
from runtime.step import SampleSpec

VOCAB = 50


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def support(logits: torch.Tensor, spec: SampleSpec) -> set[int]:
    """Tokens that a fine grid of uniforms reaches."""
    n = 4000
    specs = [replace(spec, uniform=i / n) for i in range(n)]
    return {token for token, _ in sample(logits.expand(n, -1), specs)}


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = logits_of(0, 3)
    logits[1, [7, 30]] = 99.0
    specs = [SampleSpec(), SampleSpec(), SampleSpec(temperature=1.0, top_k=1, uniform=0.9)]
    got = sample(logits, specs)
    assert [t for t, _ in got] == [int(logits[0].argmax()), 7, int(logits[2].argmax())]
    assert all(logprob is None for _, logprob in got)


def test_draws_follow_the_distribution() -> None:
    logits, n = logits_of(1), 20000
    specs = [SampleSpec(temperature=0.7, uniform=(i + 0.5) / n) for i in range(n)]
    counts = Counter(token for token, _ in sample(logits.expand(n, -1), specs))
    expected = (logits[0].double() / 0.7).softmax(-1)
    got = torch.tensor([counts[t] / n for t in range(VOCAB)], dtype=torch.float64)
    assert (got - expected).abs().max() <= 1.01 / n


@pytest.mark.parametrize("top_k", [2, 5, 49, 50, 1000])
def test_top_k_keeps_the_k_largest(top_k: int) -> None:
    logits = logits_of(2) * 0.3
    best = set(logits[0].topk(min(top_k, VOCAB)).indices.tolist())
    assert support(logits, SampleSpec(temperature=1.0, top_k=top_k)) == best


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float) -> None:
    logits = logits_of(3) * 0.5
    probs, ids = logits[0].double().softmax(-1).sort(descending=True)
    count = int((probs.cumsum(0) < top_p).sum()) + 1
    assert support(logits, SampleSpec(temperature=1.0, top_p=top_p)) == set(ids[:count].tolist())


def test_top_k_of_equal_logits_keeps_exactly_k() -> None:
    assert support(torch.zeros(1, VOCAB), SampleSpec(temperature=1.0, top_k=3)) == {0, 1, 2}


def test_penalties_count_as_defined() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 5.0, 4.5, 4.2
    spec = SampleSpec(history=(3, 3, 4), frequency_penalty=0.3, presence_penalty=0.2)  # 4.2, 4.0, 4.2: 3 is first
    assert sample(logits, [spec])[0][0] == 3
    assert sample(logits, [replace(spec, frequency_penalty=0.31)])[0][0] == 5
    assert sample(logits, [replace(spec, frequency_penalty=-1.0, presence_penalty=0.0)])[0][0] == 3
    assert logits[0, 3] == 5.0


def test_forbidden_is_never_chosen() -> None:
    logits = logits_of(4)
    top = int(logits.argmax())
    assert sample(logits, [SampleSpec(forbidden=(top,))])[0][0] != top
    assert top not in support(logits, SampleSpec(temperature=1.0, forbidden=(top,)))
    assert support(logits, SampleSpec(temperature=1.0, forbidden=tuple(range(1, VOCAB)))) == {0}


def test_logprob_is_of_the_unmodified_distribution() -> None:
    logits = logits_of(5)
    spec = SampleSpec(temperature=0.2, top_k=3, history=(1, 2), presence_penalty=2.0, want_logprob=True, uniform=0.6)
    token, logprob = sample(logits, [spec])[0]
    assert logprob == pytest.approx(float(logits[0].double().log_softmax(-1)[token]), rel=1e-9)


@given(
    seed=st.integers(0, 50),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 4, 50, 60]),
    top_p=st.sampled_from([1e-6, 0.5, 0.95, 1.0]),
    history=st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_alone_equals_in_a_batch(
    seed: int, uniform: float, temperature: float, top_k: int, top_p: float, history: list[int]
) -> None:
    spec = SampleSpec(temperature, top_k, top_p, 0.5, 0.5, uniform, tuple(history), True, (3,))
    others = [SampleSpec(), SampleSpec(temperature=1.3, top_p=0.5, uniform=0.4), SampleSpec(temperature=0.9, top_k=7)]
    logits = logits_of(seed, 4)
    alone = sample(logits[2:3], [spec])[0]
    assert sample(logits, [others[0], others[1], spec, others[2]])[2] == alone
    assert alone[0] != 3 and alone[1] is not None


def test_extreme_logits_stay_defined() -> None:
    logits = torch.full((2, VOCAB), -1e30)
    logits[:, 9] = 1e30
    got = sample(logits, [SampleSpec(temperature=1e-300, top_p=0.9, uniform=0.999, want_logprob=True), SampleSpec()])
    assert got == [(9, 0.0), (9, None)]
