"""Prompts beside decode rows: the step's time stays near its bound, and the prompt gets on."""

from __future__ import annotations

import random

import pytest

from runtime.pace import FIRST_PROMPT_TOKENS, LEAST_PROMPT_TOKENS, StepPace

MS = 1_000_000


def run(pace: StepPace, steps: int, base_ms: float, token_ms: float, noise: float = 0.0) -> list[tuple[int, float]]:
    """(prompt tokens, milliseconds) of steps on a machine that takes base + tokens * token_ms."""
    chance = random.Random(1)
    done = []
    for _ in range(steps):
        tokens = pace.prompt_tokens(4, 256)
        took = (base_ms + tokens * token_ms) * (1 + chance.uniform(-noise, noise))
        pace.measure(4, tokens, int(took * MS))
        done.append((tokens, took))
    return done


def test_without_a_bound_or_without_decode_rows_the_budget_is_all() -> None:
    off, on = StepPace(0.0), StepPace(50.0)
    off.measure(4, 200, 10_000 * MS)
    assert off.prompt_tokens(4, 256) == 256
    assert on.prompt_tokens(0, 256) == 256


def test_it_starts_small_and_settles_close_under_the_bound() -> None:
    pace = StepPace(50.0)
    assert pace.prompt_tokens(4, 256) == FIRST_PROMPT_TOKENS
    for _ in range(3):
        pace.measure(4, 0, 8 * MS)
    settled = run(pace, 20, 8.0, 0.5)[1:]
    assert max(took for _, took in settled) <= 50.0
    assert min(tokens for tokens, _ in settled) >= 0.95 * (50 - 8) / 0.5


def test_noise_breaks_the_bound_seldom_and_by_little() -> None:
    pace = StepPace(50.0)
    pace.measure(4, 0, 8 * MS)
    settled = run(pace, 200, 8.0, 0.5, noise=0.2)[5:]
    over = [took for _, took in settled if took > 50.0]
    assert len(over) < len(settled) / 5 and max(over, default=0.0) < 60.0
    assert sum(tokens for tokens, _ in settled) / len(settled) > 0.6 * (50 - 8) / 0.5


def test_a_slower_machine_counts_at_once_and_a_faster_one_in_a_while() -> None:
    pace = StepPace(50.0)
    pace.measure(4, 0, 8 * MS)
    run(pace, 5, 8.0, 0.2)
    slowed = run(pace, 3, 8.0, 1.0)
    assert slowed[0][1] > 50.0 and slowed[1][1] <= 50.0, "one step is late, not two"
    assert run(pace, 80, 8.0, 0.2)[-1][0] > 0.9 * (50 - 8) / 0.2


def test_a_prompt_gets_on_even_where_decoding_alone_breaks_the_bound() -> None:
    pace = StepPace(5.0)
    pace.measure(4, 0, 80 * MS)
    pace.measure(4, 32, 100 * MS)
    assert pace.prompt_tokens(4, 256) == LEAST_PROMPT_TOKENS
    assert pace.prompt_tokens(4, 7) == 7


@pytest.mark.parametrize("tokens", [1, LEAST_PROMPT_TOKENS - 1])
def test_a_few_tokens_tell_nothing(tokens: int) -> None:
    pace = StepPace(50.0)
    pace.measure(4, tokens, 500 * MS)
    assert pace.prompt_tokens(4, 256) == FIRST_PROMPT_TOKENS
