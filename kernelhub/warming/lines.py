"""Lines of `NotWarmed`, parsed and never evaluated.

The grammar is closed. A line is one call of ``kernelhub.warm``, alone or under ``with`` and calls of
``kernelhub.use``. An argument is a string, a number, True, False, None, a dtype of torch, ``float("inf")``, or a list,
tuple or dictionary of these. Anything else is invalid: names, operators except a sign, other calls.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelhub.dispatch.api import use
from kernelhub.errors import ConfigurationError
from kernelhub.runtime.warm import warm

_MOST_LETTERS = 1 << 16
_NUMBERS_BY_NAME = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Line:
    """A call to prepare, from a line.

    Attributes:
        op: name of the op.
        arguments: arguments of `kernelhub.warm`.
        contexts: arguments of each `kernelhub.use` around it, outermost first.
    """

    op: str
    arguments: dict[str, Any]
    contexts: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Prepare the call."""
        with contextlib.ExitStack() as stack:
            for said in self.contexts:
                stack.enter_context(use(**said))
            warm(self.op, **self.arguments)


class _NoLine(Exception):
    """An expression that is not allowed in a line."""


def line(text: str) -> Line:
    """The call of a line.

    Raises:
        ConfigurationError: the text is not a line.
    """
    try:
        if len(text) > _MOST_LETTERS:
            raise _NoLine(f"it has {len(text)} characters; the limit is {_MOST_LETTERS}")
        body = ast.parse(text.strip()).body
        if len(body) != 1:
            raise _NoLine(f"it has {len(body)} statements, not one")
        return _line(body[0])
    except _NoLine as error:
        reason = str(error)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"it is not Python: {error}"
    shown = text.strip() if len(text) < 400 else f"{text.strip()[:400]}..."
    raise ConfigurationError(
        f"warmup: {shown!r} is not a line of NotWarmed: {reason}; write kernelhub.warm(op, name=value, ...) with "
        "strings, numbers, dtypes of torch, and lists, tuples and dictionaries of them"
    )


def _line(statement: ast.stmt) -> Line:
    contexts = []
    if isinstance(statement, ast.With):
        for item in statement.items:
            if item.optional_vars is not None:
                raise _NoLine("`as` binds a name")
            words, said = _call(item.context_expr, "use")
            if words:
                raise _NoLine("kernelhub.use takes arguments by name")
            contexts.append(said)
        if len(statement.body) != 1:
            raise _NoLine(f"`with` has {len(statement.body)} statements, not one")
        statement = statement.body[0]
    if not isinstance(statement, ast.Expr):
        raise _NoLine(f"{_name_of(statement)} is not a call")
    words, arguments = _call(statement.value, "warm")
    if len(words) != 1 or not isinstance(words[0], str):
        raise _NoLine("kernelhub.warm takes the name of an op, then keyword arguments")
    return Line(words[0], arguments, contexts)


def _call(expression: ast.expr, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call of ``kernelhub.<name>``, by position and by name."""
    if not isinstance(expression, ast.Call) or not _is_attribute(expression.func, "kernelhub", name):
        raise _NoLine(f"{_shown(expression)} is not a call of kernelhub.{name}")
    arguments = {}
    for keyword in expression.keywords:
        if keyword.arg is None:
            raise _NoLine("`**` is not a keyword argument")
        arguments[keyword.arg] = _value(keyword.value)
    return [_value(item) for item in expression.args], arguments


def _value(node: ast.expr) -> Any:
    """The value of a literal."""
    if isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None)):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        made: Callable[[Any], Any] = list if isinstance(node, ast.List) else tuple
        return made(_value(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
        if not all(isinstance(key, ast.Constant) and type(key.value) in (str, int) for key, _ in pairs):
            raise _NoLine(f"{_shown(node)} has keys that are not strings")
        return {key.value: _value(item) for key, item in pairs}  # type: ignore[union-attr]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand)
        if type(number) not in (int, float):
            raise _NoLine(f"{_shown(node)} is not a number")
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Attribute) and _is_attribute(node, "torch", node.attr):
        dtype = vars(torch).get(node.attr)
        if isinstance(dtype, torch.dtype):
            return dtype
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
        words = [item.value for item in node.args if isinstance(item, ast.Constant)]
        if len(words) == len(node.args) == 1 and not node.keywords and words[0] in _NUMBERS_BY_NAME:
            return float(str(words[0]))
    raise _NoLine(f"{_shown(node)} is not a literal")


def _is_attribute(node: ast.expr, owner: str, name: str) -> bool:
    plain = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return plain and node.attr == name and node.value.id == owner  # type: ignore[attr-defined]


def _name_of(node: ast.AST) -> str:
    return type(node).__name__.lower()


def _shown(node: ast.expr) -> str:
    """An expression as written, shortened."""
    try:
        words = ast.unparse(node)
    except (ValueError, RecursionError):
        words = _name_of(node)
    return words if len(words) <= 80 else f"{words[:77]}..."
