"""Tells from a conversation's first message whether it is about code, a story, or neither ("chat")."""

from __future__ import annotations

import re
from typing import Literal

TaskType = Literal["code", "story", "chat"]
TASK_TYPES: tuple[TaskType, ...] = ("code", "story", "chat")

# What source text is full of and prose is not: fences, definitions, calls, statement ends, paths, traces.
_CODE = re.compile(
    r"```|^\s*(?:def|class|import|from|return|if|for|while|public|private|const|let|var|fn|func|#include|SELECT)\b.*"
    r"[(:;{=*]|[;{}]\s*$|\w+\([^)\n]*\)\s*[;:{.]|=>|->|::|!=|==|</\w+>|\bTraceback\b|\w+\.(?:py|cpp|js|ts|rs|go|java)\b",
    re.MULTILINE,
)
_CODE_WORDS = re.compile(
    r"\b(?:function|refactor|bug|compile[rs]?|unit tests?|stack trace|regex|API|SQL|Python|JavaScript|TypeScript|C\+\+|"
    r"Rust|Java|pull request|source code|exception)\b"
)
_STORY_WORDS = re.compile(
    r"\b(?:story|novel|chapter|tale|once upon a time|fairy ?tale|poem|fiction|plot|protagonist|narrator|character)\b",
    re.IGNORECASE,
)
# Narration: a pronoun or name with a verb of telling in the past, and speech in quotation marks.
_NARRATION = re.compile(
    r"\b(?:he|she|they|[A-Z][a-z]+) (?:said|asked|looked|walked|turned|smiled|whispered|thought|felt|stood|ran)\b|"
    r"[\"“][^\"”\n]{3,200}[,.!?][\"”] (?:he|she|they|said|[A-Z][a-z]+)"
)
# Marks for every 100 words from which a text counts as code or as narration; single words need this many.
_DENSE = 3.0
_FEW_WORDS = 1


def detect_task(text: str) -> TaskType:
    """The kind of work that `text` asks for or brings."""
    words = max(1, len(text.split()))
    code, narration = (100.0 * len(pattern.findall(text)) / words for pattern in (_CODE, _NARRATION))
    if max(code, narration) >= _DENSE:
        return "code" if code >= narration else "story"
    asks_code, asks_story = (len(pattern.findall(text)) for pattern in (_CODE_WORDS, _STORY_WORDS))
    if max(asks_code, asks_story) >= _FEW_WORDS and words < 200:
        return "code" if asks_code >= asks_story else "story"
    return "chat"
