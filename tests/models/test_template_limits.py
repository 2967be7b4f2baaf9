"""Chat templates that loop, grow or call themselves end in one line, within CPU time and memory."""

from __future__ import annotations

import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.chat import ChatFormat
from forge.models import template_limits
from forge.models.tokenizer import character_tokenizer
from forge.serve.requests import BadRequest, parse

HI = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(99999) %}"
END = "{% endfor %}"
DOUBLING = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s OP n.s %}{% endfor %}"

TOO_LONG = {
    "nested loops": LOOP * 3 + END * 3,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% for a in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}"
    ),
}
TOO_DEEP = {
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}
TOO_LARGE = [
    "{{ 'a' * 3000000000 }}",
    "{% set n = 3000000000 %}{{ n * 'a' }}",
    "{{ [1] * 3000000000 }}",
    "{% generation %}{{ 'a' * 3000000000 }}{% endgeneration %}",
    DOUBLING.replace("OP", "~"),
    DOUBLING.replace("OP", "+"),
    "{{ 'a'|center(3000000000) }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{{ 'a'.zfill(3000000000) }}",
    "{{ '\t'.expandtabs(3000000000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ range(99999)|join('a' * 100000) }}",
    "{{ ('a' * 100000).join(range(99999)|map('string')|list) }}",
    "{{ ('\n' * 100000)|indent(100000) }}",
    "{{ [1]|batch(3000000000, 0)|list }}",
    "{{ [1]|slice(3000000000)|list }}",
    "{{ messages|tojson(indent=3000000000) }}",
    "{{ range(99999)|map('center', 99999)|list }}",
    "{% set n = namespace(l=[]) %}" + LOOP + "{% set n.l = n.l + ['a' * 9999999 ~ a] %}" + END,
    "{% set x %}" + LOOP + "{{ 'a' * 99999 }}" + END + "{% endset %}{{ x }}",
    LOOP + "{{ 'a' * 99999 }}" + END,
]
OTHERS = [
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ '%3000000000d'|format(1) }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 3000000000) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ lipsum(n=3000000000) }}",
    "{{ range(10000000000) }}",
    "{% for a in range(9) %}" * 30 + END * 30,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "{{ 'a' ",
    "{{ 1 / 0 }}",
    "{% call f() %}{% endcall %}",
    "{{" + " " * template_limits.LONGEST_SOURCE,
]


def error_of(template: str) -> str:
    with pytest.raises(ValueError, match="the chat template fails: ") as caught:
        ChatFormat(character_tokenizer(), template).render(HI)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("template", TOO_LONG.values(), ids=TOO_LONG)
def test_cpu_time_is_limited(template, monkeypatch):
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.3)
    start = time.thread_time()
    assert "takes more than 0.3 s of CPU time" in error_of(template)
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("template", TOO_DEEP.values(), ids=TOO_DEEP)
def test_recursion_is_limited(template):
    assert "calls itself too deeply" in error_of(template)


def test_memory_is_limited(monkeypatch):
    monkeypatch.setattr(template_limits, "CHARACTERS", 1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for template in TOO_LARGE:
        assert "builds texts or lists of more than" in error_of(template), template
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10  # KiB


@pytest.mark.parametrize("template", OTHERS, ids=lambda text: text[:30])
def test_other_faults_are_one_line(template):
    assert len(error_of(template)) < 500


def test_a_server_answers_them_with_a_bad_request(monkeypatch):
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.3)
    tokenizer = character_tokenizer()
    for template in ["{{ 'a' * 3000000000 }}", *TOO_LONG.values(), *TOO_DEEP.values()]:
        tokenizer.chat_template = template
        with pytest.raises(BadRequest, match="the chat template cannot render"):
            parse({"messages": HI}, tokenizer, "m", chat=True)


def test_a_rendering_begins_with_whole_limits(monkeypatch):
    monkeypatch.setattr(template_limits, "CHARACTERS", 15_000)
    chat = ChatFormat(character_tokenizer(), "{{ 'a' * 6000 }}{{ messages[0].content ~ eos_token }}")
    for _ in range(5):
        assert chat.render(HI) == "a" * 6000 + "hi<eos>"


PIECES = [
    "{{ ",
    " }}",
    "{% for m in messages %}",
    END,
    "{% if m %}",
    "{% endif %}",
    "m.content",
    "messages",
    "'a'",
    " ~ ",
]
PIECES += [
    " * ",
    " + ",
    "3000000000",
    "9",
    "|center(",
    "|join(",
    ")",
    "(",
    "[",
    "]",
    "{% set x = ",
    " %}",
    "loop",
    "x",
    "m",
]
PIECES += [
    "{% macro f(m) %}",
    "{% endmacro %}",
    "f(m)",
    "range(99999)",
    "{% generation %}",
    "{% endgeneration %}",
    ".",
    "|",
]
PIECES += [
    "replace('a', 'bb')",
    "'%9999999d'",
    " % ",
    "tojson",
    "namespace(a=1)",
    "{#",
    "#}",
    "\n",
    "break",
    "raise_exception('x')",
]


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text("{}%#'ma |~*()", max_size=40))
def test_any_template_renders_or_fails_in_one_line(template):
    limit, template_limits.CPU_SECONDS = template_limits.CPU_SECONDS, 0.5
    try:
        text = ChatFormat(character_tokenizer(), "{#-#}" + template).render(HI)
    except ValueError as error:
        text = str(error).removeprefix("the chat template fails: ")
        if text == str(error) or "\n" in text:
            raise
    finally:
        template_limits.CPU_SECONDS = limit
    assert isinstance(text, str)
