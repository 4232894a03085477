"""Templates that mean harm: none reaches Python, none runs on, none fills the memory."""

from __future__ import annotations

import sys
import time

import pytest

from dotllm.errors import TemplateError
from dotllm.text.template import ChatTemplate

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|first|string + ''.__class__.__name__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_to_python(source: str) -> None:
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "x"}])
    except TemplateError:
        return
    # A forbidden attribute that is only printed is undefined, and prints as nothing.
    assert text == ""


CHANGES = ["{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ messages.clear() }}"]


@pytest.mark.parametrize("source", CHANGES)
def test_messages_cannot_be_changed(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


BIG = "{% set big = range(90000)|list %}"
ENDLESS = [
    BIG + "{% for a in big %}{% for b in big %}{% endfor %}{% endfor %}",
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    BIG + "{% for a in big recursive %}{{ loop(big) }}{% endfor %}",
    BIG + "{% for a in big %}{% set c = big|map('string')|list %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(90) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_runs_on_is_interrupted(source: str) -> None:
    former = sys.gettrace()
    with pytest.raises(TemplateError):
        ChatTemplate(source, seconds=0.1).render([])
    assert sys.gettrace() is former


def test_the_limit_does_not_hold_after_rendering() -> None:
    assert ChatTemplate("x", seconds=0.05).render([]) == "x"
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass


HUGE = [
    "{{ 'x' * 999999999 }}",
    "{{ 999999999 * 'x' }}",
    "{{ [1] * 999999999 }}",
    "{{ 9 ** 99999999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.zfill(999999999) }}",
    "{% set ns = namespace(s='xxxxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1, 2]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(n=99) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set s = 'x' * 9999 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 9999 %}{{ s|replace('x', s) }}",
    "{% set s = 'x' * 9999 %}{{ s.join(s) }}",
    "{% set s = 'x' * 9999 %}{{ ([s] * 9999)|join }}",
    "{% set s = 'x' * 9999 %}{{ ''.join([s] * 9999) }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{% set s = 'x' * 9999 %}{{ ('{0}' * 9999).format(s) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "{{ 'a\nb'|indent(999999999) }}",
]


@pytest.mark.parametrize("source", HUGE)
def test_no_value_grows_without_bound(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, seconds=1).render([])


def test_the_output_is_bounded() -> None:
    with pytest.raises(TemplateError, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(9999) %}xxxx{% endfor %}", longest=1000).render([])


def test_the_source_is_bounded() -> None:
    assert ChatTemplate("x" * 1000)
    with pytest.raises(TemplateError, match="262144 bytes"):
        ChatTemplate("x" * (256 * 1024 + 1))


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}").render([])
    with pytest.raises(TemplateError):
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").render([])


@pytest.mark.parametrize(
    "source", ["{{ cycler() }}", "{{ {[]: 1} }}", "{{ {(1, []): 1} }}", "{{ 'x'() }}", "{{ [1, 'a']|sort }}"]
)
def test_whatever_goes_wrong_is_the_templates_fault(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
