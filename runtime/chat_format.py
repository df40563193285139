"""Turns of a conversation as text, by the model's Jinja chat template, one turn at a time.

A conversation keeps its KV between turns, so only the text that a turn adds may be fed. The template is rendered with
placeholders; what it puts between, before and after the messages is read off, and checked against a full render of
several turns. Templates for which that is not exact (those that rewrite earlier messages, say) are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import ConfigError, RequestError
from runtime.request import Role

_log = logging.getLogger(__name__)

# Private-use characters: no template and no user writes them by accident, and trimming leaves them alone.
_SYSTEM, _USER, _ANSWER, _NEXT, _PROBE = (f"\ue000{name}\ue001" for name in ("sys", "user", "answer", "next", "probe"))
_CHECKED_TURNS = 4
_FIX = "correct the template in the model's files, or remove it to use the plain form"

FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class RenderedTurn:
    """New text of one turn.

    [0, system_end) is the system part, a default one that the template adds included; 0 when there is none.
    user_start: where character 0 of the user's message lies, so that its character i lies at user_start + i; when the
    template strips leading whitespace, those characters fall before the message. user_end: end of the message.
    """

    text: str
    system_end: int
    user_start: int
    user_end: int


@dataclass(frozen=True)
class _Pieces:
    """What the template writes around messages.

    opening: before the first user message, without a system prompt.
    system_head, system_tail: before and after a given system prompt; None when the template takes none.
    user_head: the last part of what stands before a user message, '' if none can be told apart.
    after_user: from a user message to where the answer begins.
    after_answer: from the end of an answer to the next user message.
    """

    opening: str
    system_head: str | None
    system_tail: str
    user_head: str
    after_user: str
    after_answer: str


class ChatFormat:
    """Renders turns. Raises ConfigError for a template that cannot be taken apart exactly.

    bos_token, eos_token: for the template's variables of that name. end_tokens: texts of the tokens that end an
    answer (default: eos_token), to know which part of the template the model writes itself.
    Without a template a plain form is used, which starts with bos_token.
    """

    def __init__(
        self, template: str | None, bos_token: str = "", eos_token: str = "", end_tokens: Sequence[str] = ()
    ) -> None:
        self._bos, self._eos = bos_token, eos_token
        if template is None:
            _log.warning("the model has no chat template; turns are written as 'User: ...' and 'Assistant:'")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(FALLBACK_TEMPLATE if template is None else template)
            self._pieces = self._take_apart()
            self._trims_user = self._trims([], "user")
            self._trims_system = self._pieces.system_head is not None and self._trims([_turn(_USER)], "system")
            self._answer_lead, self._trims_answer = self._read_answers()
        except TemplateError as error:
            raise ConfigError(
                f"chat template: {error}, expected a template for system, user and assistant; {_FIX}"
            ) from error
        self._after_end = self._skip_end((*end_tokens, eos_token))
        self._check_turns()

    def first_turn(self, system: str | None, user: str) -> RenderedTurn:
        """Everything up to where the first answer begins. RequestError when the template takes no system prompt."""
        pieces = self._pieces
        before = pieces.opening
        if system is not None:
            if pieces.system_head is None:
                raise RequestError(
                    "system_prompt: got one, but this model's chat template has no fixed place for it; "
                    "leave it out or say it in the first message"
                )
            before = pieces.system_head + (system.strip() if self._trims_system else system) + pieces.system_tail
        system_part = before.removesuffix(pieces.user_head)
        return self._with_user(before, user, 0 if system_part in ("", self._bos) else len(system_part))

    def next_turn(self, user: str, previous_ended: bool) -> RenderedTurn:
        """What follows an answer. previous_ended: the conversation already holds the token that ended the answer."""
        return self._with_user(self._after_end if previous_ended else self._pieces.after_answer, user, 0)

    def answer(self, text: str) -> str:
        """An answer that a client gives, as the template writes it. What ends it is written with the next turn."""
        return self._answer_lead + (text.strip() if self._trims_answer else text)

    def plain(self, role: Role, text: str) -> str:
        """A message less what does not change how the template writes it; to compare messages by."""
        if role == "assistant":
            return text.strip() if self._trims_answer else text.lstrip() if self._answer_lead else text
        return text.strip() if (self._trims_user if role == "user" else self._trims_system) else text

    def system_end(self, rendered: str) -> int:
        """Where the system part of a rendered conversation ends, at its first user message; 0 where it has none."""
        head = self._pieces.user_head
        found = rendered.find(head) if head else 0
        return 0 if rendered[: max(0, found)] == self._bos else max(0, found)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The template applied to a whole conversation; messages have `role` and `content`. Raises TemplateError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self._eos,
                tools=None,
                documents=None,
            )
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _with_user(self, before: str, user: str, system_end: int) -> RenderedTurn:
        kept = user.strip() if self._trims_user else user
        skipped = len(user) - len(user.lstrip()) if self._trims_user else 0
        start = len(before)
        return RenderedTurn(before + kept + self._pieces.after_user, system_end, start - skipped, start + len(kept))

    def _skip_end(self, end_tokens: Sequence[str]) -> str:
        """`after_answer` less the end token, and less blanks before it: the model put its token where it wanted."""
        after = self._pieces.after_answer
        for token in end_tokens:
            if token and after.lstrip().startswith(token):
                return after.lstrip().removeprefix(token)
        return after

    def _take_apart(self) -> _Pieces:
        """Read the pieces off renders of placeholders."""
        opening, after_user = _split(self.render([_turn(_USER)]), _USER)
        talk = [_turn(_USER), _turn(_ANSWER, "assistant")]
        closing = _split(self.render(talk, add_generation_prompt=False), _USER, _ANSWER)[2]
        after_answer = _split(self.render([*talk, _turn(_NEXT)]), _USER, _ANSWER, _NEXT)[2]
        # What closes an answer, then what opens the next message; the first is missing where nothing follows it.
        user_head = after_answer.removeprefix(closing) if closing else after_answer
        head, tail = self._system_pieces(after_user)
        return _Pieces(opening, head, tail, user_head, after_user, after_answer)

    def _system_pieces(self, after_user: str) -> tuple[str | None, str]:
        """Text around a system prompt; (None, '') if the template refuses it, loses it, or moves it between turns."""
        talk = [_turn(_SYSTEM, "system"), _turn(_USER)]
        longer = [*talk, _turn(_ANSWER, "assistant"), _turn(_NEXT)]
        try:
            head, tail, rest = _split(self.render(talk), _SYSTEM, _USER)
            again = _split(self.render(longer), _SYSTEM, _USER, _ANSWER, _NEXT)
        except (TemplateError, ConfigError):
            return None, ""
        return (head, tail) if again[:2] == [head, tail] and rest == after_user else (None, "")

    def _trims(self, following: list[dict[str, str]], role: str) -> bool:
        """Whether the template strips messages of `role`; ConfigError if it changes them in any other way."""
        plain = self.render([_turn(_PROBE, role), *following])
        text = "A'\"<&>{{ x }}\\ \u00e9\u4f60\n\n  b"
        padded = " \n" + text + "\n\t "
        got = self.render([_turn(padded, role), *following])
        if got == plain.replace(_PROBE, padded):
            return False
        if got == plain.replace(_PROBE, text):
            return True
        raise ConfigError(
            f"chat template: changes the text of {role} messages, expected it verbatim or stripped; {_FIX}"
        )

    def _read_answers(self) -> tuple[str, bool]:
        """Blanks that the template puts before an earlier answer, and whether it strips answers.

        Other changes that it makes to earlier answers (leaving out what the model thought, say) are not made here: the
        model goes on from what it wrote.
        """
        answers = [
            _split(self.render([_turn(_USER), _turn(text, "assistant"), _turn(_NEXT)]), _USER, _NEXT)[1]
            for text in (_ANSWER, f" {_ANSWER}\n")
        ]
        lead = answers[0].partition(_ANSWER)[0].removeprefix(self._pieces.after_user)
        return lead if lead.isspace() else "", answers[0] == answers[1]

    def _check_turns(self) -> None:
        """Several turns put together from pieces must equal the template's own render of all of them."""
        systems = [None] if self._pieces.system_head is None else [None, _SYSTEM]
        for system in systems:
            messages = [] if system is None else [_turn(system, "system")]
            text = ""
            for index in range(_CHECKED_TURNS):
                user, answer = f"{_USER}{index}", f"{_ANSWER}{index}"
                turn = self.next_turn(user, False) if index else self.first_turn(system, user)
                messages.append(_turn(user))
                text += turn.text
                try:
                    whole = self.render(messages)
                except TemplateError as error:
                    raise ConfigError(f"chat template: {error}, in a talk of {index + 1} turns; {_FIX}") from error
                if not _same_but_for_leads(text, whole):
                    raise ConfigError(
                        f"chat template: turn {index + 1} changes what was written before it, expected each turn only "
                        f"to add text; {_FIX}"
                    )
                messages.append(_turn(answer, "assistant"))
                text += answer


def _turn(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def _split(text: str, *marks: str) -> list[str]:
    """The stretches of `text` around `marks`, which must occur once each and in this order."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ConfigError(f"chat template: leaves out, repeats or reorders messages, expected each once; {_FIX}")
        part, text = text.split(mark)
        parts.append(part)
    return [*parts, text]


def _same_but_for_leads(pieces: str, whole: str) -> bool:
    """Equal, except that a full render may put blanks before an answer, which the model writes itself."""
    blanks = re.compile(rf"\s+(?={_ANSWER})")
    return blanks.sub("", pieces) == blanks.sub("", whole)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
