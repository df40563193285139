"""The life of a token: one table of legal transitions, and a ledger that counts tokens by state.

    active --(turn ended | cooled | watermark)--> staged
    staged --(kept)--> committed <--(fell | rose)--> evictable --(repacked)--> gone
    staged --(below the line)--> gone

Protected tokens stay active; protected entries never move past committed.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    ACTIVE = "active"  # read at full precision, may still grow
    STAGED = "staged"  # frozen, waiting to be compressed
    COMMITTED = "committed"  # compressed, above the line
    EVICTABLE = "evictable"  # compressed, below the line, still readable until its block is dissolved
    GONE = "gone"  # absorbed, dropped or released


class Event(Enum):
    TURN_ENDED = "turn ended"
    COOLED = "cooled while its turn runs"
    WATERMARK = "watermark"
    KEPT = "kept at commit"
    BELOW = "below the line at commit"
    FELL = "fell below the line"
    ROSE = "rose above the line"
    REPACKED = "block dissolved"
    RELEASED = "conversation released"


class IllegalTransitionError(RuntimeError):
    """A move that the table does not list: a bug of the manager, never of a user."""


_TABLE: dict[tuple[State, Event], State] = {
    (State.ACTIVE, Event.TURN_ENDED): State.STAGED,
    (State.ACTIVE, Event.COOLED): State.STAGED,
    (State.ACTIVE, Event.WATERMARK): State.STAGED,
    (State.STAGED, Event.KEPT): State.COMMITTED,
    (State.STAGED, Event.BELOW): State.GONE,
    (State.COMMITTED, Event.FELL): State.EVICTABLE,
    (State.EVICTABLE, Event.ROSE): State.COMMITTED,
    (State.EVICTABLE, Event.REPACKED): State.GONE,
    **{(state, Event.RELEASED): State.GONE for state in State if state is not State.GONE},
}

# Where the table sends a protected token, if not where it sends the others.
_PROTECTED: dict[tuple[State, Event], State] = {
    (State.ACTIVE, Event.TURN_ENDED): State.ACTIVE,
    (State.ACTIVE, Event.COOLED): State.ACTIVE,
    (State.ACTIVE, Event.WATERMARK): State.ACTIVE,
    (State.COMMITTED, Event.FELL): State.COMMITTED,
}


def transition(state: State, event: Event, *, protected: bool = False) -> State:
    """The state after `event`. Raises IllegalTransitionError for a pair that the table does not list."""
    after = _PROTECTED.get((state, event)) if protected else None
    if after is None:
        after = _TABLE.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"a token that is {state.value} cannot see '{event.value}'")
    return after


class Ledger:
    """How many entries (token x layer x KV head) of one conversation are in each state."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(State, 0)

    def __getitem__(self, state: State) -> int:
        return self._counts[state]

    def arrive(self, num_entries: int) -> None:
        """New tokens start active."""
        self._counts[State.ACTIVE] += num_entries

    def withdraw(self, num_entries: int, state: State = State.ACTIVE) -> None:
        """Active or staged tokens that are undone, as if they had never arrived (a rolled-back turn)."""
        assert state in (State.ACTIVE, State.STAGED) and num_entries <= self._counts[state], (state, self._counts)
        self._counts[state] -= num_entries

    def move(self, state: State, event: Event, num_entries: int) -> None:
        """Moves entries from `state` along the table."""
        assert 0 <= num_entries <= self._counts[state], (state, event, num_entries, self._counts)
        after = transition(state, event)
        self._counts[state] -= num_entries
        self._counts[after] += num_entries

    @property
    def living(self) -> int:
        return sum(n for state, n in self._counts.items() if state is not State.GONE)
