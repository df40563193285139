from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from perf.load.plan import Plan, Workload, make_plan
from runtime.errors import ConfigError

MANY = Workload(
    user_think_s=9.0, tool_think_s=1.5, sessions=60, ramp_s=30.0, duration_s=90.0, tokens=800, cancel_share=0.1
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(MANY)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(plan: Plan) -> None:
    assert make_plan(MANY) == plan and make_plan(MANY).digest == plan.digest
    other = make_plan(replace(MANY, seed=2))
    assert other.digest != plan.digest and other.sessions[0].turns[0].text != plan.sessions[0].turns[0].text


def test_sessions_arrive_in_order_within_the_ramp_some_in_bursts(plan: Plan) -> None:
    arrivals = [session.arrival_s for session in plan.sessions]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] <= MANY.ramp_s
    closest = max(sum(abs(a - b) < 0.5 for b in arrivals) for a in arrivals)
    spread = make_plan(replace(MANY, bursts=0))
    calm = [session.arrival_s for session in spread.sessions]
    assert closest >= 8 > max(sum(abs(a - b) < 0.5 for b in calm) for a in calm)


def test_agents_and_chats_are_mixed_and_agents_send_tool_outputs(plan: Plan) -> None:
    agents = [session for session in plan.sessions if session.kind == "agent"]
    assert len(agents) == round(60 * MANY.agent_share)
    for session in agents:
        assert all(turn.text.startswith("Output of ") for turn in session.turns[1 : MANY.growth_turns])
        assert not session.turns[0].text.startswith("Output of ")
    chats = [session for session in plan.sessions if session.kind == "chat"]
    assert not any(turn.text.startswith("Output of ") for session in chats for turn in session.turns)


def test_sessions_grow_to_their_size_and_go_on_to_the_end(plan: Plan) -> None:
    for session in plan.sessions:
        words = sum(len(turn.text.split()) for turn in session.turns[: MANY.growth_turns])
        assert 0.6 * MANY.tokens < 1.3 * words < 1.3 * MANY.tokens
        assert session.arrival_s + sum(turn.think_s for turn in session.turns) >= MANY.duration_s
        assert session.turns[0].think_s == 0 and all(turn.max_tokens >= 1 for turn in session.turns)


def test_about_the_asked_share_of_clients_leaves(plan: Plan) -> None:
    turns = [turn for session in plan.sessions for turn in session.turns]
    leaving = sum(turn.cancel_after_s is not None for turn in turns)
    assert 0.05 < leaving / len(turns) < 0.15
    never = make_plan(replace(MANY, cancel_share=0.0))
    assert all(turn.cancel_after_s is None for session in never.sessions for turn in session.turns)


@pytest.mark.parametrize(
    "changes",
    [{"sessions": 0}, {"ramp_s": 90.0}, {"ramp_s": -1.0}, {"cancel_share": 1.5}, {"growth_turns": 0}, {"tokens": 10},
     {"duration_s": float("nan")}, {"duration_s": float("inf")}],
)  # fmt: skip
def test_a_workload_that_cannot_be_planned_is_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        replace(MANY, **changes)


def test_one_growth_turn_brings_everything() -> None:
    [session] = make_plan(replace(MANY, sessions=1, growth_turns=1, agent_share=1.0)).sessions
    assert len(session.turns[0].text.split()) > 400 and not session.turns[1].text.startswith("Output")
