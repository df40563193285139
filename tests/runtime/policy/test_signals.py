"""Each signal alone, their weighted sum, and when a page counts as cooled; on numbers made by hand."""

from __future__ import annotations

import pytest

from runtime.errors import ConfigError
from runtime.policy.registry import ALL_POLICIES
from runtime.policy.signals import LEAST_JUMPS, PageAge, Signals, SignalTracker
from runtime.policy.variants import changeable, with_changes

PAGES = [PageAge(0, 7), PageAge(8, 15), PageAge(16, 23)]
END = 99


def tracker(num_tokens: int = 24, **signals: float) -> SignalTracker:
    made = SignalTracker(Signals(**signals))  # type: ignore[arg-type]
    made.read_tokens([1] * num_tokens, {END})
    return made


def test_weights_of_zero_switch_everything_off() -> None:
    off = Signals()
    assert not off.on and not off.need_device and not off.looks(0, 1000)
    assert tracker().coldness(PAGES[0]) == 0.0
    assert not any(policy.signals.on for policy in ALL_POLICIES.values()), "today's policies are as they were"
    assert Signals(boundary=1).on and not Signals(boundary=1).need_device
    assert Signals(entropy=1).need_attention and not Signals(entropy=1).need_hidden and Signals(jump=1).need_hidden


def test_looks_come_every_so_many_tokens() -> None:
    signals = Signals(attention=1.0, every_tokens=8)
    assert [last for last in range(1, 26) if signals.looks(last - 1, last)] == [8, 16, 24]
    assert signals.looks(3, 200) and not signals.looks(9, 15)


def test_attention_decays_with_its_half_life() -> None:
    signals = tracker(attention=1.0, half_life_tokens=10)
    signals.read_attention({0: 1.0, 8: 0.2, 16: 3.0}, 0.5)
    signals.look([])
    assert [signals.coldness(page) for page in PAGES] == pytest.approx([0.0, 0.8, 0.0])
    for even in (0.0, 0.0):  # ten tokens later half of what was is left, after twenty a quarter
        signals.read_tokens([1] * 10, {END})
        signals.read_attention({0: even, 8: even, 16: even}, 0.5)
        signals.look([])
    assert [signals.coldness(page) for page in PAGES] == pytest.approx([0.75, 0.95, 0.25])


def test_entropy_must_rise_and_stay_high() -> None:
    signals = tracker(entropy=1.0, half_life_tokens=4, entropy_rise=0.1, patience=3)

    def after(entropies: list[float]) -> list[bool]:
        found = []
        for entropy in entropies:
            signals.read_tokens([1] * 8, {END})
            signals.read_attention({0: 1.0}, entropy)
            found.append(bool(signals.look(PAGES[:1])))
        return found

    assert not any(after([0.4] * 20)), "level entropy says nothing"
    assert not any(after([0.6, 0.4, 0.4, 0.4, 0.4, 0.4])), "one peak does not stay"
    assert any(after([0.7] * 6))
    assert not any(after([0.3] * 6)), "a fall is no rise"


def test_a_boundary_finishes_what_came_before_it() -> None:
    signals = SignalTracker(Signals(boundary=1.0, patience=1))
    signals.read_tokens([1] * 16 + [END] + [1] * 7, {END})
    assert signals.look(PAGES) == {0, 8}
    signals.read_tokens([END], {END})
    assert signals.look(PAGES) == {0, 8, 16}


def test_a_jump_stands_out_from_the_jumps_before_it() -> None:
    signals = SignalTracker(Signals(jump=1.0, patience=1, jump_z=4.0))
    usual = [0.3, 0.34] * LEAST_JUMPS
    signals.read_tokens([1] * (len(usual) + 1), {END})
    signals.read_jumps(usual)
    pages = [PageAge(0, 7), PageAge(32, 39)]
    assert signals.look(pages) == set()
    signals.read_tokens([1, 1], {END})
    signals.read_jumps([0.31, 0.9])
    assert signals.look(pages) == {0}, "the jump came after the first page and inside the second"
    early = SignalTracker(Signals(jump=1.0, patience=1))
    early.read_tokens([1] * 20, {END})
    early.read_jumps([0.1] * (LEAST_JUMPS - 2) + [1.9])
    assert early.look([PageAge(0, 7)]) == set(), "too few were seen to call one unusual"


def test_the_weighted_mean_decides() -> None:
    def cold(**weights: float) -> float:
        signals = tracker(**weights)
        signals.read_attention({0: 0.25}, 0.5)
        signals.read_tokens([END], {END})
        return signals.coldness(PAGES[0])

    assert cold(attention=1.0) == pytest.approx(0.75)
    assert cold(boundary=1.0) == 1.0 and cold(jump=1.0) == 0.0 and cold(entropy=1.0) == 0.0
    assert cold(attention=2.0, boundary=1.0, jump=1.0) == pytest.approx((2 * 0.75 + 1.0 + 0.0) / 4)


def test_patience_and_release() -> None:
    signals = tracker(attention=1.0, threshold=0.5, release=0.3, patience=3, half_life_tokens=1)

    def look(even: float) -> set[int]:
        signals.read_tokens([1] * 50, {END})  # long after: what was is forgotten
        signals.read_attention({0: even}, 0.5)
        return signals.look(PAGES[:1])

    assert [look(even) for even in (0.4, 0.6, 0.6)] == [set(), set(), {0}], "0.4 cold keeps a streak that 0.6 began"
    assert look(0.9) == set(), "hot again"
    assert [look(even) for even in (0.6, 0.6, 0.6, 0.6)] == [set()] * 4, "0.4 cold does not begin one"
    assert [look(even) for even in (0.4, 0.9, 0.4, 0.4, 0.4)] == [set(), set(), set(), set(), {0}]


def test_what_is_undone_is_forgotten() -> None:
    signals = SignalTracker(Signals(boundary=1.0, patience=1))
    signals.read_tokens([1] * 30 + [END], {END})
    assert signals.look(PAGES) == {0, 8, 16}
    signals.rewind(28)
    assert signals.num_tokens == 28 and signals.look(PAGES) == set()


def test_every_field_is_reached_by_name_and_checked() -> None:
    base = ALL_POLICIES["commitkv"]
    changed = with_changes(base, {"signals.attention": 1.0, "signals.patience": 4, "schedule.at_turn_end": False})
    assert changed.signals == Signals(attention=1.0, patience=4) and not changed.schedule.at_turn_end
    assert {"signals.attention", "signals.entropy", "signals.boundary", "signals.jump"} <= set(changeable())
    for field, value in (
        ("attention", -1), ("threshold", 0), ("threshold", 1.5), ("release", 0.9), ("patience", 0),
        ("every_tokens", 0), ("half_life_tokens", 0), ("entropy_rise", 0), ("jump_z", 0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"signals\.{field}"):
            with_changes(base, {f"signals.{field}": value})
    with pytest.raises(ConfigError, match=r"signals\.magic"):
        with_changes(base, {"signals.magic": 1})
