"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.checkpoint_hook import CheckpointHook
from runtime.commit_worker import CommitWorker
from runtime.config import EngineLimits, ModelSpec, RuntimeConfig
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.observer import Observer
from runtime.step import Executor


@dataclass(frozen=True)
class EngineParts:
    """What the wiring puts together: the device half, the text side, and who watches them.

    commit_worker: draws and writes commits beside steps, for executors that let another thread do so; None: between
        steps.
    """

    spec: ModelSpec
    limits: EngineLimits
    config: RuntimeConfig
    manager: KvManager
    executor: Executor
    intake: Intake
    probe_prompt: tuple[int, ...]
    observer: Observer | None = None
    checkpoints: CheckpointHook = field(default_factory=CheckpointHook)
    boundaries: frozenset[int] = frozenset()
    commit_worker: CommitWorker | None = None
