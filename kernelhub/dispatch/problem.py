"""A problem is all that selection may look at for one call, and its schema is closed.

An op declares its problem as a frozen dataclass of facets. A facet is a device, a dtype, a dimension,
a layout, a bit or a size *bucket*; never a token count. Facets are of three kinds:

* structural (`facet`): dtypes, dimensions. Every kernel record must say something about each.
* layout (`weight_layout`): how the weights lie. A record says which layouts it reads; see `kernelhub.ops.packed`.
* semantic (`feature`): softcap, window, sinks, ... Away from its neutral value such a facet changes
  the result, and a record that does not list it cannot be chosen. A feature whose value is True is
  listed by its name (``"softcap"``), any other value by name and value (``"kv_layout=HND"``).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    from kernelhub.probes.device import DeviceFacts


class Problem(Protocol):
    """What every op's problem has in common: a frozen dataclass that knows its device."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> DeviceFacts: ...


ProblemT = TypeVar("ProblemT", bound=Problem)


def facet(doc: str, *, values: tuple[Any, ...] = (), **default: Any) -> Any:
    """A structural field of a problem, which every kernel record must constrain.

    Args:
        doc: what it is.
        values: the values that the op's contract allows; any positive number if empty.
        default: ``default=...`` as of a dataclass field.
    """
    return field(metadata={"doc": doc, "kind": "structural", "values": values}, **default)


def feature(doc: str, neutral: Any, values: tuple[Any, ...] = (True,), *, usual: Any = None) -> Any:
    """A semantic field of a problem: `neutral` asks for nothing, each of `values` for a feature.

    `usual` is the value of a problem that is written out without it, where that is not `neutral`.
    """
    return field(
        default=neutral if usual is None else usual,
        metadata={"doc": doc, "kind": "semantic", "neutral": neutral, "values": values},
    )


CHECKPOINT = "checkpoint"  # the layout of weights as published models hold them
WEIGHT_LAYOUT = "weight_layout"


def weight_layout() -> Any:
    """The field of a problem, called `weight_layout`, that says how the op's weights lie: a tag, or as in a checkpoint.

    Tags are made by kernels that pack, so the set is open; a kernel whose record does not name a tag is rejected.
    """
    doc = f"layout of the weights: {CHECKPOINT}, or the tag of a kernel that packs them"
    return field(default=CHECKPOINT, metadata={"doc": doc, "kind": "layout", "values": ()})


@dataclass(frozen=True)
class Facet:
    """One declared field of a problem, as read back from its dataclass."""

    name: str
    doc: str
    semantic: bool
    neutral: Any
    values: tuple[Any, ...]
    annotation: str
    layout: bool = False

    @property
    def is_number(self) -> bool:
        """Its values have an order and remainders: a dimension, not a dtype, a name or a bit."""
        return self.annotation in ("int", "float")

    def wrong_with(self, value: Any) -> str:
        """What it takes, as a phrase, where that is not a value; empty where it is. A value is of its kind exactly."""
        if self.layout:
            return "" if isinstance(value, str) and value else f"it takes {CHECKPOINT!r} or a packed layout's tag"
        allowed = (self.neutral, *self.values) if self.semantic else self.values
        if allowed:
            fits = any(type(one) is type(value) and one == value for one in allowed)
            return "" if fits else f"it takes {', '.join(map(str, allowed))}"
        return "" if type(value) is int and value > 0 else "it takes a positive int"


def shown(value: Any) -> str:
    """A facet's value as it is written on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def flag_of(facet: Facet, value: Any) -> str:
    """A facet and its value as the commands take them: ``--head-dim-qk 128``, ``--softcap``, ``--no-causal``."""
    name = facet.name.replace("_", "-")
    if facet.semantic and facet.values == (True,):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {shown(value)}"


class Schema:
    """The closed set of facets of one op.

    Args:
        problem_type: the dataclass of its problem.
        complete: facets that a user wrote out, with those that follow from them filled in.
    """

    def __init__(self, problem_type: type, complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.problem_type = problem_type
        self.complete = complete or (lambda facets: facets)
        self.facets: dict[str, Facet] = {}
        for item in dataclasses.fields(problem_type):
            if "kind" not in item.metadata:
                raise TypeError(f"{problem_type.__name__}.{item.name} must be declared with facet() or feature()")
            meta = item.metadata
            self.facets[item.name] = Facet(
                item.name,
                meta["doc"],
                meta["kind"] == "semantic",
                meta.get("neutral"),
                meta.get("values", ()),
                str(item.type),
                meta["kind"] == "layout",
            )
        self.structural = frozenset(name for name, item in self.facets.items() if not item.semantic and not item.layout)
        self._semantic = tuple((item.name, item.neutral) for item in self.facets.values() if item.semantic)
        names = [name for name, _ in self._semantic]
        self._values: Callable[[Any], Any] = operator.attrgetter(*names) if names else tuple
        self._neutral = tuple(neutral for _, neutral in self._semantic)
        self.features = frozenset(
            feature_name(item.name, value) for item in self.facets.values() if item.semantic for value in item.values
        )

    def flags(self, facets: Mapping[str, Any]) -> list[str]:
        """Facets as flags of the commands, without those that are as usual or follow from the others."""
        usual = {item.name: item.default for item in dataclasses.fields(self.problem_type)}
        said = {name: value for name, value in facets.items() if value != usual[name]}
        while True:
            made = {**usual, **self.complete(dict(said))}
            other = {name: value for name, value in facets.items() if made[name] != value and name not in said}
            if not other:
                return [flag_of(self.facets[name], said[name]) for name in facets if name in said]
            said |= other

    def features_used(self, problem: Problem) -> list[str]:
        """Names of the features that `problem` asks for."""
        if not self._neutral or self._values(problem) == self._neutral:
            return []
        used = []
        for name, neutral in self._semantic:
            value = getattr(problem, name)
            if value != neutral:
                used.append(feature_name(name, value))
        return used


def feature_name(name: str, value: object) -> str:
    """How a record lists a feature: by name if it is a bit, else by name and value."""
    return name if value is True else f"{name}={value}"


def as_dict(problem: Problem) -> dict[str, Any]:
    """The facets of a problem as plain values, the device by its name and architecture."""
    plain = {item.name: getattr(problem, item.name) for item in dataclasses.fields(problem)}
    plain["device"] = str(problem.device)
    return plain
