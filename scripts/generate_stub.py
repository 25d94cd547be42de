"""Write kernelhub/__init__.pyi, from which type checkers read the public names; ``--check`` only compares.

Names come from `HOMES`. An op that can also return the log-sum-exp gets one overload for each value of
`return_lse`, of the op, its `prepare`, and the `run` of plans and steps, all made from the op's own signature.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import kernelhub  # noqa: E402
from kernelhub.homes import HOMES  # noqa: E402
from kernelhub.ops import functions  # noqa: E402

STUB = ROOT / "kernelhub" / "__init__.pyi"
ONE, BOTH = "torch.Tensor", "tuple[torch.Tensor, torch.Tensor]"
_REQUIRED = inspect.Parameter.empty
_HEAD = '''# ruff: noqa
# fmt: off
# mypy: disable-error-code="override"
"""The public names for type checkers; made by scripts/generate_stub.py."""
import collections.abc
import typing

import torch

import kernelhub.dispatch.op
from kernelhub import errors as errors
from kernelhub import testing as testing
'''


def text() -> str:
    """The stub."""
    with_lse = {
        function.op.contract.name: function
        for function in functions()
        if "return_lse" in _signature(function).parameters
    }
    lines = [f"from {home} import {name} as {name}" for name, home in HOMES.items() if name not in with_lse]
    head = _HEAD + "\n".join(sorted(lines)) + f"\n\n__version__: str\n__all__ = {kernelhub.__all__!r}\n\n"
    ops = "".join(_of_op(name, with_lse[name]) for name in sorted(with_lse))
    return head + '_R = typing.TypeVar("_R")\n' + ops.rstrip() + "\n"


def _of_op(name: str, function: Any) -> str:
    """The op as an object whose call and `prepare` are overloaded, and the plan that `prepare` gives."""
    plan = inspect.get_annotations(function.prepare, eval_str=True)["return"]
    title = name.title().replace("_", "")
    lines = ["", f"class _{title}Plan({_path(plan)}, typing.Generic[_R]):", "    run: typing.Callable[..., _R]"]
    if begin := getattr(plan, "begin", None):
        step = inspect.get_annotations(begin, eval_str=True)["return"]
        lines.append(f"    def begin{_signature(begin).replace(return_annotation=_Shown(f'_{title}Step[_R]'))}: ...")
        lines[:0] = ["", f"class _{title}Step({_path(step)}, typing.Generic[_R]):", "    run: typing.Callable[..., _R]"]
    op = f"kernelhub.dispatch.op.OpFunction[..., typing.Any, _{title}Plan[typing.Any]]"
    lines += ["", f"class _{title}({op}, typing.Protocol):"]
    lines += [f"    {line}" for line in _overloads("__call__", _signature(function), "{}")]
    lines += [f"    {line}" for line in _overloads("prepare", _signature(function), f"_{title}Plan[{{}}]")]
    lines += ["", f"{name}: _{title}"]
    modules = sorted({cls.__module__ for cls in ((plan, step) if begin else (plan,))})
    return "".join(f"import {module}\n" for module in modules) + "\n".join(lines) + "\n\n"


def _overloads(method: str, signature: inspect.Signature, result: str) -> list[str]:
    """Overloads for calls without a log-sum-exp, for each argument that asks for it, and for all other calls."""
    no, yes = _Shown("typing.Literal[False]"), _Shown("typing.Literal[True]")
    asked = {"return_lse": {"annotation": yes}}
    plain: dict[str, dict[str, Any]] = {"return_lse": {"annotation": no}}
    forms = [asked]
    if "out_lse" in signature.parameters:
        plain["out_lse"] = {"annotation": _Shown("None")}
        forms.append({"out_lse": {"annotation": _Shown(ONE)}})
    made = [_with(signature, plain, ONE)]
    made += [_with(signature, form, BOTH) for form in forms]
    made.append(_with(signature, {}, f"{ONE} | {BOTH}"))
    lines = []
    for one, returned in made:
        shown = one.replace(return_annotation=_Shown(result.format(returned)))
        lines += ["@typing.overload", f"def {method}{str(shown).replace('(', '(self, ', 1)}: ..."]
    return lines


def _with(
    signature: inspect.Signature, changes: dict[str, dict[str, Any]], returned: str
) -> tuple[inspect.Signature, str]:
    """The signature with other annotations; a parameter that is asked for by them has no default, and is a keyword."""
    parameters, keyword = [], False
    for parameter in signature.parameters.values():
        change = changes.get(parameter.name, {})
        if change and returned == BOTH:
            change, keyword = {**change, "default": _REQUIRED}, True
        kind = parameter.KEYWORD_ONLY if keyword else parameter.kind
        parameters.append(parameter.replace(**change, kind=kind))
    return signature.replace(parameters=parameters), returned


class _Shown:
    """An annotation that `str` of a signature prints as it is written here."""

    def __init__(self, written: str) -> None:
        self.written = written

    def __repr__(self) -> str:
        return self.written


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function, eval_str=True)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def main() -> int:
    """Write the stub, or with ``--check`` say whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the stub is out of date")
    if parser.parse_args().check:
        return 0 if STUB.read_text() == text() else 1
    STUB.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
