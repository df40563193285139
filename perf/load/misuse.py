"""Requests that a server must refuse: what clients get wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from perf.client import tensor

LONG_TEXT = "far too long " * 40_000


def _chat(role: str) -> Mapping[str, Any]:
    text = json.dumps([{"role": role, "content": "hello"}])
    return {"messages": tensor("messages", text, "BYTES")}


# Each is one request, tensors by name; the server has to answer every one with an error.
BAD_REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "no text": {"sampling_param_max_tokens": 3},
    "empty text": {"text_input": ""},
    "bytes that are not UTF-8": {"text_input": b"\xff\xfe\x80"},
    "text far beyond the longest prompt": {"text_input": LONG_TEXT},
    "text as a number": {"text_input": tensor("text_input", 5, "INT32")},
    "two texts": {"text_input": ["one", "two"]},
    "negative max_tokens": {"text_input": "a", "sampling_param_max_tokens": -1},
    "max_tokens as a fraction": {
        "text_input": "a",
        "sampling_param_max_tokens": tensor("sampling_param_max_tokens", 3.0, "FP32"),
    },
    "temperature that is no number": {"text_input": "a", "sampling_param_temperature": math.nan},
    "top_p above 1": {"text_input": "a", "sampling_param_top_p": 1.5},
    "negative top_k": {"text_input": "a", "sampling_param_top_k": -2},
    "empty stop string": {"text_input": "a", "sampling_param_stop": [""]},
    "range outside the text": {"text_input": "abc", "protect": [[1, 9]]},
    "range backwards": {"text_input": "abc", "protect": [[2, 1]]},
    "unknown policy": {"text_input": "a", "kv_policy": "no-such-policy"},
    "endless conversation id": {"text_input": "a", "conversation_id": "x" * 5000},
    "conversation id that cannot be printed": {"text_input": "a", "conversation_id": "a\x00b"},
    "name of a turn in no conversation": {"text_input": "a", "turn_id": "first"},
    "end of no conversation": {"conversation_end": True},
    "end of an unknown conversation": {"conversation_end": True, "conversation_id": "never-begun"},
    "figures of an unknown conversation": {"stats": True, "conversation_id": "never-begun"},
    "stop without a request id": {"stop": True},
    "a tensor of another name": {"text_input": "a", "max_tokens": tensor("max_tokens", 3, "INT32")},
    "messages that are not JSON": {"messages": tensor("messages", "[{", "BYTES")},
    "messages without a user": _chat("assistant"),
    "messages of an unknown role": _chat("oracle"),
}
