"""A Jinja environment for templates that nobody has vetted: no way out, no end of time, no end of memory.

Jinja's sandbox keeps a template away from Python's internals. It bounds neither time nor memory, so here

* a trace function looks at the clock on every line of Python that the template runs, its own loops included;
* the operations by which one step can make something huge (repeating, powers, padding, joining) are measured first.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dotllm.errors import TemplateError

__all__ = ["RefusedByTemplate", "TemplateSandbox", "time_limit"]

# Longest string or list, and most bits of an integer, that one operation may make.
_LONGEST = 4 * 1024 * 1024
_WIDEST = 4096

_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape"),
    *("int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique"),
    *("upper", "urlencode", "wordcount"),
)
_PADDING = frozenset(("center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"))


class RefusedByTemplate(Exception):
    """`raise_exception` was called: the template does not take this conversation."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates expect (as in transformers), with limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=_show)
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {
            "tojson": _to_json,
            "concat_checked": _concat,
            "measured": _measured,
            "string": _string,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
        }
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Measured().visit(tree)  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        return _measured(super().call(__context, __obj, *args, **kwargs))


class _Measured(NodeTransformer):
    """What cannot be intercepted like `a + b`: `a ~ b` becomes `[a, b] | concat_checked`, `[a]` `[a] | measured`.

    Without the latter, `x = [x, x]` again and again makes a small value that takes forever to print or compare.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        parts = nodes.List(list(node.nodes), lineno=node.lineno)
        return nodes.Filter(parts, "concat_checked", [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        return nodes.Filter(node, "measured", [], [], None, None, lineno=node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        return nodes.Filter(node, "measured", [], [], None, None, lineno=node.lineno)


def _total(value: Any) -> int:
    """Characters and elements in all of a value, shared parts counted each time; raises beyond the limit."""
    total = 0
    waiting = [value]
    while waiting:
        part = waiting.pop()
        total += len(part) + 1 if isinstance(part, str | list | tuple | dict) else 1
        _check_size(total)
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
    return total


def _measured(value: Any) -> Any:
    _total(value)
    return value


def _string(value: Any) -> str:
    return str(_measured(value))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, _LONGEST)
    _check_size(len(text) + (text.count("\n") + 1) * len(margin))
    return do_indent(text, margin, first, blank)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_size(size: int) -> None:
    if size > _LONGEST:
        raise SecurityError(f"a value of {size} elements is more than the {_LONGEST} that a template may make")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        _check_size(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator == "*" and (_size(left) or _size(right)):
        sized, times = (left, right) if _size(left) else (right, left)
        _check_size(_total(sized) * times if isinstance(times, int) else 0)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _WIDEST:
            raise SecurityError(f"a number of {bits} bits is more than the {_WIDEST} that a template may make")


def _check_format(text: str, arguments: Any) -> None:
    # Widths come as digits in the text or, with "*", from the arguments.
    fields = text.count("{") + text.count("%")
    _check_size(len(text) + fields * (10_000 + _total(arguments)))
    if re.search(r"\d{5}", text) or "*" in text:
        raise SecurityError(
            "a format with a width of five digits or more, or one taken from an argument, is not allowed"
        )


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(len(owner) + _size(part) for part in args[0]))
    elif name in _PADDING:
        if name.startswith("format"):
            _check_format(owner, args)
        if any(isinstance(value, int) and value > _LONGEST for value in args):
            raise SecurityError(f"str.{name} to more than {_LONGEST} characters is not allowed in a template")


def _concat(parts: list[Any]) -> str:
    texts = [str(_show(part)) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _join(parts: Any, separator: str = "", attribute: str | int | None = None) -> str:
    chosen = parts if attribute is None else (_attribute(part, attribute) for part in parts)
    texts = []
    size = 0
    for part in chosen:
        texts.append(str(_show(part)))
        size += len(texts[-1]) + len(separator)
        _check_size(size)
    return str(separator).join(texts)


def _attribute(part: Any, name: str | int) -> Any:
    try:
        return part[name]
    except (TypeError, LookupError):
        return ""


def _replace(text: object, old: str, new: str, count: int = -1) -> str:
    whole = str(text)
    _check_size(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, count)


def _show(value: Any) -> Any:
    """A missing content is printed as nothing, not as the word None."""
    return "" if value is None else _measured(value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Undefined):
        raise SecurityError("tojson of something that is not defined")
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("tojson with an indent of more than 16 is not allowed")
    return json.dumps(
        _measured(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise RefusedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:64])


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TemplateError in the body once it has run for `seconds`, at the next line of Python in this thread.

    It works through the thread's trace function, so a debugger does not see the body; the former one comes back after.
    """
    deadline = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if time.monotonic() > deadline:
            raise TemplateError(f"the chat template ran for more than {seconds:g} s; use another template")
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)
