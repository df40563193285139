"""What one soak client does: turns that must succeed, and everything that clients do to servers besides.

Every action returns what it saw that it did not provoke, in words; an empty list is good.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from perf.load.misuse import BAD_REQUESTS
from perf.load.texts import tool_output, user_message
from perf.load.turn_stream import Answer, Patience, Requests, problems, turn_values
from perf.server import MODEL_NAME

TURN_TIMEOUT_S = 120.0
TURNS_PER_CONVERSATION = 8
Problems = list[str]


class SoakClient:
    """One client with one conversation at a time. `http`: host and port of the HTTP endpoint, None without one."""

    def __init__(self, requests: Requests, name: str, seed: int, http: tuple[str, int] | None) -> None:
        self._requests = requests
        self._rng = random.Random(f"{seed}/{name}")
        self._name = name
        self._http = http
        self._number = 0
        self._conversation = f"{name}-0"
        self._turns = 0
        self._left = False
        self.begun: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._actions: list[tuple[Callable[[], Awaitable[Problems]], float]] = [
            (self.take_turn, 10),
            (self.complete_prompt, 2),
            (self.leave_while_reading, 2),
            (self.leave_while_answering, 2),
            (self.run_out_of_time, 1),
            (self.stop_by_id, 2),
            (self.overlap, 2),
            (self.send_nonsense, 4),
            (self.end_conversation, 1),
        ]
        if http is not None:
            self._actions.append((self.break_connection, 2))

    async def act(self) -> Problems:
        """One random action, then a short pause."""
        actions, weights = zip(*self._actions, strict=True)
        [action] = self._rng.choices(actions, weights)
        self.counts[action.__name__] += 1
        try:
            found = [f"{action.__name__}: {problem}" for problem in await action()]
        finally:
            if self._turns >= TURNS_PER_CONVERSATION:
                await self.end_conversation()
        await asyncio.sleep(self._rng.expovariate(4.0))
        return found

    def _text(self) -> str:
        write = self._rng.choice((user_message, user_message, tool_output))
        return write(self._rng, self._rng.randint(3, 40))

    def _values(self, max_tokens: int | None = None) -> dict[str, Any]:
        """One more turn of the conversation."""
        self._turns += 1
        self.begun.add(self._conversation)
        wanted = self._rng.randint(1, 16) if max_tokens is None else max_tokens
        return turn_values(self._text(), self._conversation, wanted)

    def _request_id(self) -> str:
        self._number += 1
        return f"{self._name}/{self._number}"

    async def _ask(self, values: dict[str, Any], patience: Patience | None = None) -> Answer:
        patience = patience or Patience(TURN_TIMEOUT_S)
        if values.get("conversation_id") != self._conversation:  # it says nothing of the turn that was left before
            return await self._requests.ask(values, self._request_id(), patience)
        ask = self._requests.ask_after_leaving if self._left else self._requests.ask
        self._left = False
        answer = await ask(values, self._request_id(), patience)
        self._left = answer.status == "left"
        return answer

    async def _rest(self) -> Problems:
        """A whole turn if the one before was left: after it, the conversation is known to be at rest."""
        return await self.take_turn() if self._left else []

    async def take_turn(self) -> Problems:
        answer = await self._ask(self._values())
        found = problems([answer])
        if answer.status == "ok" and not answer.turn.get("generated_tokens"):
            found.append("an answer without a token")
        return found

    async def complete_prompt(self) -> Problems:
        prompt = {"text_input": self._text(), "sampling_param_max_tokens": self._rng.randint(0, 8)}
        return problems([await self._ask(prompt)])

    async def leave_while_reading(self) -> Problems:
        """Closes the stream at once: mostly before the first token."""
        patience = Patience(TURN_TIMEOUT_S, leave_after_s=self._rng.uniform(0.0, 0.25))
        return problems([await self._ask(self._values(), patience)])

    async def leave_while_answering(self) -> Problems:
        patience = Patience(TURN_TIMEOUT_S, leave_after_pieces=self._rng.randint(1, 4))
        return problems([await self._ask(self._values(32), patience)])

    async def run_out_of_time(self) -> Problems:
        """The deadline of gRPC itself ends the request."""
        patience = Patience(TURN_TIMEOUT_S, deadline_s=self._rng.uniform(0.02, 0.5))
        return problems([await self._ask(self._values(64), patience)])

    async def stop_by_id(self) -> Problems:
        """The turn ends well, whole or cut; that it may have ended before it was stopped is no fault."""
        if found := await self._rest():
            return found
        request_id = self._request_id()
        turn = asyncio.create_task(self._requests.ask(self._values(48), request_id, Patience(TURN_TIMEOUT_S)))
        await asyncio.sleep(self._rng.uniform(0.0, 0.4))
        stop = await self._requests.stop(request_id)
        found = problems([await turn])
        late = stop.status == "refused" and "is running" in stop.error
        return found if late else found + problems([stop])

    async def overlap(self) -> Problems:
        """A second turn while one runs is refused, and the first goes on. The second may come after its end."""
        if found := await self._rest():
            return found
        first, second = await asyncio.gather(self._ask(self._values(12)), self._ask(self._values(12)))
        refused = [answer for answer in (first, second) if answer.status == "refused"]
        if len(refused) == 2:
            return ["both of two turns at once were refused", *problems(refused)]
        busy = all(answer.busy for answer in refused)
        return problems([answer for answer in (first, second) if not busy or answer not in refused])

    async def send_nonsense(self) -> Problems:
        name = self._rng.choice(list(BAD_REQUESTS))
        answer = await self._ask(dict(BAD_REQUESTS[name]))
        return [] if answer.status == "refused" else [f"{name}: got {answer.status}, expected a refusal"]

    async def end_conversation(self) -> Problems:
        """A conversation whose only turns were left is unknown to the server; that is no fault."""
        ended, self._turns = self._conversation, 0
        self._number += 1
        self._conversation = f"{self._name}-{self._number}"
        if ended not in self.begun:
            return []
        answer = await self._requests.end(ended)
        self.begun.discard(ended)
        return [] if answer.status == "refused" and "conversation" in answer.error else problems([answer])

    async def break_connection(self) -> Problems:
        """Sends a turn over HTTP and resets the connection, without a word, somewhere in the answer."""
        assert self._http is not None
        body = json.dumps({"text_input": self._text(), "sampling_param_max_tokens": 24, "streaming": True}).encode()
        head = (
            f"POST /v2/models/{MODEL_NAME}/generate_stream HTTP/1.1\r\nHost: soak\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*self._http)
        writer.write(head.encode() + body)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.0, 0.6)):
                await reader.read(1 << 16)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
        writer.transport.abort()
        return []
