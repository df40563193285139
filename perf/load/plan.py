"""A seeded plan of sessions: who comes when, says what, pauses how long, leaves early. Pure; nothing is sent here.

Open loop: sessions arrive when the plan says, however the server fares. Inside a session the next turn follows the
answer after a pause, as users and tools do. Arrivals are a Poisson process given its number of arrivals (sorted
uniform draws) with bursts on top; pauses are exponential.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from typing import Literal

from perf.load.texts import SYSTEM_PROMPTS, tool_output, user_message
from runtime.errors import ConfigError

Kind = Literal["chat", "agent"]
TOKENS_PER_WORD = 1.3
BURST_SPREAD_S = 0.5


@dataclass(frozen=True)
class Workload:
    """What a plan is drawn from. Tokens are estimates by words; runs report the true ones.

    ramp_s: time in which sessions arrive.   duration_s: time until which sessions go on.
    burst_share: share of the sessions that come in one of `bursts` moments.
    agent_share: share of sessions that are agents, whose turns are tool outputs; the others are chats.
    tokens: that a session grows to in its first turns; after them it talks in short turns.
    growth_turns: turns in which it grows; the first brings half of it.
    cancel_share: share of the turns whose client leaves before the answer is complete.

    The defaults are what two cores can carry: they read some 400 tokens a second, and re-reading takes as many again.
    """

    sessions: int = 6
    ramp_s: float = 140.0
    duration_s: float = 255.0
    bursts: int = 2
    burst_share: float = 0.34
    agent_share: float = 0.67
    tokens: int = 3000
    growth_turns: int = 5
    talk_words: int = 24
    answer_tokens: int = 24
    tool_think_s: float = 6.0
    user_think_s: float = 25.0
    cancel_share: float = 0.04
    seed: int = 1

    def __post_init__(self) -> None:
        for name, low in (("sessions", 1), ("bursts", 0), ("tokens", 50), ("growth_turns", 1), ("answer_tokens", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least {low}; pass a larger number")
        for name in ("burst_share", "agent_share", "cancel_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected a share from 0 to 1; correct it")
        if not 0.0 <= self.ramp_s < self.duration_s < float("inf"):
            raise ConfigError(
                f"ramp_s: got {self.ramp_s:g} with duration_s {self.duration_s:g}, expected 0 <= ramp < duration; "
                "sessions must arrive before the run ends"
            )


@dataclass(frozen=True)
class PlannedTurn:
    """think_s: pause before it, counted from the answer before.

    cancel_after_s: the client leaves so long after sending; None: it stays.
    """

    text: str
    max_tokens: int
    think_s: float
    cancel_after_s: float | None = None


@dataclass(frozen=True)
class Session:
    session_id: str
    kind: Kind
    arrival_s: float
    system_prompt: str
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True)
class Plan:
    """Sessions by arrival."""

    workload: Workload
    sessions: tuple[Session, ...]

    @property
    def digest(self) -> str:
        """The same for the same sessions; written into reports so that runs can be told to have had the same load."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def make_plan(workload: Workload) -> Plan:
    """The same workload (its seed included) gives the same plan."""
    rng = random.Random(workload.seed)
    arrivals = _arrivals(rng, workload)
    num_agents = round(workload.sessions * workload.agent_share)
    kinds: list[Kind] = ["agent" if index < num_agents else "chat" for index in range(workload.sessions)]
    rng.shuffle(kinds)
    sessions = [
        _session(random.Random(f"{workload.seed}/{index}"), workload, index, kind, arrival)
        for index, (kind, arrival) in enumerate(zip(kinds, arrivals, strict=True))
    ]
    return Plan(workload, tuple(sessions))


def _arrivals(rng: random.Random, workload: Workload) -> list[float]:
    """Seconds, sorted, all in [0, ramp_s]."""
    in_bursts = round(workload.sessions * workload.burst_share) if workload.bursts else 0
    moments = [rng.uniform(0, workload.ramp_s) for _ in range(workload.bursts)]
    arrivals = [rng.uniform(0, workload.ramp_s) for _ in range(workload.sessions - in_bursts)]
    for index in range(in_bursts):
        moment = moments[index % workload.bursts] + rng.uniform(0, BURST_SPREAD_S)
        arrivals.append(min(moment, workload.ramp_s))
    return sorted(arrivals)


def _session(rng: random.Random, workload: Workload, index: int, kind: Kind, arrival_s: float) -> Session:
    """Turns for as long as the run could last if every answer came at once."""
    turns: list[PlannedTurn] = []
    at_s = arrival_s
    target = workload.tokens * rng.uniform(0.85, 1.15)
    while at_s < workload.duration_s:
        grows = len(turns) < workload.growth_turns
        think_s = 0.0 if not turns else _pause(rng, workload, is_tool=kind == "agent" and grows)
        at_s += think_s
        turns.append(_turn(rng, workload, kind, (len(turns), target, think_s)))
    return Session(f"load-{workload.seed}-{index}", kind, arrival_s, SYSTEM_PROMPTS[kind], tuple(turns))


def _pause(rng: random.Random, workload: Workload, *, is_tool: bool) -> float:
    mean = workload.tool_think_s if is_tool else workload.user_think_s
    return min(4 * mean, rng.expovariate(1 / mean)) if mean > 0 else 0.25


def _turn(rng: random.Random, workload: Workload, kind: Kind, place: tuple[int, float, float]) -> PlannedTurn:
    """place: (number of the turn, tokens that the session grows to, its pause)."""
    number, target, think_s = place
    num_words = workload.talk_words
    if number < workload.growth_turns:
        share = 0.5 if number == 0 else 0.5 / (workload.growth_turns - 1)
        tokens = target * (share if workload.growth_turns > 1 else 1.0) - workload.answer_tokens
        num_words = max(4, round(tokens / TOKENS_PER_WORD))
    is_tool = kind == "agent" and 0 < number < workload.growth_turns
    text = tool_output(rng, num_words) if is_tool else user_message(rng, num_words)
    leaves = rng.random() < workload.cancel_share
    return PlannedTurn(
        text=text,
        max_tokens=max(1, round(workload.answer_tokens * rng.uniform(0.5, 1.5))),
        think_s=think_s,
        cancel_after_s=rng.uniform(0.05, 1.5) if leaves else None,
    )
