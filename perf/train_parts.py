"""What `perf.train_gate` and `perf.train_merge` share: conversations held with nothing compressed, and the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from perf.serve import DEFAULT_ENGINE
from perf.stepping import rest
from perf.workload import CONVERSATIONS, Conversation
from plugins.memory import KvMemory
from runtime.config import ModelSpec, RuntimeConfig
from runtime.engine import Engine
from runtime.errors import CommitKVError, ConfigError
from runtime.kv_state import ConversationKv
from runtime.paged_executor import PagedExecutor
from runtime.policy.base import Policy, Schedule
from runtime.policy.check import base_name
from runtime.policy.registry import ALL_POLICIES
from runtime.request import Request, SamplingParams
from runtime.wiring import load_parts

TRACE = Policy(
    name="trace",
    score="both",
    schedule=Schedule(min_tokens=256, on_idle=False, every_steps=0, at_watermark=False),
)
"""Stages and re-reads as commitkv does and never commits, so that every token's score can be read."""


class Tracer:
    """An engine that holds conversations under TRACE, so that what its arenas recorded can be read."""

    def __init__(self, engine_dir: Path, kv_mib: int) -> None:
        parts = load_parts(engine_dir, RuntimeConfig(kv_memory_bytes=kv_mib << 20))
        assert isinstance(parts.executor, PagedExecutor)
        if parts.limits.rotate_values:
            raise ConfigError(
                f"--engine: {engine_dir} keeps values rotated, expected one as the model has them, for which weights "
                f"are stored; build it without --rotate-values"
            )
        ALL_POLICIES[TRACE.name] = TRACE  # of this process, so that a request can name it
        self.spec = parts.spec
        self._max_tokens = parts.limits.max_seq_len
        self._engine, self._manager = Engine(parts), parts.manager
        self._memory: KvMemory = parts.executor._memory_of("")

    def _hold(self, conversation: Conversation, max_tokens: int) -> ConversationKv:
        """Holds the conversation, as far as the engine's length allows; its cache stays until `_end`."""
        system = conversation.system
        for i, turn in enumerate(conversation.turns):
            sampling = SamplingParams(max_tokens=min(turn.max_tokens, max_tokens))
            self._turn(Request(f"turn-{i}", turn.text, sampling, "c", system_prompt=system, policy=TRACE.name))
            system = None
            if self._engine.kv_stats("c").active + self._engine.kv_stats("c").staged > 0.8 * self._max_tokens:
                break
        return self._manager[self._engine.conversation("c").handle]

    def _end(self) -> None:
        self._engine.end_conversation("c")
        rest(self._engine)

    def _turn(self, request: Request) -> None:
        self._engine.submit(request)
        rest(self._engine)


def add_trace_arguments(parser: argparse.ArgumentParser, data_help: str) -> None:
    """What is held, and how."""
    add = parser.add_argument
    add("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    add("--data", type=Path, nargs="+", default=sorted(CONVERSATIONS.glob("*.jsonl")), help=data_help)
    add("--max-tokens", type=int, default=16, help="tokens of an answer (%(default)s)")
    add("--kv-mib", type=int, default=1024, help="KV memory in MiB (%(default)s)")


def check_arguments(args: argparse.Namespace, *more: tuple[str, bool, str]) -> None:
    """What both commands ask for, and `more`: (name, whether it is good, what is expected). Raises ConfigError."""
    for name, good, expected in (
        *more,
        ("keep", 0 < args.keep < 1, "a share between 0 and 1"),
        ("max-tokens", args.max_tokens >= 0, "0 or more"),
        ("steps", args.steps >= 1, "at least 1"),
        ("kv-mib", args.kv_mib >= 1, "at least 1"),
    ):
        if not good:
            raise ConfigError(f"--{name}: got {getattr(args, name.replace('-', '_'))}, expected {expected}")


def save_weights(path: Path, spec: ModelSpec, tensors: Mapping[str, torch.Tensor], **facts: str) -> None:
    """With the model that they are of, and further facts, in the file's metadata."""
    model = {
        "model": base_name(spec.name),
        "layers": str(spec.num_layers),
        "kv_heads": str(spec.num_kv_heads),
        "head_dim": str(spec.head_dim),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata={**model, **facts})


def exit_code(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Runs a command; its errors become one line and a code."""
    try:
        run(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
