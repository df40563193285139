"""Texts that sessions send: what a user says, and what tools give back. Made from a random generator, so repeatable.

Digits are split one by one by many tokenizers, so tool output holds few of them: about 1.3 tokens a word all in all.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from perf.many import WORDS

SYSTEM_PROMPTS = {
    "chat": "You are a helpful assistant. Answer in one or two short sentences.",
    "agent": (
        "You are an agent that works through a task with tools. Read each tool's output, say in one sentence what "
        "it tells you, and name the tool you would call next: search, read_file, list_files or run_tests."
    ),
}
_QUESTIONS = ("What comes to mind?", "Can you sum that up?", "Which of these matters most?", "What would you do next?")
_TOOLS = ("search", "read_file", "list_files", "run_tests")


def user_message(rng: random.Random, num_words: int) -> str:
    """Plain sentences that end with a question."""
    sentences = []
    while num_words > 0:
        length = min(num_words, rng.randint(7, 14))
        sentences.append(" ".join(rng.choices(WORDS, k=length)).capitalize() + ".")
        num_words -= length
    return " ".join([*sentences, rng.choice(_QUESTIONS)])


def tool_output(rng: random.Random, num_words: int) -> str:
    """What one tool call gave: JSON records, log lines or a source file."""
    tool = rng.choice(_TOOLS)
    body = rng.choice((_records, _log_lines, _source))(rng, num_words)
    return f"Output of {tool}:\n{body}\n"


def _lines(num_words: int, line: Callable[[], str]) -> str:
    lines = []
    while num_words > 0:
        lines.append(line())
        num_words -= len(lines[-1].replace("_", " ").split())
    return "\n".join(lines)


def _records(rng: random.Random, num_words: int) -> str:
    def record() -> str:
        fields = ", ".join(f'"{rng.choice(WORDS)}": "{" ".join(rng.choices(WORDS, k=3))}"' for _ in range(3))
        return f"{{{fields}}}"

    return _lines(num_words, record)


def _log_lines(rng: random.Random, num_words: int) -> str:
    def line() -> str:
        level = rng.choice(("info", "info", "info", "warning", "error"))
        return f"{level} {rng.choice(WORDS)}: {' '.join(rng.choices(WORDS, k=rng.randint(5, 9)))}"

    return _lines(num_words, line)


def _source(rng: random.Random, num_words: int) -> str:
    def line() -> str:
        name, argument, value = rng.sample(WORDS, 3)
        return f"    {name} = {argument}.{rng.choice(WORDS)}({value}, {rng.choice(WORDS)})  # {rng.choice(WORDS)}"

    return _lines(num_words, line)
