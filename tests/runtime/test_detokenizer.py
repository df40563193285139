"""Stop strings are cut exactly, however the text is cut into pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from runtime.detokenizer import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in pieces)
    return (sent if matcher.matched else sent + matcher.flush()), matcher.matched


def test_cut_across_pieces() -> None:
    assert run(["END"], ["abE", "N", "Dxyz", "more"]) == ("ab", "END")


def test_false_start_is_sent_later() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("aEN") == "a"
    assert matcher.push("Q") == "ENQ"


def test_first_to_end_then_longest_stop_wins() -> None:
    assert run(["bcd", "cd", "a!"], ["xbcd a!"]) == ("x", "bcd")
    assert run(["bcd", "c"], ["xbcd"]) == ("xb", "c")


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["\n\n"], ["text\n"]) == ("text\n", "")


TEXT = st.text(alphabet="abc", max_size=30)


@given(TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30)))
def test_same_answer_for_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(stops, pieces) == run(stops, list(text))
    sent, matched = run(stops, pieces)
    assert text.startswith(sent + matched)
    assert not any(stop in sent for stop in stops)
    assert bool(matched) == any(stop in text for stop in stops)
