"""Generated conversations whose early turns are asked about late; the same seed gives the same conversation.

A conversation is a system prompt and user turns: each turn tells a few things and then shows a piece of unrelated text
(logs, tables, mails of the shipped conversations). Questions come only after the last turn. Every question asks for
the very next word after an opening, so one forward pass answers it, and names four choices that all were said.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.evaluation import words

CONVERSATIONS = Path(__file__).parent.parent / "conversations"
FILLER_WORDS = (45, 85)
# In SmolLM2's tokens: a turn's text without what is told, and all that is told at richness 1; measured on six tasks of
# each length.
TURN_TOKENS, TOLD_TOKENS = 120, 430
MIN_TOKENS = 600
# Longer conversations tell more and are asked more: up to `MAX_RICHNESS` times as much, in proportion to their length.
RICH_TOKENS, MAX_RICHNESS = 1300, 2.0
LAST_TOLD = 0.8  # nothing is told in the last fifth of the turns, so that all of it has been committed


@dataclass(frozen=True)
class Question:
    """Asked in a copy of the conversation that is thrown away.

    kind: see `KINDS`.   opening: how the answer begins.   choices: texts that may follow it, the right one first, each
    with its own leading space.   told: turn (0: the first) in which the answer was last told, -1: the system prompt.
    """

    kind: str
    text: str
    opening: str
    choices: tuple[str, ...]
    told: int


@dataclass(frozen=True)
class Task:
    """seed and num_tokens: what it was made from; num_tokens is the length aimed at."""

    seed: int
    num_tokens: int
    system: str
    turns: tuple[str, ...]
    questions: tuple[Question, ...]


class _Script:
    """What is told when, while a task is made."""

    def __init__(self, seed: int, num_turns: int) -> None:
        self.rng = random.Random(seed)
        self.told: list[list[str]] = [[] for _ in range(num_turns)]
        self.questions: list[Question] = []
        self._last = max(1, int(num_turns * LAST_TOLD))
        self._turns: list[int] = []

    def turn(self, after: int = -1) -> int:
        """A turn to tell something in: dealt without repetition until all were used, later than `after`."""
        if not self._turns:
            self._turns = self.rng.sample(range(self._last), self._last)
        later = [i for i in self._turns if i > after]
        if not later:
            return self._last - 1
        self._turns.remove(later[0])
        return later[0]

    def tell(self, text: str, after: int = -1) -> int:
        turn = self.turn(after)
        self.told[turn].append(text)
        return turn

    def ask(self, kind: str, text: str, opening: str, choices: Sequence[str], told: int) -> None:
        assert len(set(choices)) == 4
        self.questions.append(Question(kind, text, opening, tuple(f" {choice}" for choice in choices), told))

    def others(self, gold: str, pool: Sequence[str]) -> tuple[str, ...]:
        """The right word and three wrong ones of `pool`."""
        return (gold, *self.rng.sample([word for word in pool if word != gold], 3))


def _facts(script: _Script, richness: float) -> None:
    """A manager and a door's colour per place; the four choices were all said of other places."""
    count = round(6 * richness)
    places, names, colors = (script.rng.sample(pool, count) for pool in (words.PLACES, words.NAMES, words.COLORS))
    for place, name, color in zip(places, names, colors, strict=True):
        told = script.tell(f"The manager of the {place} is {name} and the door of the {place} is {color}.")
        opening = f"The manager of the {place} is"
        script.ask("fact", f"Who is the manager of the {place}?", opening, script.others(name, names), told)
        text, opening = f"What color is the door of the {place}?", f"The door of the {place} is"
        script.ask("attribute", text, opening, script.others(color, colors), told)


def _updates(script: _Script, richness: float) -> None:
    """Towns that change once: the latest wins, the old one is among the choices."""
    count = min(5, round(3 * richness))
    people = script.rng.sample(words.PEOPLE, count)
    cities = script.rng.sample(words.CITIES, 2 * count + 2)
    for i, person in enumerate(people):
        old, new = cities[2 * i], cities[2 * i + 1]
        first = script.tell(f"The office of {person} is in {old}.")
        told = script.tell(f"The office of {person} has moved. Now the office of {person} is in {new}.", after=first)
        wrong = [city for city in cities if city not in (old, new)]
        choices = (new, old, *script.rng.sample(wrong, 2))
        script.ask(
            "update", f"Where is the office of {person} now?", f"Now the office of {person} is in", choices, told
        )


def _passkeys(script: _Script, richness: float) -> None:
    """One to five code words for numbered vaults."""
    count = script.rng.randint(1, 5)
    keys = script.rng.sample(words.ANIMALS, max(4, count))
    ordinals = words.ORDINALS[:count]
    told = [script.tell(f"Remember this. The passkey of the {ordinals[i]} vault is {keys[i]}.") for i in range(count)]
    for ordinal, key, turn in list(zip(ordinals, keys, told, strict=False))[: round(3 * richness)]:
        text, opening = f"What is the passkey of the {ordinal} vault?", f"The passkey of the {ordinal} vault is"
        script.ask("passkey", text, opening, script.others(key, keys), turn)


def _lookup(script: _Script, richness: float) -> None:
    """A table of keys and values, told in one turn."""
    count, asked = 12, round(3 * richness)
    keys, values = script.rng.sample(words.OBJECTS, count), script.rng.sample(words.MATERIALS, count)
    told = script.tell("Price list: " + ", ".join(f"{k} = {v}" for k, v in zip(keys, values, strict=True)) + ".")
    for i in script.rng.sample(range(count), asked):
        text = f"In the price list, what stands beside {keys[i]}?"
        script.ask("lookup", text, f"{keys[i]} =", script.others(values[i], values), told)


def _variables(script: _Script, richness: float) -> None:
    """Variables that hold a word, or another variable that holds it (two hops)."""
    count = round(3 * richness)
    values = script.rng.sample(words.OBJECTS, count + 2)
    names = script.rng.sample(words.GREEK, 2 * count)
    for i in range(count):
        first, second = names[2 * i], names[2 * i + 1]
        told = script.tell(f"The variable {first} holds the word {values[i]}.")
        if i % 2:
            told = script.tell(f"The variable {second} holds the same word as {first}.", after=told)
        asked = second if i % 2 else first
        text = f"Which word does the variable {asked} hold?"
        opening = f"The variable {asked} holds the word"
        script.ask("variable", text, opening, script.others(values[i], values), told)


def _labels(script: _Script, richness: float) -> None:
    """Examples with labels that only the examples explain."""
    count, asked = 8, round(2 * richness)
    items = script.rng.sample(words.NONSENSE, count)
    labels = [words.LABELS[i % 4] for i in range(count)]
    script.rng.shuffle(labels)
    told = script.tell("Examples: " + "; ".join(f"{i} is {k}" for i, k in zip(items, labels, strict=True)) + ".")
    for i in script.rng.sample(range(count), asked):
        text = f"Following the examples, what is {items[i]}?"
        script.ask("label", text, f"{items[i]} is", script.others(labels[i], words.LABELS), told)


def _copies(script: _Script, richness: float) -> None:
    """Sentences of unconnected words, to be repeated word for word."""
    asked = round(2 * richness)
    for i in range(asked):
        said = script.rng.sample(words.OBJECTS, 10)
        told = script.tell(f"Keep this line {words.ORDINALS[i]}: {' '.join(said)}.")
        at = script.rng.randint(4, 8)
        later = [word for j, word in enumerate(said) if j != at]
        text = f"Repeat the line to be kept {words.ORDINALS[i]}, word for word."
        script.ask("copy", text, " ".join(said[:at]), script.others(said[at], later), told)


TELL: tuple[Callable[[_Script, float], None], ...] = (
    _facts,
    _updates,
    _passkeys,
    _lookup,
    _variables,
    _labels,
    _copies,
)
KINDS = ("fact", "attribute", "update", "passkey", "lookup", "variable", "label", "copy", "rule", "text")


def make_task(seed: int, num_tokens: int) -> Task:
    """A conversation of about `num_tokens` tokens (at least `MIN_TOKENS`) with 30 to 60 questions of every kind."""
    richness = min(MAX_RICHNESS, max(1.0, num_tokens / RICH_TOKENS))
    num_turns = max(5, int(num_tokens - richness * TOLD_TOKENS) // TURN_TOKENS)
    script = _Script(seed, num_turns)
    sign = script.rng.sample(words.MATERIALS, 4)
    system = f"You are a helpful assistant of a small town. The sign-off word of this service is {sign[0]}."
    for tell in TELL:
        tell(script, richness)
    script.ask("rule", "What is the sign-off word of this service?", "The sign-off word of this service is", sign, -1)
    filler = _filler_words()
    quoted = {1 + round(i * (num_turns // 2 - 1) / (2 * richness - 1)) for i in range(round(2 * richness))}
    turns = []
    for i, told in enumerate(script.told):
        piece = _piece(filler, script.rng)
        turns.append(" ".join((*told, "Here is some text:", *piece)))
        if i in quoted:
            _ask_text(script, piece, i)
    return Task(seed, num_tokens, system, tuple(turns), tuple(script.questions))


def _ask_text(script: _Script, piece: list[str], turn: int) -> None:
    """The next word of a text that was shown; how likely it is says how well the text is remembered."""
    for at in script.rng.sample(range(14, len(piece) - 1), len(piece) - 15):
        gold = piece[at]
        wrong = sorted({word for word in piece if word.isalpha() and word[:3] != gold[:3]})
        if gold.isalpha() and len(wrong) >= 3:
            choices = (gold, *script.rng.sample(wrong, 3))
            script.ask("text", "Repeat that text.", " ".join(piece[at - 12 : at]), choices, turn)
            return


def _filler_words() -> list[str]:
    """Words of the shipped conversations: logs, tables, mails."""
    found: list[str] = []
    for path in sorted(CONVERSATIONS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found += json.loads(line)["content"].split(" ")
    return [word for word in found if word]


def _piece(filler: list[str], rng: random.Random) -> list[str]:
    length = rng.randint(*FILLER_WORDS)
    start = rng.randrange(len(filler) - length)
    return filler[start : start + length]
