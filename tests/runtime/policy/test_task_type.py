"""The kind of a conversation from its first message."""

import pytest
from simulated_engine import drain, last_of, make_engine

from runtime.config import RuntimeConfig
from runtime.errors import RequestError
from runtime.policy.task_type import detect_task
from runtime.request import FinishEvent, Request, SamplingParams

CODE = """Hello. This is the main file:

def main(argv):
    args = parse(argv)
    for path in find_photos(args.folder):
        target = new_name(path, args.pattern)
        print(path, "->", target)
    return 0
"""
STORY = (
    'The rain had stopped before dawn. Mira looked at the sea and smiled. "We leave today," she said, and her brother '
    'turned away. He walked down to the boat. "Not without the map," he whispered.'
)


@pytest.mark.parametrize(("text", "expected"), [
    (CODE, "code"),
    ("```\nlet x = 3;\n```\nwhat is x?", "code"),
    ("Please write a Python function that sorts names.", "code"),
    ("for (int i = 0; i < n; ++i) { total += a[i]; }", "code"),
    (STORY, "story"),
    ("Tell me a story about a lighthouse.", "story"),
    ("Good morning. My bicycle makes a noise uphill. What should I check?", "chat"),
    ("Which train goes to Oslo tomorrow?", "chat"),
    ("", "chat"),
])  # fmt: skip
def test_types(text: str, expected: str) -> None:
    assert detect_task(text) == expected


def test_the_first_message_decides_for_the_conversation() -> None:
    engine, _, manager = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20), policy="pyramidkv-pooled")
    sampling = SamplingParams(max_tokens=2)
    engine.submit(Request("a", "for (int i = 0; i < n; ++i) { x += i; }", sampling, "c"))
    assert isinstance(last_of(drain(engine), "a"), FinishEvent)
    assert manager[0].policy.name == "pyramidkv-pooled-code"
    for i, name in enumerate(("pyramidkv-pooled", "pyramidkv-pooled-code", None)):
        engine.submit(Request(f"b{i}", "Tell me a story.", sampling, "c", policy=name))
        assert isinstance(last_of(drain(engine), f"b{i}"), FinishEvent)
    assert manager[0].policy.name == "pyramidkv-pooled-code"
    with pytest.raises(RequestError, match="pyramidkv-pooled-story"):
        engine.submit(Request("d", "more", sampling, "c", policy="pyramidkv-pooled-story"))
