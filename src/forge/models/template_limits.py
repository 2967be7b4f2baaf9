"""Limits of chat templates, which are programs from the internet: CPU time, memory and recursion.

transformers renders them in jinja2's sandbox, which limits what they may touch, but not how much. `limit_templates`
replaces that sandbox by one in which each loop and macro looks at the clock, and each operation that can build a long
text or list is checked before it runs. A template that exceeds a limit is a `TemplateError`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

CPU_SECONDS = 5.0  # of one rendering: CPU time, since a busy machine must not fail a template
CHARACTERS = 1 << 28  # and elements of lists, that one rendering may build
LONGEST_SOURCE = 1 << 20  # characters of a template

# Methods and filters whose result may be much longer than what they get.
_GROWING = {"join", "replace", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"}
_GROWING |= {"indent", "wordwrap", "batch", "slice", "tojson"}
_WIDTH = re.compile(r"\d{6}|[%:{][^a-zA-Z%}]{0,20}[*{]")  # in a format: "%1000000d", "%*d", "{:{}}"

_render = threading.local()


def limit_templates() -> None:
    """Limit all chat templates that transformers renders in this process from now on."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment  # type: ignore[misc]


@contextmanager
def _limits() -> Iterator[None]:
    """Begin to count for one rendering in this thread; a rendering inside another counts for the outer one."""
    if getattr(_render, "until", None) is not None:
        yield
        return
    # Python's own limits become the template's error as well.
    _render.until = time.thread_time() + CPU_SECONDS
    _render.remaining = CHARACTERS
    try:
        yield
    except RecursionError:
        raise TemplateRuntimeError("it calls itself too deeply") from None
    except MemoryError:
        raise TemplateRuntimeError("it needs too much memory") from None
    finally:
        _render.until = None


def _tick() -> str:
    """Check the clock. TemplateRuntimeError: the rendering takes too long."""
    if (until := getattr(_render, "until", None)) is not None and time.thread_time() > until:
        raise TemplateRuntimeError(f"it takes more than {CPU_SECONDS:g} s of CPU time")
    return ""


def _spend(size: float) -> None:
    """Count elements before they are built. TemplateRuntimeError: they are too many."""
    remaining = getattr(_render, "remaining", CHARACTERS) - size
    if remaining < 0:
        raise TemplateRuntimeError(f"it builds texts or lists of more than {CHARACTERS:,} elements")
    if getattr(_render, "until", None) is not None:
        _render.remaining = remaining


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _spend_on(name: str, values: list[Any]) -> list[Any]:
    """Count the result of a method or filter of `_GROWING` before it is built; returns its values; the first is
    the object that it is applied to."""
    texts = [_length(value) for value in values]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    # A joined iterable is made a list, so that counting does not consume it.
    if name == "join":
        iterables = (i for i, value in enumerate(values) if not isinstance(value, str | int | bool | None))
        joined = next(iterables, None)
        if joined is not None and not isinstance(values[joined], dict):
            values[joined] = list(values[joined])
            lengths = [length for index, length in enumerate(texts) if index != joined]
            longest_other = max(lengths, default=0)
            _spend(sum(_length(value) + longest_other + 1 for value in values[joined]))
            return values
    if name in ("format", "format_map") and any(isinstance(text, str) and _WIDTH.search(text) for text in values):
        raise TemplateRuntimeError("it formats with a width that is too large or not fixed")
    # Bounds, not the exact lengths: of the texts, of each character replaced, or of a width.
    if name in ("format", "format_map", "join"):
        _spend(sum(texts))
    elif name == "replace":
        _spend((texts[0] + 1) * (max(texts[2:], default=0) + 1) if texts[0] else max(texts))
    else:
        _spend((max(texts, default=0) + 1) * (max([*numbers, *texts[1:]], default=0) + 1))
    return values


class _Ticking(NodeTransformer):
    """Calls `tick` at each turn of a loop and each call of a macro, and `concatenate` for the operator `~`."""

    def _begin(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _begin

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


class _LimitedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _limits():
            return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        with _limits():
            for piece in super().generate(*args, **kwargs):
                _spend(len(piece))
                yield piece


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates have limits of CPU time, memory and recursion."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    template_class = _LimitedTemplate
    tick = staticmethod(_tick)

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """Compile a template. TemplateError: its source is too long."""
        if isinstance(source, str) and len(source) > LONGEST_SOURCE:
            raise TemplateError(f"it has more than {LONGEST_SOURCE:,} characters")
        self.globals.pop("lipsum", None)  # any amount of text
        for name in _GROWING & self.filters.keys():  # those of transformers among them
            self.filters[name] = _counted(name, self.filters[name])
        try:
            return super().from_string(source, *args, **kwargs)
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            # Python's limits: blocks or brackets that nest too deeply, enormous numbers.
            raise TemplateError(f"it cannot be compiled: {error}") from None

    def _parse(self, *args: Any, **kwargs: Any) -> nodes.Template:
        return _Ticking().visit(super()._parse(*args, **kwargs))

    def concat(self, parts: Any) -> str:  # type: ignore[override]
        """The text of a block."""
        pieces = list(parts)
        _spend(sum(map(len, pieces)))
        return "".join(pieces)

    def concatenate(self, *parts: Any) -> str:
        """The operator `~`."""
        return self.concat(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result is bounded in size."""
        sizes = [_length(left), _length(right)]
        if operator == "+":
            _spend(sum(sizes))
        elif operator == "%" and isinstance(left, str):
            _spend_on("format", [left, right] if isinstance(right, str) else [left])
            _spend(sum(map(_length, right)) if isinstance(right, tuple) else sizes[1])
        # A text or list times a number; of numbers the bits count.
        elif operator in ("*", "**"):
            bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
            if operator == "**" and bits[0] * (abs(right) if isinstance(right, int) else 0) > 1 << 16:
                raise TemplateRuntimeError("it computes a power that is too large")
            lengths = [max(sizes), *(value for value in (left, right) if isinstance(value, int))]
            _spend(lengths[0] * max(lengths[1:], default=0) if lengths[0] else sum(bits))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A call whose result is bounded in size."""
        name = getattr(obj, "__name__", "")
        if name in _GROWING:
            owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
            if isinstance(owner, str | bytes):
                args = tuple(_spend_on(name, [owner, *args, *kwargs.values()])[1 : len(args) + 1])
        return super().call(context, obj, *args, **kwargs)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is counted before it is made."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def limited(*args: Any, **kwargs: Any) -> Any:
        counted = _spend_on(name, [*args[first:], *kwargs.values()])
        return function(*args[:first], *counted[: len(args) - first], **kwargs)

    if first:
        limited.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return limited
