"""One conversation as bytes: what a checkpoint holds, how it is written, and what is checked when it is read.

    preamble   magic, format version, length and SHA-256 of the head
    head       JSON: whose conversation it is, which engine and policy wrote it, length and SHA-256 of each part
    text       JSON: `ChatText`
    tables     JSON: pages, blocks and counts, as `KvTables`
    pages, seen, blocks, score      bytes of the arenas, as `KvImage`

Every part has a checksum of its own, so that a checkpoint whose cache is damaged still gives its tokens, from which the
cache can be computed again. Ids of pages and blocks are not written: another engine gives its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.errors import LostConversationError
from runtime.history import HeldMessage, TakenTurn

FORMAT_VERSION = 1
_MAGIC = b"CommitKV"
_PREAMBLE = struct.Struct("<8sII32s")
_PARTS = ("text", "tables", "pages", "seen", "blocks", "score")
_FIX = "end the conversation (conversation_end) and begin it anew"

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


@dataclass(frozen=True)
class PolicyRef:
    """A conversation's policy.   digest: SHA-256 of everything the policy says.   chosen_from: see `Policy`."""

    name: str
    chosen_from: str
    digest: str


@dataclass(frozen=True)
class PageTable:
    """positions: logical position of each token in slot order.   state: a value of `runtime.lifecycle.State`."""

    positions: tuple[int, ...]
    state: str
    compacted: bool


@dataclass(frozen=True)
class KvTables:
    """What the manager knows about one conversation's cache, ids left out; fields as in `ConversationKv`.

    block_starts [num_rows + 1], block_lens [num_blocks]: as in `runtime.step.BlockTable`.
    counts: entries by state.
    """

    pages: tuple[PageTable, ...]
    block_format: str
    block_starts: tuple[int, ...]
    block_lens: tuple[int, ...]
    counts: dict[str, int]
    num_tokens: int
    committed_tokens: int
    num_commits: int
    peak_bytes: int
    unprobed: tuple[tuple[int, int], ...]
    whole: bool
    reread: tuple[tuple[int, int], ...]
    reread_at: int


@dataclass(frozen=True, eq=False)
class KvImage:
    """Bytes of one conversation in the arenas. L layers, P pages and B blocks in the order of the tables.

    pages: [L, P, G, 2, page_tokens, D] kv_dtype.   seen: [L, P, G, page_tokens] fp16.
    blocks: [B, block_bytes].   score: [B, block_entries] fp16. What is not filled is zero.
    """

    pages: Bytes
    seen: Bytes
    blocks: Bytes
    score: Bytes

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in (self.pages, self.seen, self.blocks, self.score))


@dataclass(frozen=True, eq=False)
class KvPart:
    """The cache of a conversation."""

    tables: KvTables
    image: KvImage


@dataclass(frozen=True)
class ChatText:
    """What a conversation says; enough to compute its cache again. Fields as in `runtime.conversation.Conversation`.

    protected: [start, end) ranges of tokens that are never merged or evicted.
    """

    tokens: tuple[int, ...]
    ended: bool
    messages: tuple[HeldMessage, ...]
    system_tokens: int
    num_computed: int
    protected: tuple[tuple[int, int], ...]
    taken: TakenTurn | None = None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One conversation between two turns.

    engine: fingerprint of the engine that wrote it.
    kv: None where it could not be read, is of no use here, or was not written; `damage` says why when it is read.
    """

    engine: str
    tenant: str
    conversation_id: str
    policy: PolicyRef
    text: ChatText
    kv: KvPart | None
    damage: str = ""

    def without_cache(self, damage: str) -> Checkpoint:
        """The same with nothing but its text, since the cache is of no use here."""
        return dataclasses.replace(self, kv=None, damage=damage)


def encode(checkpoint: Checkpoint) -> list[Bytes]:
    """The checkpoint as pieces that concatenate to one object."""
    kv = checkpoint.kv
    image = kv.image if kv is not None else KvImage(b"", b"", b"", b"")
    parts: list[Bytes] = [
        _json(dataclasses.asdict(checkpoint.text)),
        _json(dataclasses.asdict(kv.tables) if kv is not None else None),
        *(image.pages, image.seen, image.blocks, image.score),
    ]
    head = _json(
        {
            "engine": checkpoint.engine,
            "tenant": checkpoint.tenant,
            "conversation_id": checkpoint.conversation_id,
            "policy": dataclasses.asdict(checkpoint.policy),
            "parts": [
                {"name": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
                for name, part in zip(_PARTS, parts, strict=True)
            ],
        }
    )
    preamble = _PREAMBLE.pack(_MAGIC, FORMAT_VERSION, len(head), hashlib.sha256(head).digest())
    return [preamble, head, *parts]


def decode(data: Bytes) -> Checkpoint:
    """Reads what `encode` wrote, as far as its checksums hold.

    Raises LostConversationError where not even the tokens can be read, and for another format version.
    """
    head, at = _read_head(data)
    try:
        sizes = [int(part["bytes"]) for part in head["parts"]]
        sums = [str(part["sha256"]) for part in head["parts"]]
        named = [part["name"] for part in head["parts"]] == list(_PARTS) and min(sizes) >= 0
        policy = PolicyRef(**head["policy"])
        owner = {name: str(head[name]) for name in ("engine", "tenant", "conversation_id")}
    except (KeyError, TypeError, ValueError) as error:
        raise _lost(f"head not understood ({error!r})") from error
    if not named:
        raise _lost("head names other parts")
    view = memoryview(data)
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    good = [
        len(part) == size and hashlib.sha256(part).hexdigest() == digest
        for part, size, digest in zip(parts, sizes, sums, strict=True)
    ]
    if not good[0]:
        raise _lost("the text does not match its checksum")
    text = _parsed(_read_text, parts[0], "text")
    checkpoint = Checkpoint(**owner, policy=policy, text=text, kv=None)
    bad = [name for name, is_good in zip(_PARTS, good, strict=True) if not is_good]
    if bad:
        return checkpoint.without_cache(f"its {' and '.join(bad)} do not match their checksum")
    tables = _parsed(_read_tables, parts[1], "tables")
    if tables is None:
        return checkpoint.without_cache("it was written without one")
    return dataclasses.replace(checkpoint, kv=KvPart(tables, KvImage(*parts[2:])))


def _read_head(data: Bytes) -> tuple[Mapping[str, Any], int]:
    """The head, and where the first part begins."""
    if len(data) < _PREAMBLE.size:
        raise _lost(f"{len(data)} bytes, too few for a checkpoint")
    magic, version, head_bytes, digest = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC:
        raise _lost("no checkpoint of CommitKV")
    if version != FORMAT_VERSION:
        raise _lost(f"format version {version}, expected {FORMAT_VERSION}")
    end = _PREAMBLE.size + head_bytes
    raw = bytes(data[_PREAMBLE.size : end])
    if hashlib.sha256(raw).digest() != digest:
        raise _lost("the head does not match its checksum")
    head = json.loads(raw)
    if not isinstance(head, dict):
        raise _lost("the head is no JSON object")
    return head, end


def _parsed(read: Callable[[Any], T], part: memoryview, name: str) -> T:
    """A part whose checksum held and which another version of this file may yet have written."""
    try:
        return read(json.loads(bytes(part)))
    except (KeyError, TypeError, ValueError) as error:
        raise _lost(f"{name} not understood ({error!r})") from error


def _read_text(record: Any) -> ChatText:
    taken = record.get("taken")  # older ones do not say
    return ChatText(
        tokens=tuple(map(int, record["tokens"])),
        ended=bool(record["ended"]),
        messages=tuple(HeldMessage(**message) for message in record["messages"]),
        system_tokens=int(record["system_tokens"]),
        num_computed=int(record["num_computed"]),
        protected=_spans(record["protected"]),
        taken=None if taken is None else TakenTurn(**{**taken, "logprobs": tuple(taken["logprobs"])}),
    )


def _read_tables(record: Any) -> KvTables | None:
    if record is None:
        return None
    pages = tuple(
        PageTable(tuple(map(int, page["positions"])), str(page["state"]), bool(page["compacted"]))
        for page in record["pages"]
    )
    numbers = ("num_tokens", "committed_tokens", "num_commits", "peak_bytes", "reread_at")
    counted = {name: int(record[name]) for name in numbers}
    return KvTables(
        pages=pages,
        block_format=str(record["block_format"]),
        block_starts=tuple(map(int, record["block_starts"])),
        block_lens=tuple(map(int, record["block_lens"])),
        counts={str(state): int(count) for state, count in record["counts"].items()},
        unprobed=_spans(record["unprobed"]),
        whole=bool(record.get("whole", False)),  # older ones do not say
        reread=_spans(record["reread"]),
        **counted,
    )


def _spans(pairs: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(start), int(end)) for start, end in pairs)


def _json(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _lost(reason: str) -> LostConversationError:
    return LostConversationError(f"conversation_id: its checkpoint cannot be read: {reason}; {_FIX}")
