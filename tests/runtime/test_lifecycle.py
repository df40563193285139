"""Every state x event, protected or not."""

import itertools

import pytest

from runtime.lifecycle import Event, IllegalTransitionError, Ledger, State, transition

LEGAL = {
    (State.ACTIVE, Event.TURN_ENDED): State.STAGED,
    (State.ACTIVE, Event.COOLED): State.STAGED,
    (State.ACTIVE, Event.WATERMARK): State.STAGED,
    (State.STAGED, Event.KEPT): State.COMMITTED,
    (State.STAGED, Event.BELOW): State.GONE,
    (State.COMMITTED, Event.FELL): State.EVICTABLE,
    (State.EVICTABLE, Event.ROSE): State.COMMITTED,
    (State.EVICTABLE, Event.REPACKED): State.GONE,
    (State.ACTIVE, Event.RELEASED): State.GONE,
    (State.STAGED, Event.RELEASED): State.GONE,
    (State.COMMITTED, Event.RELEASED): State.GONE,
    (State.EVICTABLE, Event.RELEASED): State.GONE,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_state_and_event(state: State, event: Event) -> None:
    expected = LEGAL.get((state, event))
    if expected is None:
        with pytest.raises(IllegalTransitionError, match=state.value):
            transition(state, event)
    else:
        assert transition(state, event) is expected


@pytest.mark.parametrize("event", [Event.TURN_ENDED, Event.COOLED, Event.WATERMARK])
def test_protected_tokens_stay_active(event: Event) -> None:
    assert transition(State.ACTIVE, event, protected=True) is State.ACTIVE


def test_protected_entries_stay_committed_until_released() -> None:
    assert transition(State.COMMITTED, Event.FELL, protected=True) is State.COMMITTED
    assert transition(State.COMMITTED, Event.RELEASED, protected=True) is State.GONE


def test_ledger_conserves_entries() -> None:
    ledger = Ledger()
    ledger.arrive(100)
    ledger.move(State.ACTIVE, Event.TURN_ENDED, 60)
    ledger.move(State.STAGED, Event.KEPT, 25)
    ledger.move(State.STAGED, Event.BELOW, 35)
    ledger.move(State.COMMITTED, Event.FELL, 5)
    counts = [ledger[state] for state in State]
    assert counts == [40, 0, 20, 5, 35]
    assert ledger.living == 65


def test_ledger_refuses_more_than_there_is() -> None:
    ledger = Ledger()
    ledger.arrive(1)
    with pytest.raises(AssertionError):
        ledger.move(State.ACTIVE, Event.TURN_ENDED, 2)
