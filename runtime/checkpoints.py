"""Conversations that outlive their server: written to a store between turns, taken up from it by any replica.

    a turn ended, or a commit while idle   `changed`: the conversation waits to be copied out
    a turn for an id that is not held      `find`: read from the store and checked
    a turn for one that is                 `is_superseded`: it may have been elsewhere meanwhile; then `give_up`, `find`
    between two steps                      `between_steps`: revived caches get their bytes back, then changed
                                           conversations are copied out while the store's queue has room

Copies are taken between two steps, so they are whole; the store's own thread writes them. A checkpoint of which only
the text can be used gives a conversation whose cache is recomputed; one without is refused. Both are said in the log
and to the client.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.checkpoint import FORMAT_VERSION, Bytes, ChatText, Checkpoint, KvImage, KvPart, PolicyRef, decode, encode
from runtime.checkpoint_hook import CheckpointFigures, CheckpointHook, Revival
from runtime.checkpoint_tables import KvPlace, check_kv, place_of, reinstate, tables_of
from runtime.checkpoint_waiting import WaitingEvents
from runtime.conversation import Conversation
from runtime.errors import LostConversationError, OutOfMemoryError, StoreUnavailableError, UnknownPolicyError
from runtime.kv_manager import KvManager
from runtime.manifest import Manifest
from runtime.policy.base import Policy
from runtime.policy.registry import get_policy
from runtime.request import Event, Request

log = logging.getLogger(__name__)

POLL_S = 0.01
LEAVING_S = 5.0


class Transfer(Protocol):
    """`runtime.kv_transfer.KvTransfer`."""

    def copy_out(self, place: KvPlace) -> KvImage: ...

    def copy_in(self, place: KvPlace, image: KvImage) -> None: ...


class StoreCounts(Protocol):
    """Running sums of a store, see `CheckpointFigures`."""

    written: int
    written_bytes: int
    deleted: int
    failed: int
    swept: int


class Store(Protocol):
    """`runtime.checkpoint_store.CheckpointStore`."""

    @property
    def counts(self) -> StoreCounts: ...

    def key(self, tenant: str, conversation_id: str) -> str: ...

    def has_room(self, num_bytes: int) -> bool: ...

    def put(
        self,
        key: str,
        make: Callable[[], Sequence[Bytes]],
        num_bytes: int,
        done: Callable[[], None] | None = None,
    ) -> None: ...

    def get(self, key: str) -> Bytes | None: ...

    def exists(self, key: str) -> bool: ...

    def is_superseded(self, key: str) -> bool: ...

    def delete(self, key: str) -> None: ...

    def close(self, timeout_s: float) -> None: ...


def engine_fingerprint(manifest: Manifest) -> str:
    """SHA-256 over what KV bytes depend on: model, limits, and every file of the engine."""
    record = {
        "format": FORMAT_VERSION,
        "target": manifest.target,
        "model": dataclasses.asdict(manifest.model),
        "limits": dataclasses.asdict(manifest.limits),
        "files": sorted((file.name, file.sha256) for file in manifest.files),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def policy_ref(policy: Policy) -> PolicyRef:
    """How a checkpoint names a policy."""
    return PolicyRef(policy.name, policy.chosen_from, hashlib.sha256(repr(policy).encode()).hexdigest())


def find_policy(ref: PolicyRef) -> Policy | None:
    """The policy that is called so here, whatever it says; None if none is."""
    try:
        named = get_policy(ref.chosen_from or ref.name)
    except UnknownPolicyError:
        return None
    choices = [named.for_task(task) for task, _ in named.by_task] if ref.chosen_from else [named]
    return next((policy for policy in choices if policy.name == ref.name), None)


class Checkpoints(CheckpointHook):
    """Of one engine.   fingerprint: of the engine; what another one wrote is refused.

    wait_s: a turn's last event waits so long, at most, until the turn is written; 0: not at all.
    """

    def __init__(
        self, fingerprint: str, manager: KvManager, transfer: Transfer, store: Store, wait_s: float = 0.0
    ) -> None:
        self._waiting = WaitingEvents(wait_s)
        self._fingerprint, self._manager, self._transfer, self._store = fingerprint, manager, transfer, store
        self._changed: dict[int, Conversation] = {}  # by handle, longest first
        self._revived: list[tuple[Conversation, Checkpoint]] = []
        self._restored = self._recomputed = self._refused = 0

    def find(self, request: Request) -> Revival | None:
        if request.conversation_id is None:
            return None
        self._wait_until_left(request.tenant, request.conversation_id)
        data = self._store.get(self._store.key(request.tenant, request.conversation_id))
        if data is None:
            return None
        try:
            return self._check(decode(data), request)
        except LostConversationError as error:
            self._refused += 1
            log.warning("conversation %r of tenant %r: %s", request.conversation_id, request.tenant, error)
            if request.messages:  # which hold all of its text
                return None
            raise

    def is_superseded(self, conversation: Conversation) -> bool:
        if not _is_named(conversation):
            return False
        assert conversation.conversation_id is not None
        try:
            return self._store.is_superseded(self._store.key(conversation.tenant, conversation.conversation_id))
        except StoreUnavailableError as error:  # what is held is most likely the newest, and the turn can go on
            log.warning("conversation %r is taken as it is held: %s", conversation.conversation_id, error)
            return False

    def give_up(self, conversation: Conversation) -> None:
        self._changed.pop(conversation.handle, None)
        who = conversation.conversation_id, conversation.tenant
        log.info("conversation %r of tenant %r: another replica has gone on with it", *who)

    def _wait_until_left(self, tenant: str, conversation_id: str) -> None:
        """One that has just been ended to make room is copied out before the next step; till then the store is old."""
        deadline = time.monotonic() + LEAVING_S
        while any((c.tenant, c.conversation_id) == (tenant, conversation_id) for c in list(self._changed.values())):
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"conversation_id: {conversation_id!r} is being written to its checkpoint; try again later"
                )
            time.sleep(POLL_S)

    def _check(self, found: Checkpoint, request: Request) -> Revival:
        if (found.tenant, found.conversation_id) != (request.tenant, request.conversation_id):
            raise _unusable("holds another conversation")
        if found.engine != self._fingerprint:
            raise _unusable(f"was written by engine {found.engine[:16]}, expected {self._fingerprint[:16]}")
        policy = find_policy(found.policy)
        if policy is None:
            raise _unusable(f"was written under policy {found.policy.name!r}, which is not known here")
        if policy_ref(policy) != found.policy:
            found = found.without_cache(f"its policy {policy.name} has changed")
        if found.kv is not None and (reason := check_kv(found.kv, self._manager, len(found.text.tokens))):
            found = found.without_cache(f"its tables do not fit: {reason}")
        return Revival(found, policy)

    def revived(self, conversation: Conversation, revival: Revival) -> None:
        for start, end in revival.checkpoint.text.protected:
            self._manager[conversation.handle].protect(start, end)
        self._revived.append((conversation, revival.checkpoint))

    def between_steps(self, make_room: Callable[[], bool], drop: Callable[[Conversation], None]) -> list[Event]:
        while self._revived:
            conversation, found = self._revived.pop(0)
            self._tell(conversation, found.damage or self._restore(conversation, found, make_room, drop))
        self._copy_changed()
        return self._waiting.take()

    def hold(self, conversation: Conversation, event: Event) -> list[Event]:
        if conversation.handle not in self._changed:
            return [event]
        return self._waiting.hold(conversation.handle, event)

    @property
    def holds(self) -> bool:
        return bool(self._waiting)

    def attach(self, wake: Callable[[], None]) -> None:
        self._waiting.wake = wake

    def _restore(
        self,
        conversation: Conversation,
        found: Checkpoint,
        make_room: Callable[[], bool],
        drop: Callable[[Conversation], None],
    ) -> str:
        """Fills a cache; why it stays empty, "" if it is filled."""
        assert found.kv is not None
        while True:
            try:
                place = reinstate(self._manager, conversation.handle, found.kv.tables)
                break
            except OutOfMemoryError:
                if not make_room():
                    return "there is no room for it"
        try:
            self._transfer.copy_in(place, found.kv.image)
        except Exception as error:  # the device; nothing half-written may be read
            drop(conversation)
            return f"it could not be copied in ({type(error).__name__}: {error})"
        return ""

    def _tell(self, conversation: Conversation, damage: str) -> None:
        """The log and the client hear what became of a revived conversation."""
        who = f"conversation {conversation.conversation_id!r} of tenant {conversation.tenant!r}"
        if damage:
            self._recomputed += 1
            conversation.loss = f"kv of its checkpoint not used: {damage}"
            log.warning("%s: %s; it is computed again from its text", who, conversation.loss)
            return
        self._restored += 1
        num_tokens = self._manager[conversation.handle].num_tokens
        if conversation.turn is not None:
            conversation.turn.note = f"kv restored from a checkpoint of {num_tokens} tokens"
        log.info("%s: kv restored from a checkpoint of %d tokens", who, num_tokens)

    def changed(self, conversation: Conversation) -> None:
        if conversation.turn is None and not conversation.end_requested and _is_named(conversation):
            self._changed[conversation.handle] = conversation

    def _copy_changed(self) -> None:
        """One conversation, so that the next step does not wait long, and all that are about to leave the memory."""
        ready = self._ready()
        for conversation in (c for c in ready if c.end_requested):
            self._copy_out(conversation)
        going_on = next((c for c in ready if not c.end_requested), None)
        if going_on is not None and self._store.has_room(self._manager.kv_bytes(going_on.handle)):
            self._copy_out(going_on)

    def _ready(self) -> list[Conversation]:
        return [c for c in self._changed.values() if c.turn is None and c.handle in self._manager]

    def _copy_out(self, conversation: Conversation) -> None:
        """Its text alone where the queue has no room, so that no older checkpoint is taken for the newest."""
        self._manager.open_commits.conclude(conversation.handle)
        del self._changed[conversation.handle]
        kv = self._manager[conversation.handle]
        num_bytes = self._manager.kv_bytes(conversation.handle)
        part: KvPart | None = None
        if kv.num_tokens and self._store.has_room(num_bytes):
            part = KvPart(tables_of(kv), self._transfer.copy_out(place_of(kv)))
        assert conversation.conversation_id is not None
        copy = Checkpoint(
            engine=self._fingerprint,
            tenant=conversation.tenant,
            conversation_id=conversation.conversation_id,
            policy=policy_ref(conversation.policy),
            text=ChatText(
                tokens=tuple(conversation.tokens),
                ended=conversation.ended,
                messages=conversation.messages,
                system_tokens=conversation.system_tokens,
                num_computed=conversation.num_computed,
                protected=tuple(kv.protected_ranges()),
                taken=conversation.taken,
            ),
            kv=part,
        )
        key = self._store.key(conversation.tenant, conversation.conversation_id)
        done = self._waiting.told_by(conversation.handle)
        self._store.put(key, lambda: encode(copy), num_bytes if part is not None else 0, done)

    def forget(self, tenant: str, conversation_id: str) -> bool:
        key = self._store.key(tenant, conversation_id)
        if not self._store.exists(key):
            return False
        self._store.delete(key)
        return True

    def discard(self, conversation: Conversation) -> None:
        self._changed.pop(conversation.handle, None)
        self._waiting.release(conversation.handle)
        if conversation.conversation_id is not None and _is_named(conversation):
            self._store.delete(self._store.key(conversation.tenant, conversation.conversation_id))

    def figures(self) -> CheckpointFigures:
        counts = self._store.counts
        return CheckpointFigures(
            written=counts.written,
            written_bytes=counts.written_bytes,
            deleted=counts.deleted,
            failed=counts.failed,
            swept=counts.swept,
            waiting=len(self._changed),
            restored=self._restored,
            recomputed=self._recomputed,
            refused=self._refused,
        )

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._ready() and time.monotonic() < deadline:
            self._copy_changed()
            time.sleep(POLL_S)
        self._store.close(max(0.0, deadline - time.monotonic()))


def _is_named(conversation: Conversation) -> bool:
    """Whether a client can ask for it by its id."""
    return conversation.conversation_id is not None and not conversation.is_unnamed


def _unusable(reason: str) -> LostConversationError:
    return LostConversationError(
        f"conversation_id: its checkpoint {reason}; end the conversation (conversation_end) and begin it anew, or send "
        f"it to a server with that engine"
    )
