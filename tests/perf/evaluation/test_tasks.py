"""Tasks: seeded, answerable from what was told, of every kind, and told early enough to be committed."""

from __future__ import annotations

import pytest

from perf.evaluation import words
from perf.evaluation.tasks import KINDS, LAST_TOLD, MIN_TOKENS, Task, make_task


@pytest.fixture(params=[MIN_TOKENS, 1200, 4000])
def task(request: pytest.FixtureRequest) -> Task:
    return make_task(7, request.param)


def test_the_same_seed_gives_the_same_task(task: Task) -> None:
    assert task == make_task(7, task.num_tokens)
    assert task.turns != make_task(8, task.num_tokens).turns


def test_every_kind_is_asked(task: Task) -> None:
    assert {question.kind for question in task.questions} == set(KINDS)
    assert 25 <= len(task.questions) <= (32 if task.num_tokens < 1300 else 62)


def test_the_answer_was_told_where_it_says(task: Task) -> None:
    for question in task.questions:
        told = task.system if question.told < 0 else task.turns[question.told]
        gold = question.choices[0].strip()
        if question.kind == "variable" and gold not in told:  # told of another variable, which this one equals
            other = told.split("same word as ")[1].split(".")[0]
            told = next(turn for turn in task.turns if f"variable {other} holds the word" in turn)
        assert gold in told, question
        assert len(set(question.choices)) == 4 and all(choice.startswith(" ") for choice in question.choices)


def test_nothing_is_told_in_the_last_turns(task: Task) -> None:
    last = max(1, int(len(task.turns) * LAST_TOLD))
    assert all(question.told < last for question in task.questions if question.kind != "text")


def test_the_latest_update_wins() -> None:
    for seed in range(20):
        made = make_task(seed, 1200)
        for question in made.questions:
            if question.kind != "update":
                continue
            person = question.opening.removeprefix("Now the office of ").removesuffix(" is in")
            told = " ".join(made.turns)
            new, old = (word.strip() for word in question.choices[:2])
            assert told.index(f"office of {person} is in {old}") < told.index(f"Now the office of {person} is in {new}")


def test_words_of_a_pool_differ() -> None:
    for name, pool in vars(words).items():
        if name.isupper():
            assert len(set(pool)) == len(pool) >= 4, name
