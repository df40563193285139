"""The turn that runs before an engine is called ready."""

from __future__ import annotations

import pytest
from simulated_engine import LIMITS, drain, last_of, make_engine

from runtime.config import EngineLimits, RuntimeConfig
from runtime.errors import CommitKVError
from runtime.request import FinishEvent, Request, SamplingParams
from runtime.warm_up import warm_up

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20)


def test_nothing_is_left_of_it() -> None:
    engine, executor, manager = make_engine(CONFIG)
    assert warm_up(engine) > 0
    stats = engine.stats()
    assert (stats.conversations, stats.total_kv_bytes, stats.kv.used_bytes) == (0, 0, 0)
    assert (stats.steps, stats.tokens, stats.generated_tokens, stats.execute_time_ms) == (0, 0, 0, 0.0)
    manager.check_invariants()
    assert not executor.slots


def test_the_same_answers_follow() -> None:
    def answer(*, warm: bool) -> object:
        engine, _, _ = make_engine(CONFIG)
        if warm:
            warm_up(engine)
        engine.submit(Request("r", "a question", SamplingParams(max_tokens=9)))
        end = last_of(drain(engine), "r")
        assert isinstance(end, FinishEvent)
        return end.reason, end.stats.generated_tokens, end.stats.reused_tokens

    assert answer(warm=True) == answer(warm=False)


def test_it_fits_the_smallest_engine() -> None:
    limits = EngineLimits(page_tokens=8, block_entries=16, max_seq_len=16, max_batch_size=1)
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=1), limits=limits)
    assert warm_up(engine) > 0
    assert LIMITS.max_seq_len > limits.max_seq_len


def test_an_engine_that_cannot_answer_is_not_ready() -> None:
    engine, executor, _ = make_engine(CONFIG)
    executor.fail_next = True
    with pytest.raises(CommitKVError, match=r"warm-up: .*the simulated device broke"):
        warm_up(engine)
