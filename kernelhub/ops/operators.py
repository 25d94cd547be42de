"""Public functions as operators of torch.library: what torch.compile, torch.export and fake tensors see of them.

Traced code sees one opaque operator for each op, so that no graph can freeze a selection: the operator dispatches when
it runs, under the policy of that moment. Eager calls never come here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import check_wants_no_gradient, plain
from kernelhub.ops.operands import check_operand
from kernelhub.ops.packed import PackedWeight, described

_LIBRARY = torch.library.Library("kernelhub", "FRAGMENT")


class Form(NamedTuple):
    """How an operator's schema represents a parameter.

    Attributes:
        schema: its part of the schema; ``{}`` is replaced by its name.
        flat: its value as the operator takes it, one item for each argument in `schema`.
        back: its value again, of these items.
    """

    schema: str
    flat: Callable[[Any], tuple[Any, ...]]
    back: Callable[..., Any]


def _itself(schema: str) -> Form:
    return Form(schema + " {}", lambda value: (value,), lambda value: value)


def _number(schema: str) -> Form:
    return Form(schema + " {}", lambda value: (_python_number(value),), lambda value: value)


def _python_number(value: Any) -> Any:
    """A numpy scalar as an operator takes it. Dynamo, which has no such scalars, does not look into `python_value`."""
    return value if value is None or type(value) in (bool, int, float) else python_value(value)


def _sides(window: Any) -> list[Any]:
    return [_python_number(side) for side in (window if isinstance(window, tuple | list) else (window, -1))]


def _plain(value: Any) -> Any:
    """A tensor as the eager op takes it without going through its operator again."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, PackedWeight):
        return described(_plain(value.parts()), value.description)
    return plain(value) if isinstance(value, Tensor) else value


_VALUE_OR_TENSOR = Form(
    "float? {}_value, Tensor? {}",
    lambda value: (None, value) if isinstance(value, Tensor) else (_python_number(value), None),
    lambda value, tensor: tensor if value is None else value,
)
_WEIGHT = Form(  # a packed one crosses as its parts and its description
    "Tensor[] {}, str {}_description",
    lambda weight: (weight.parts(), weight.description) if isinstance(weight, PackedWeight) else ([weight], ""),
    lambda parts, description: described(parts, description) if description else parts[0],
)
FORMS: Mapping[str, Form] = {
    "Tensor": _itself("Tensor"),
    "Tensor | None": _itself("Tensor?"),
    "Sequence[Tensor] | Tensor": Form("Tensor[] {}", lambda tensors: (list(tensors),), list),
    "Sequence[int] | None": Form(
        "int[]? {}",
        lambda values: (None if values is None else [_python_number(value) for value in values],),
        lambda values: values,
    ),
    "int": _number("SymInt"),
    "int | None": _number("SymInt?"),
    "bool": _number("bool"),
    "float": _number("float"),
    "float | None": _number("float?"),
    "str": _itself("str"),
    "str | None": _itself("str?"),
    "torch.dtype": _itself("ScalarType"),
    "torch.dtype | None": _itself("ScalarType?"),
    "torch.dtype | str | None": Form(
        "ScalarType? {}, str? {}_name",
        lambda value: (None, value) if isinstance(value, str) else (value, None),
        lambda dtype, name: dtype if name is None else name,
    ),
    "Tensor | PackedWeight": _WEIGHT,
    "torch.distributed.ProcessGroup | str": Form(
        "str {}",
        lambda group: (group if isinstance(group, str) else group.group_name,),
        lambda name: name,
    ),
    "Scale": _VALUE_OR_TENSOR,
    "float | Tensor | None": _VALUE_OR_TENSOR,
    "Window": Form(
        "int[]? {}",
        lambda window: (None if window is None else _sides(window),),
        lambda window: None if window is None else tuple(window),
    ),
}


class Traced:
    """Replaces a public function in traced code. Its operators are derived from the function's signature.

    ``kernelhub::NAME`` makes its results; ``kernelhub::NAME_out`` fills those destinations that are given and makes the
    rest. An op whose destination is a required parameter has only one operator, of its own name. An operator has a
    fixed number of results: one that a call does not request is empty.

    Args:
        memory: takes the arguments by name, and gives the results' memory by name of the result, for fake tensors.
            A result has the name of its destination, if it has one.
        asked: name of the flag, or of the operand, that requests a result, for the optional results.
        given_back: name of the parameter that is itself the result where it is given; an operator cannot return it.
        within: a context in which the op runs.
        in_place: operands that may be the destination, too; an operator may write no operand that it also reads, so
            that it reads a copy.
    """

    def __init__(
        self,
        memory: Callable[..., Mapping[str, Tensor]],
        results: Sequence[str] = ("out",),
        asked: Mapping[str, str] | None = None,
        given_back: Mapping[str, str] | None = None,
        within: Callable[[Callable[[], Any]], Any] | None = None,
        in_place: Sequence[str] = (),
    ) -> None:
        self._memory = memory
        self._results = tuple(results)
        self._asked = dict(asked or {})
        self._given_back = dict(given_back or {})
        self._within = within or (lambda run: run())
        self._in_place = tuple(in_place)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Define the operators of a function, and return what takes its place in traced code."""
        name = function.__name__
        parameters = dict(inspect.signature(function).parameters)
        order = [item for item, of in parameters.items() if of.kind is not of.KEYWORD_ONLY]
        del parameters["backend"]
        places = [result for result in self._results if result in parameters]
        required = any(parameters[place].default is inspect.Parameter.empty for place in places)
        forms = {item: FORMS[str(of.annotation)] for item, of in parameters.items() if item not in places}
        operands = ", ".join(form.schema.replace("{}", item) for item, form in forms.items()) + ", str[]? backend"
        written = ", ".join(
            f"Tensor({chr(97 + at)}!){'' if parameters[place].default is inspect.Parameter.empty else '?'} {place}"
            for at, place in enumerate(places)
        )
        made = [result for result in self._results if result not in places] if required else list(self._results)
        returned = "Tensor" if len(made) == 1 else f"({', '.join(['Tensor'] * len(made))})"

        def arguments(flat: tuple[Any, ...]) -> dict[str, Any]:
            items, given = iter(flat), {}
            for item, form in forms.items():
                given[item] = form.back(*(next(items) for _ in range(form.schema.count("{}"))))
            return given | {"backend": next(items)} | dict(zip(places, items, strict=False))

        def wants(given: Mapping[str, Any], result: str) -> bool:
            """Whether a call returns a result: it requests the result, or passes a destination."""
            if result not in self._asked or given.get(result) is not None:
                return True
            asked = given[self._asked[result]]
            return asked is not None and asked is not False

        def fixed(given: Mapping[str, Any], results: Mapping[str, Tensor], like: Tensor) -> Any:
            """As many results as the operator has: those written to a destination or not requested are empty."""
            fresh = tuple(
                results[result]
                if result in results and given.get(result) is None and not back(given, result)
                else like.new_empty(0, dtype=torch.float32)
                for result in made
            )
            return fresh[0] if len(fresh) == 1 else fresh if fresh else None

        def back(given: Mapping[str, Any], result: str) -> bool:
            return result in self._given_back and given[self._given_back[result]] is not None

        def run(*flat: Any) -> Any:
            given = {item: _plain(value) for item, value in arguments(flat).items()}
            results = self._within(lambda: function(**given))
            results = results if isinstance(results, tuple) else (results,)
            named = dict(zip((result for result in self._results if wants(given, result)), results, strict=True))
            return fixed(given, named, results[0])

        def fake(*flat: Any) -> Any:
            given = arguments(flat)
            results = self._memory(**given)
            named = {result: memory for result, memory in results.items() if wants(given, result)}
            return fixed(given, named, next(iter(results.values())))

        if not required:
            define(f"{name}({operands}) -> {returned}", run, fake)
        writes = name if required else f"{name}_out"
        if places:
            define(f"{writes}({operands}, {written}) -> {returned if made else '()'}", run, fake if made else None)
        functional = None if required else getattr(torch.ops.kernelhub, name).default
        mutating = getattr(torch.ops.kernelhub, writes).default if places else None
        needed = [item for item, of in parameters.items() if of.default is of.empty]
        defaults: dict[str, Any] = {"backend": None}
        defaults |= {item: of.default for item, of in parameters.items() if of.default is not of.empty}
        tensors = [item for item, of in parameters.items() if "Tensor" in str(of.annotation)]
        dense = [item for item, form in forms.items() if form is FORMS["Tensor"] or form is _WEIGHT]

        def traced(*args: Any, **named: Any) -> Any:
            if len(args) > len(order):
                raise TypeError(f"{name}() takes {len(order)} positional arguments but {len(args)} were given")
            for item in named:
                if item in order[: len(args)]:
                    raise TypeError(f"{name}() got multiple values for argument {item!r}")
                if item not in parameters and item != "backend":
                    raise TypeError(f"{name}() got an unexpected keyword argument {item!r}")
            # Of equal lengths, since Dynamo of torch 2.8 reads strict=False as True.
            given = {**defaults, **dict(zip(order[: len(args)], args, strict=True)), **named}
            for item in needed:
                if item not in given:
                    raise TypeError(f"{name}() missing a required argument: {item!r}")
            for item in tensors:
                tensor = given[item]
                if isinstance(tensor, Tensor):
                    if tensor.is_nested:
                        check_operand(name, item, tensor)
                elif item in dense and not isinstance(tensor, PackedWeight):
                    check_operand(name, item, tensor)
            for item in self._in_place:
                if any(given[item] is given[place] for place in places):
                    given[item] = given[item] if given[item] is None else given[item].clone()
            flat: list[Any] = []
            for item, form in forms.items():
                flat.extend(form.flat(given[item]))
            flat.append(names_of(given["backend"]))
            destinations = [given[place] for place in places]
            if mutating is None or (functional is not None and all(place is None for place in destinations)):
                new = functional(*flat)  # type: ignore[misc]
            else:
                new = mutating(*flat, *destinations)
            fresh = dict(zip(made, (new,) if isinstance(new, Tensor) else new or (), strict=True))
            returns = []
            for result in self._results:
                if not wants(given, result):
                    continue
                if back(given, result):
                    returns.append(given[self._given_back[result]])
                else:
                    place = given.get(result)
                    returns.append(fresh[result] if place is None else place)
            return returns[0] if len(returns) == 1 else tuple(returns)

        traced.__name__ = traced.__qualname__ = name
        traced.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return traced


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Define an operator of the namespace ``kernelhub``.

    Args:
        schema: as of `torch.library.Library.define`, e.g. ``"double(Tensor x) -> Tensor"``.
        run: what it does, on any device.
        fake: gives results of the right shape and dtype for tensors without memory; None if it returns nothing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _without_gradient(name), "Autograd", with_keyset=True)
    torch.library.register_fake(f"kernelhub::{name}", fake or _nothing, lib=_LIBRARY)
    torch.library.register_torch_dispatch(f"kernelhub::{name}", NestedTensor, _without_nested(name), lib=_LIBRARY)


def _without_nested(name: str) -> Callable[..., Any]:
    """The operator where it meets a jagged tensor, which is a class of its own in torch: it refuses it by name."""

    def refuse_nested(mode: Any, function: Any, types: Any, arguments: Sequence[Any], named: Any = None) -> NoReturn:
        schema = function._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, arguments, strict=False)} | (named or {})
        for parameter, value in given.items():
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.is_nested:
                    check_operand(name.removesuffix("_out"), parameter, tensor)
        raise NotImplementedError(f"{function} takes no nested tensor: give padded ones, or one with cu_seqlens")

    return refuse_nested


def _without_gradient(name: str) -> Callable[..., Any]:
    """The operator under autograd: it rejects an operand that requires a gradient by its name, under torch.compile too.

    An operator without a gradient formula cuts its result from the graph, and gradients are lost silently.
    """
    op = name.removesuffix("_out")
    overload = getattr(torch.ops.kernelhub, name).default
    parameters = [argument.name for argument in overload._schema.arguments]

    def refuse_gradients(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        for parameter, argument in zip(parameters, arguments, strict=False):
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    check_wants_no_gradient(op, parameter, tensor)
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return refuse_gradients


def names_of(backend: Backend) -> list[str] | None:
    """``backend=`` as an operator takes it."""
    return None if backend is None else [backend] if isinstance(backend, str) else list(backend)


def _nothing(*arguments: Any) -> None:
    return None
