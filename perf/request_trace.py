"""Triton's own trace of requests, as arguments of its server: when each was received, queued, computed and answered.

To files: JSON, written for every 100 requests (NAME.0, NAME.1, ...) and at the end, so that memory stays bounded. To an
OpenTelemetry collector: OTLP over HTTP, a span per request within the caller's trace (header `traceparent`).
"""

from __future__ import annotations

from pathlib import Path

from runtime.errors import ConfigError

REQUESTS_PER_FILE = 100
SERVICE = "commitkv"


def request_trace_arguments(target: str | None, every: int) -> tuple[str, ...]:
    """target: a file name, the http(s) URL of a collector, or None for no trace.   every: trace each n-th request.

    Raises ConfigError for a target or rate that cannot work.
    """
    if target is None:
        return ()
    if every < 1:
        raise ConfigError(f"--request-trace-every: got {every}, expected 1 (each request) or more; correct it")
    common = (f"--trace-config=rate={every}", "--trace-config=level=TIMESTAMPS")
    if target.startswith(("http://", "https://")):
        return (
            *common,
            "--trace-config=mode=opentelemetry",
            f"--trace-config=opentelemetry,url={target}",
            f"--trace-config=opentelemetry,resource=service.name={SERVICE}",
        )
    path = Path(target).resolve()
    if not path.parent.is_dir():
        raise ConfigError(f"--request-trace: no directory {path.parent}, expected one to write to; make it first")
    return (*common, f"--trace-config=triton,file={path}", f"--trace-config=triton,log-frequency={REQUESTS_PER_FILE}")
