"""Holds tasks under policies on our engine, and keeps what was found on disk, so that a run can go on later.

A conversation is held turn by turn with idle time between turns, and without answers, which would differ from policy
to policy; then each question is put to a copy of the conversation. The full cache comes first: its distributions are
what the others are held against.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perf.evaluation.scores import Answer, Held
from perf.evaluation.tasks import Question, Task
from perf.stepping import rest
from runtime import manifest as manifests
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, ConfigError
from runtime.request import Request, SamplingParams
from runtime.step import ProbePlan
from runtime.text import EngineTokenizer
from runtime.wiring import load_parts, load_tokenizer

FULL = "full"
PEER_FULL = "transformers DynamicCache"


@dataclass(frozen=True, eq=False)
class Raw:
    """What one system said of one task.   logprobs [num_questions, vocab] fp32.   choices [num_questions, 4] int64:
    first tokens of the choices.   kv_full_bytes: of the full cache in fp16.
    """

    logprobs: torch.Tensor
    choices: torch.Tensor
    tokens: int
    kv_bytes: int
    kv_full_bytes: int
    seconds: float


class EngineHolder:
    """Our engine, on which tasks are held under one policy after the other."""

    def __init__(self, engine_dir: Path, kv_mib: int) -> None:
        parts = load_parts(engine_dir, RuntimeConfig(kv_memory_bytes=kv_mib << 20))
        self._executor = parts.executor
        self._engine = Engine(parts)
        self._tokenizer: EngineTokenizer = load_tokenizer(engine_dir, manifests.load(engine_dir, verify=False))
        self.max_tokens = parts.limits.max_seq_len

    def hold(self, task: Task, policy: str) -> Raw:
        """Raises CommitKVError where the engine refuses a turn."""
        started = time.monotonic()
        for i, text in enumerate(task.turns):
            system = task.system if i == 0 else None
            request = Request(f"turn-{i}", text, SamplingParams(max_tokens=0), "c", system_prompt=system, policy=policy)
            self._engine.submit(request)
            rest(self._engine)
        kv = self._engine.kv_stats("c")
        logprobs = torch.stack([self._ask(question) for question in task.questions])
        self._engine.end_conversation("c")
        rest(self._engine)
        tokens = kv.active + kv.staged + kv.committed + kv.evicted
        return Raw(
            logprobs, first_tokens(self._tokenizer, task), tokens, kv.kv_bytes, kv.kv_full_bytes,
            time.monotonic() - started,
        )  # fmt: skip

    def _ask(self, question: Question) -> torch.Tensor:
        def read(plan: ProbePlan) -> torch.Tensor:
            logits: torch.Tensor = self._executor.logits(plan)  # type: ignore[attr-defined]
            return logits

        return torch.log_softmax(self._engine.peek("c", question.text, question.opening, read), dim=-1)


def first_tokens(tokenizer: EngineTokenizer, task: Task) -> torch.Tensor:
    """First token of every choice, [num_questions, 4]. Raises ConfigError where two choices share it."""
    rows = []
    for question in task.questions:
        row = [tokenizer.encode(choice, (0, 0))[0][0] for choice in question.choices]
        if len(set(row)) != len(row):
            raise ConfigError(
                f"evaluation: the choices {question.choices} begin with the same token in this engine's tokenizer, "
                f"expected different ones; its words have to be chosen anew in perf/evaluation/words.py"
            )
        rows.append(row)
    return torch.tensor(rows)


def compare(task: Task, policy: str, raw: Raw, full_logprobs: torch.Tensor) -> Held:
    """Scores of every question against the full cache's distributions [num_questions, vocab]."""
    ours, whole = raw.logprobs, full_logprobs
    kl = (whole.exp() * (whole - ours)).sum(dim=1).clamp_(min=0.0).tolist()
    of_choices = ours.gather(1, raw.choices)
    picked, picked_full = of_choices.argmax(dim=1), whole.gather(1, raw.choices).argmax(dim=1)
    same_word = ours.argmax(dim=1) == whole.argmax(dim=1)
    answers = [
        Answer(
            kind=question.kind,
            age=1.0 - (question.told + 1) / len(task.turns),
            choice=int(picked[i]),
            nll=-float(of_choices[i, 0]),
            kl=kl[i],
            same_word=bool(same_word[i]),
            same_choice=bool(picked[i] == picked_full[i]),
        )
        for i, question in enumerate(task.questions)
    ]
    return Held(
        policy, task.num_tokens, task.seed, raw.tokens, raw.kv_bytes, raw.kv_full_bytes, raw.seconds, tuple(answers)
    )


class Store:
    """A folder of results: `held.jsonl`, a line per (policy, length, seed), and the full cache's distributions.

    `key` names what the results belong to (engine, code, question generator); a folder of another key is refused.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._lines = folder, folder / "held.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "key.txt"
        if mark.is_file() and mark.read_text(encoding="utf-8") != key:
            raise ConfigError(
                f"--output: {folder} holds results of another engine or evaluation, expected {key}; choose another "
                f"folder or remove it"
            )
        mark.write_text(key, encoding="utf-8")
        self._held = {(h.policy, h.num_tokens, h.seed): h for h in self._read()}

    @classmethod
    def open(cls, folder: Path) -> Store:
        """An existing folder, whatever its key."""
        return cls(folder, (folder / "key.txt").read_text(encoding="utf-8"))

    def policies(self) -> list[str]:
        """Names that it has something of, in the order in which they were measured."""
        return list(dict.fromkeys(name for name, _, _ in self._held))

    def _read(self) -> Iterator[Held]:
        if not self._lines.is_file():
            return
        for number, line in enumerate(self._lines.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                answers = tuple(Answer(**answer) for answer in record.pop("answers"))
                yield Held(**record, answers=answers)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"--output: line {number} of {self._lines} is damaged ({error}), expected a record that this "
                    f"command wrote; remove the line and it is measured again"
                ) from error

    def get(self, policy: str, task: Task) -> Held | None:
        return self._held.get((policy, task.num_tokens, task.seed))

    def put(self, held: Held) -> None:
        """On disk before it counts."""
        with self._lines.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dataclasses.asdict(held)) + "\n")
        self._held[held.policy, held.num_tokens, held.seed] = held

    def of(self, policy: str, tasks: Sequence[Task]) -> list[Held]:
        """In the order of the tasks; all must be there."""
        return [self._held[policy, task.num_tokens, task.seed] for task in tasks]

    def full_logprobs(self, task: Task) -> torch.Tensor | None:
        """[num_questions, vocab] fp32 as `put_full` kept them, or None."""
        path = self._full_path(task)
        try:
            kept: torch.Tensor = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError):
            return None
        return kept

    def put_full(self, task: Task, logprobs: torch.Tensor) -> None:
        path = self._full_path(task)
        path.parent.mkdir(exist_ok=True)
        torch.save(logprobs, path)

    def _full_path(self, task: Task) -> Path:
        return self._folder / "full" / f"{task.num_tokens}-{task.seed}.pt"


def hold_baseline(holder: EngineHolder, store: Store, task: Task, name: str = FULL) -> torch.Tensor:
    """The full cache's distributions on the task, measured unless the store has them; recorded as `name`."""
    whole = store.full_logprobs(task)
    if store.get(name, task) is None or whole is None:
        raw = holder.hold(task, FULL)
        whole = raw.logprobs
        store.put_full(task, whole)
        if store.get(name, task) is None:
            store.put(compare(task, name, raw, whole))
    return whole


def hold_policy(holder: EngineHolder, store: Store, task: Task, policy: str, whole: torch.Tensor) -> None:
    """Holds the task under `policy` unless the store has it. whole: `hold_baseline`'s."""
    if store.get(policy, task) is not None:
        return
    try:
        store.put(compare(task, policy, holder.hold(task, policy), whole))
    except CommitKVError as error:
        raise type(error)(f"{policy} at {task.num_tokens} tokens: {error}") from error
