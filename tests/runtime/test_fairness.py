"""Who is next: the tenant that was given least, the higher priority within it, then who came first."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from runtime.conversation import Conversation
from runtime.fairness import GENERATED_WEIGHT, TokenCounters, WaitingTurns
from runtime.policy.registry import get_policy

_handles = itertools.count()


def turn_of(tenant: str, priority: int = 0) -> Conversation:
    return Conversation(next(_handles), None, get_policy("full"), tenant, priority)


def arrive(counters: TokenCounters, waiting: WaitingTurns, *turns: Conversation) -> None:
    for turn in turns:
        counters.arrive(turn.tenant)
        waiting.add(turn)


def test_within_a_tenant_priority_then_arrival_and_those_put_back_first() -> None:
    counters = TokenCounters()
    waiting = WaitingTurns(counters)
    low, first, second, high = turn_of("a", -1), turn_of("a"), turn_of("a"), turn_of("a", 5)
    arrive(counters, waiting, low, first, second, high)
    assert list(waiting) == [high, first, second, low] and waiting.of_tenant("a") == len(waiting) == 4
    waiting.remove(high)
    waiting.put_back(second_time := turn_of("a", -9))
    assert waiting.heads() == [second_time]
    assert first in waiting and high not in waiting


def test_a_generated_token_weighs_more_than_a_prompt_token() -> None:
    counters = TokenCounters()
    counters.arrive("a")
    counters.charge("a", 10, 3)
    assert counters["a"] == 10 + 3 * GENERATED_WEIGHT


def test_who_was_away_comes_back_without_credit_and_with_its_debt() -> None:
    counters = TokenCounters()
    for tenant in ("busy", "idler", "greedy"):
        counters.arrive(tenant)
    counters.charge("greedy", 1000, 0)
    counters.leave("idler")
    counters.leave("greedy")
    counters.charge("busy", 300, 0)
    counters.arrive("idler")
    counters.arrive("greedy")
    assert counters["idler"] == counters["busy"] == 300
    assert counters["greedy"] == 1000


def test_counters_that_say_nothing_are_forgotten() -> None:
    counters = TokenCounters()
    counters.arrive("stays")
    for i in range(1000):
        counters.arrive(f"t{i}")
        counters.charge(f"t{i}", 5, 0)
        counters.charge("stays", 6, 0)
        counters.leave(f"t{i}")
    assert len(counters._tokens) < 5
    counters.leave("stays")
    assert not counters._tokens and not counters._turns


@given(st.lists(st.integers(1, 400), min_size=2, max_size=6), st.integers(0, 5))
def test_tenants_that_always_wait_stay_within_one_turn_of_each_other(costs: list[int], many: int) -> None:
    """The bound of the paper: what two backlogged tenants got differs by at most the largest piece of service."""
    counters = TokenCounters()
    waiting = WaitingTurns(counters)
    for tenant, _ in enumerate(costs):
        arrive(counters, waiting, *(turn_of(str(tenant)) for _ in range(1 + many * (tenant == 0))))
    served = dict.fromkeys(map(str, range(len(costs))), 0)
    for _ in range(60):
        turn = waiting.heads()[0]
        cost = costs[int(turn.tenant)]
        counters.charge(turn.tenant, cost, 0)
        served[turn.tenant] += cost
        arrive(counters, waiting, turn_of(turn.tenant))  # it always has another one
        waiting.remove(turn)
        counters.leave(turn.tenant)
        assert max(served.values()) - min(served.values()) <= max(costs)
