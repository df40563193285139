"""Generated conversations with facts stated early and asked late; the same seed gives the same conversation."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

CONVERSATIONS = Path(__file__).parent / "conversations"

PLACES = "harbor library museum bakery stadium hospital airport garden castle theater market bridge".split()  # noqa: SIM905
NAMES = "Alice Bruno Clara Derek Elena Felix Greta Hugo Irene Jonas Karla Leon".split()  # noqa: SIM905
COLORS = "red blue green yellow purple orange white black silver pink brown gold".split()  # noqa: SIM905
CITIES = "Oslo Lisbon Vienna Dublin Madrid Athens Prague Rome Paris Berlin London Warsaw".split()  # noqa: SIM905
NUM_FACTS = 8
NUM_UPDATES = 2
FILLER_WORDS = (45, 85)


@dataclass(frozen=True)
class Question:
    """Asked in a copy of the conversation that is thrown away.

    opening: how the answer begins, so that the very next word is the fact.   choices: the right word, then 3 wrong
    ones of its kind that were said in the same conversation.   kind: task family.   told: turn of the fact.
    """

    kind: str
    text: str
    opening: str
    choices: tuple[str, ...]
    told: int


@dataclass(frozen=True)
class Task:
    turns: tuple[str, ...]
    questions: tuple[Question, ...]


def make_task(seed: int, num_turns: int) -> Task:
    """A conversation of `num_turns` user turns.

    Families: `fact` (a manager per place), `attribute` (a door's colour), `update` (a town that moves once: the
    latest wins).
    """
    rng = random.Random(seed)
    filler = _filler_words()
    places, names, colors, cities = (rng.sample(pool, len(pool)) for pool in (PLACES, NAMES, COLORS, CITIES))
    turns: list[str] = []
    questions: list[Question] = []
    for turn in range(num_turns):
        told = ""
        if turn < NUM_FACTS:
            place, name, color = places[turn], names[turn], colors[turn]
            told = (
                f"The manager of the {place} is {name} and the door of the {place} is {color}. "
                f"The office of {name} is in {cities[turn]}. "
            )
            manager, door = f"The manager of the {place} is", f"The door of the {place} is"
            questions.append(
                Question("fact", f"Who is the manager of the {place}?", manager, _choices(name, names, rng), turn)
            )
            questions.append(
                Question(
                    "attribute", f"What color is the door of the {place}?", door, _choices(color, colors, rng), turn
                )
            )
        elif turn < NUM_FACTS + NUM_UPDATES:
            name, city = names[turn - NUM_FACTS], cities[turn]
            told = f"The office of {name} has moved. Now the office of {name} is in {city}. "
            text, opening = f"Where is the office of {name} now?", f"Now the office of {name} is in"
            questions.append(Question("update", text, opening, _choices(city, cities, rng), turn))
        turns.append(told + _piece(filler, rng))
    return Task(tuple(turns), tuple(questions))


def _choices(gold: str, pool: list[str], rng: random.Random) -> tuple[str, ...]:
    """The right word and three wrong ones that the conversation also says."""
    said = pool[: NUM_FACTS + NUM_UPDATES]
    return (gold, *rng.sample([word for word in said if word != gold], 3))


def _filler_words() -> list[str]:
    """Words of the shipped conversations: logs, tables, mails."""
    words: list[str] = []
    for path in sorted(CONVERSATIONS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            words += json.loads(line)["content"].split(" ")
    return words


def _piece(words: list[str], rng: random.Random) -> str:
    length = rng.randint(*FILLER_WORDS)
    start = rng.randrange(len(words) - length)
    return "Here is some text: " + " ".join(words[start : start + length])
