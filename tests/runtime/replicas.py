"""Engines with the same weights that share a store of checkpoints and nothing else: two replicas of a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from kernel_engine import CONFIG, END_TOKEN, SPEC, make_limits
from simulated_engine import CharTokenizer, PlainChat, drain, eager, last_of, text_of

from builder.lower_torch import TorchDecoder
from builder.model import HEAD, weight_recipes
from runtime.checkpoint import KvTables
from runtime.checkpoint_store import CheckpointStore, StoreLimits
from runtime.checkpoint_tables import place_of, tables_of
from runtime.checkpoints import Checkpoints
from runtime.engine import Engine
from runtime.engine_parts import EngineParts
from runtime.executor_torch import TorchExecutor
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.kv_transfer import KvTransfer
from runtime.policy.base import Policy
from runtime.request import Event, FinishEvent, Request, SamplingParams

WAIT_S = 20.0
TEXTS = (
    "The tide comes in at nine. Remember it. " * 3,
    "Which colour was the boat? It was blue, wasn't it, and the sails were red. " * 2,
    "And when does the tide come in?",
    "Say all of it once more, from the beginning.",
)


def small(policy: Policy) -> Policy:
    """With limits that a few hundred tokens reach. Nothing depends on how many steps the engine has run: two engines
    have run different numbers of them."""
    if not policy.compresses:
        return policy
    policy = eager(policy)
    return dataclasses.replace(policy, schedule=dataclasses.replace(policy.schedule, every_steps=0))


class Replica:
    """An engine on a tiny model with a store of checkpoints."""

    def __init__(
        self, url: str, *, fingerprint: str = "same", limits: StoreLimits | None = None, **config: Any
    ) -> None:
        self.limits = dataclasses.replace(make_limits("fp32"), policy="commitkv")
        self.config = dataclasses.replace(CONFIG, **config)
        self.manager = KvManager(SPEC, self.limits, self.config.kv_memory_bytes)
        place = ArenaPlace(poison=True)  # what was never written reads as NaN
        storage = KvStorage(SPEC, self.limits, self.manager.num_pages, self.manager.num_blocks, place)
        gen = torch.Generator().manual_seed(5)
        weights = {r.name: torch.randn(r.shape, generator=gen) * 0.2 + 1.5 * r.is_norm for r in weight_recipes(SPEC)}
        weights[HEAD][END_TOKEN] = 0.0
        executor = TorchExecutor(TorchDecoder(SPEC, weights, "fp32", "cpu"), SPEC, self.limits, storage)
        self.transfer = KvTransfer(storage)
        self.store = CheckpointStore(url, limits or StoreLimits())
        wait_s = self.config.checkpoint_wait_s
        self.checkpoints = Checkpoints(fingerprint, self.manager, self.transfer, self.store, wait_s)
        intake = Intake(CharTokenizer(), PlainChat(), "commitkv", self.limits.max_seq_len)  # type: ignore[arg-type]
        parts = EngineParts(
            SPEC, self.limits, self.config, self.manager, executor, intake, (5, 6, 7), checkpoints=self.checkpoints
        )
        self.engine = Engine(parts)
        self._numbers = iter(range(1000))

    def submit(self, text: str, name: str = "ada", max_tokens: int = 10, **options: object) -> str:
        request_id = f"{name}/{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=11)
        request = Request(request_id, text, sampling, name, **options)  # type: ignore[arg-type]
        self.engine.submit(request, self.engine.prepare(request))
        return request_id

    def finish(self, request_id: str) -> tuple[str, FinishEvent]:
        """Until the turn is over and not one step further."""
        events: list[Event] = []
        while not any(isinstance(event, FinishEvent) and event.request_id == request_id for event in events):
            new, worked = self.engine.step()
            events += new
            assert worked
        end = last_of(events, request_id)
        assert isinstance(end, FinishEvent)
        return text_of(events, request_id), end

    def turn(self, text: str, name: str = "ada", **options: object) -> tuple[str, FinishEvent]:
        """A turn and the idle work after it, all of it written."""
        request_id = self.submit(text, name, **options)
        answer, end = self.finish(request_id)
        self.settle()
        return answer, end

    def settle(self) -> None:
        """Idle work is done, and everything is written."""
        drain(self.engine)
        self.write()

    def write(self) -> None:
        """Copies out what has changed, without any other work."""
        for _ in range(100):
            self.checkpoints.between_steps(lambda: False, self.engine._scheduler.evictor.drop)
            assert self.store.flush(WAIT_S)
            if not self.checkpoints.figures().waiting:
                return
        raise AssertionError("never copied out")

    def state(self, name: str = "ada", tenant: str = "") -> tuple[KvTables, dict[str, bytes]]:
        """Tables and bytes of a conversation, ids left out."""
        kv = self.manager[self.engine.conversation(name, tenant).handle]
        image = self.transfer.copy_out(place_of(kv))
        return tables_of(kv), {field: bytes(getattr(image, field)) for field in ("pages", "seen", "blocks", "score")}

    def check(self) -> None:
        self.manager.check_invariants()


def damage(url: str, part: int = -1, tear: bool = False) -> None:
    """Flips the last byte of the only checkpoint, or cuts half of it off."""
    [path] = Path(url).glob("*/*.ckv")
    data = bytearray(path.read_bytes())
    data[part] ^= 1
    path.write_bytes(data[: len(data) // 2] if tear else data)
