"""Logs as one JSON object a line: what happened to which request of which conversation, never what was said.

{"time": "2026-11-30T08:00:00.123Z", "level": "info", "logger": "commitkv.turns", "event": "turn ended",
 "request_id": ..., "conversation_id": ..., "tenant": ..., "reason": ..., ...}

Records of other loggers get the same shape, their message as `event`. Fields come with `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from runtime.errors import ConfigError
from runtime.request import FinishEvent, Request

LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("commitkv.turns")


class JsonFormatter(logging.Formatter):
    """One line per record. An exception becomes the fields `error` and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = repr(record.exc_info[1])
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True, default=str)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Sends every record from `level` up to `stream` (standard error). Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log_level: got {level!r}, expected one of {', '.join(LEVELS)}; correct it")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def event(level: int, what: str, fields: Mapping[str, object]) -> None:
    """One line; fields that are None or empty are left out."""
    log.log(level, what, extra={"fields": {key: value for key, value in fields.items() if value not in (None, "")}})


def _who(request: Request) -> dict[str, object]:
    return {
        "request_id": request.request_id,
        "conversation_id": request.conversation_id,
        "tenant": request.tenant,
    }


def turn_arrived(request: Request) -> None:
    """A turn is about to be queued, or refused."""
    event(logging.DEBUG, "turn arrived", {**_who(request), "max_tokens": request.sampling.max_tokens})


def turn_ended(request: Request, finish: FinishEvent) -> None:
    """A turn ran to its end; times count from its arrival."""
    stats = finish.stats
    spans = {
        "queue_ms": stats.first_scheduled_ns,
        "first_token_ms": stats.first_token_ns,
        "turn_ms": stats.last_token_ns,
    }
    event(
        logging.INFO,
        "turn ended",
        {
            **_who(request),
            "reason": finish.reason,
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "generated_tokens": stats.generated_tokens,
            "recomputed_tokens": stats.recomputed_tokens or None,
            "recomputed_reason": stats.recomputed_reason,
            **{name: round((end - stats.arrival_ns) / 1e6, 1) for name, end in spans.items() if end},
            "kv_bytes": stats.kv.kv_bytes,
            "kv_full_bytes": stats.kv.kv_full_bytes,
        },
    )


def turn_failed(request: Request, error: Exception) -> None:
    """A turn that had been accepted ended with an error of ours."""
    event(logging.ERROR, "turn failed", {**_who(request), "error": type(error).__name__, "message": str(error)})


def refused(request_id: str, conversation_id: str | None, error: Exception, reason: str) -> None:
    """A request was refused. Its message may quote what the client sent, so only what it is about is logged."""
    about = str(error).split(":", 1)[0]
    event(
        logging.WARNING,
        "request refused",
        {
            "request_id": request_id,
            "conversation_id": conversation_id,
            "reason": reason,
            "error": type(error).__name__,
            "about": about if about.replace("_", "").isalnum() else None,
        },
    )
