"""Turns put together from pieces equal the template's own render of the whole conversation."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chat_format import ChatFormat, RenderedTurn
from runtime.errors import ConfigError, RequestError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if loop.first and system is not none %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% else %}{{ ' ' + content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN = """\
{%- if tools %}
    {{- raise_exception('no tools here') }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# name: (template, bos, eos, end tokens)
FORMATS = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>", ()),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<|eot_id|>")),
    "mistral": (MISTRAL, "<s>", "</s>", ()),
    "llama2": (LLAMA2, "<s>", "</s>", ()),
    "qwen": (QWEN, "", "<|im_end|>", ()),
    "plain": (None, "<s>", "</s>", ()),
}
TALK = (("Hello 你好", "Hi there."), ("Hello 你好", "You said that."), ("And\n\nnow?  'x' {{ y }}", "7"), ("Bye", ""))


def make(name: str) -> ChatFormat:
    template, bos, eos, ends = FORMATS[name]
    return ChatFormat(template, bos, eos, ends)


def play(form: ChatFormat, system: str | None, ended: bool, lead: str, end: str) -> tuple[str, list[dict[str, str]]]:
    """The text a conversation holds after its last prompt, the model ending each answer with `end` if `ended`."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = ""
    for index, (user, answer) in enumerate(TALK):
        turn = form.next_turn(user, ended) if index else form.first_turn(system, user)
        assert turn.text[turn.user_start : turn.user_end] == user
        text += turn.text
        messages.append({"role": "user", "content": user})
        if index + 1 < len(TALK):
            messages.append({"role": "assistant", "content": answer})
            text += lead + answer + (end if ended else "")
    return text, messages


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief.\nSay 'yes'."])
@pytest.mark.parametrize("name", FORMATS)
def test_turns_equal_the_whole(name: str, system: str | None, ended: bool) -> None:
    form = make(name)
    if name == "mistral" and system is not None:
        with pytest.raises(RequestError, match="no fixed place"):
            form.first_turn(system, "x")
        return
    lead = " " if name in ("mistral", "llama2", "plain") else ""
    end = {
        "chatml": "<|im_end|>",
        "qwen": "<|im_end|>",
        "llama3": "<|eot_id|>",
        "mistral": "</s>",
        "llama2": " </s>",
    }.get(name, "")
    text, messages = play(form, system, ended, lead, end)
    assert text == form.render(messages)


def test_chatml_default_system_prompt_is_the_system_part() -> None:
    turn = make("chatml").first_turn(None, "system")
    assert turn.text[: turn.system_end] == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    assert turn.text == turn.text[: turn.system_end] + "<|im_start|>user\nsystem<|im_end|>\n<|im_start|>assistant\n"
    assert turn.text[turn.user_start : turn.user_end] == "system"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("chatml", "<|im_start|>system\nS<|im_end|>\n"),
        ("qwen", "<|im_start|>system\nS<|im_end|>\n"),
        ("llama3", "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"),
        ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n"),
        ("plain", "<s>S\n\n"),
    ],
)
def test_system_part(name: str, part: str) -> None:
    turn = make(name).first_turn("S", "question")
    assert turn.text[: turn.system_end] == part


@pytest.mark.parametrize("name", ["llama3", "mistral", "llama2", "plain"])
def test_no_system_part(name: str) -> None:
    assert make(name).first_turn(None, "question").system_end == 0


def test_a_given_end_token_is_not_repeated() -> None:
    form = make("chatml")
    assert form.next_turn("b", True).text == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert form.next_turn("b", False).text == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert make("llama3").next_turn("b", True).text.startswith("<|start_header_id|>user")
    assert make("llama2").next_turn("b", True).text == "<s>[INST] b [/INST]"


def test_stripped_messages_keep_their_offsets() -> None:
    """Llama 3 strips; offsets still map character i of the request's text."""
    user = " \n remember 42 \n"
    turn = make("llama3").first_turn(None, user)
    at = user.index("42")
    assert turn.text[turn.user_start + at : turn.user_start + at + 2] == "42"
    assert turn.text[: turn.user_end].endswith("remember 42")
    assert (
        make("llama3")
        .first_turn(" S \n", "x")
        .text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>")
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.text(min_size=1), st.text()), min_size=1, max_size=4), st.booleans())
def test_any_text_chatml(talk: list[tuple[str, str]], with_system: bool) -> None:
    form = make("chatml")
    messages = [{"role": "system", "content": "Rules."}] if with_system else []
    text = ""
    for index, (user, answer) in enumerate(talk):
        turn = form.next_turn(user, False) if index else form.first_turn("Rules." if with_system else None, user)
        text += turn.text
        messages.append({"role": "user", "content": user})
        assert text == form.render(messages)
        text += answer
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m['content'] }", "unexpected"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[-1]['content'] }}", "leaves out"),
        ("{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "leaves out|changes the text"),
        ("{% for m in messages %}{{ m['content'] | replace('A', 'B') }}{% endfor %}", "changes the text"),
        ("{% for m in messages %}{{ loop.index ~ m['content'] }}{% endfor %}", "changes what was written|leaves out"),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "changes what was written"),
        ("{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}", "TypeError"),
        ("{% for m in messages %}{{ ''.__class__.__mro__ }}{% endfor %}", "unsafe|leaves out"),
    ],
)
def test_refused_templates(template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ChatFormat(template, "<s>", "</s>")
    assert "\n" not in str(caught.value)


def test_a_system_prompt_that_moves_is_refused_but_talk_works() -> None:
    """Some Mistral templates write the system prompt into the last user message."""
    template = (
        "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}[INST] "
        "{% if loop.last and s is defined %}{{ s + '\n\n' }}{% endif %}{{ m['content'] }}[/INST]"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    form = ChatFormat(template, "", "</s>")
    assert form.first_turn(None, "a") == RenderedTurn("[INST] a[/INST]", 0, 7, 8)
    assert form.next_turn("b", True).text == "[INST] b[/INST]"
    with pytest.raises(RequestError, match="no fixed place"):
        form.first_turn("S", "a")


def test_plain_form_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        form = ChatFormat(None)
        form.first_turn(None, "a")
        form.next_turn("b", False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert form.first_turn(None, "a").text == "User: a\nAssistant:"


def test_the_system_part_of_a_rendered_text_is_found() -> None:
    chat = make("chatml")
    for system in (None, "Be brief."):
        turn = chat.first_turn(system, "Hello")
        assert chat.system_end(turn.text) == turn.system_end > 0
    plain = ChatFormat(None, bos_token="<s>")
    assert plain.system_end(plain.first_turn(None, "Hello").text) == 0
    assert plain.system_end(plain.first_turn("Be brief.", "Hello").text) == len("<s>Be brief.\n\n")


@pytest.mark.parametrize(
    ("name", "given", "written", "compared"),
    [
        ("chatml", " hi\n", " hi\n", " hi\n"),
        ("llama3", " hi\n", "hi", "hi"),
        ("mistral", "hi ", " hi ", "hi "),
        ("llama2", " hi", "  hi", "hi"),
    ],
)
def test_given_answers_are_written_as_the_template_writes_them(
    name: str, given: str, written: str, compared: str
) -> None:
    chat = make(name)
    assert chat.answer(given) == written
    assert chat.plain("assistant", given) == compared
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": given},
        {"role": "user", "content": "b"},
    ]
    text = chat.first_turn(None, "a").text + chat.answer(given) + chat.next_turn("b", False).text
    assert text == chat.render(messages)


def test_messages_are_compared_by_what_the_template_makes_of_them() -> None:
    strips, verbatim = make("llama3"), make("chatml")
    for role in ("system", "user"):
        assert strips.plain(role, " hi\n") == "hi" and verbatim.plain(role, " hi\n") == " hi\n"  # type: ignore[arg-type]
