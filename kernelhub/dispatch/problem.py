"""Problems: all that selection may read of one call, as facets of a closed schema.

An op declares its problem as a frozen dataclass of facets. A facet is a device, a dtype, a dimension, a layout, a bit
or a size *bucket*; never a token count. There are four kinds of facets:

* structural (`facet`): dtypes, dimensions. Every kernel record must mention each of them.
* size (`bucket`): a size on which the order of kernels depends, and the support of none. A record need not mention it.
* layout (`weight_layout`): the layout of the weights. A record lists the layouts that it reads; see
  `kernelhub.ops.packed`.
* semantic (`feature`): softcap, window, sinks, ... A value other than the neutral one changes the result. A kernel
  whose record does not list that value is rejected. A record lists the value True by the facet's name (``"softcap"``),
  and any other value by name and value (``"kv_layout=HND"``).
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
    """A problem of any op: a frozen dataclass with a `device`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> DeviceFacts: ...


ProblemT = TypeVar("ProblemT", bound=Problem)


def facet(doc: str, *, values: tuple[Any, ...] = (), least: int = 1, **default: Any) -> Any:
    """A structural field of a problem, which every kernel record must constrain.

    Args:
        doc: description of the facet.
        values: values that the op's contract allows; if empty, every integer from `least` on.
        least: the least integer.
        default: ``default=...`` of the dataclass field.
    """
    return field(metadata={"doc": doc, "kind": "structural", "values": values, "least": least}, **default)


def bucket(doc: str, values: tuple[str, ...], default: str) -> Any:
    """A size of a call as one of a few words, on which the order of kernels depends. Records need not mention it."""
    return field(default=default, metadata={"doc": doc, "kind": "size", "values": values})


def feature(doc: str, neutral: Any, values: tuple[Any, ...] = (True,), *, usual: Any = None) -> Any:
    """A semantic field of a problem: `neutral` needs no feature, and each of `values` needs one.

    `usual` is the default of the field if it is not `neutral`.
    """
    return field(
        default=neutral if usual is None else usual,
        metadata={"doc": doc, "kind": "semantic", "neutral": neutral, "values": values},
    )


CHECKPOINT = "checkpoint"  # the layout of weights in published models
WEIGHT_LAYOUT = "weight_layout"


def weight_layout() -> Any:
    """The field `weight_layout` of a problem: the layout of the op's weights, ``"checkpoint"`` or a tag.

    Kernels that pack weights define the tags, so that the set is open. A kernel whose record does not list the tag is
    rejected.
    """
    doc = f"layout of the weights: {CHECKPOINT}, or the tag of a kernel that packs them"
    return field(default=CHECKPOINT, metadata={"doc": doc, "kind": "layout", "values": ()})


@dataclass(frozen=True)
class Facet:
    """One field of a problem, read from its dataclass; the attributes are the arguments of its declaration."""

    name: str
    doc: str
    semantic: bool
    neutral: Any
    values: tuple[Any, ...]
    annotation: str
    layout: bool = False
    size: bool = False
    least: int = 1

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers (a dimension), not dtypes, names or bits."""
        return self.annotation in ("int", "float")

    def wrong_with(self, value: Any) -> str:
        """Why the facet does not allow a value, as a phrase; empty if it does. Types must match exactly."""
        if self.layout:
            return "" if isinstance(value, str) and value else f"it takes {CHECKPOINT!r} or a packed layout's tag"
        allowed = (self.neutral, *self.values) if self.semantic else self.values
        if allowed:
            fits = any(type(one) is type(value) and one == value for one in allowed)
            return "" if fits else f"it takes {', '.join(map(str, allowed))}"
        least = "a positive int" if self.least == 1 else f"an int from {self.least} on"
        return "" if type(value) is int and value >= self.least else f"it takes {least}"


def shown(value: Any) -> str:
    """A facet's value as written on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def flag_of(facet: Facet, value: Any) -> str:
    """A facet and its value as a flag of the commands: ``--head-dim-qk 128``, ``--softcap``, ``--no-causal``."""
    name = facet.name.replace("_", "-")
    if facet.semantic and facet.values == (True,):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {shown(value)}"


class Schema:
    """The closed set of facets of one op.

    Args:
        problem_type: the dataclass of its problem.
        complete: takes the facets that a user gave; returns them with those that follow from them.

    Attributes:
        facets: by name, in the order of the dataclass.
        structural: names of the structural facets.
        features: names of all features; see `feature_name`.
    """

    def __init__(self, problem_type: type, complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.problem_type = problem_type
        self.complete = complete or (lambda facets: facets)
        self.facets: dict[str, Facet] = {}
        for item in dataclasses.fields(problem_type):
            if "kind" not in item.metadata:
                raise TypeError(
                    f"{problem_type.__name__}.{item.name} must be declared with facet(), bucket() or feature()"
                )
            meta = item.metadata
            self.facets[item.name] = Facet(
                item.name,
                meta["doc"],
                meta["kind"] == "semantic",
                meta.get("neutral"),
                meta.get("values", ()),
                str(item.type),
                meta["kind"] == "layout",
                meta["kind"] == "size",
                meta.get("least", 1),
            )
        others = {name for name, item in self.facets.items() if item.semantic or item.layout or item.size}
        self.structural = frozenset(self.facets) - others
        self._semantic = tuple((item.name, item.neutral) for item in self.facets.values() if item.semantic)
        names = [name for name, _ in self._semantic]
        self._values: Callable[[Any], Any] = operator.attrgetter(*names) if names else tuple
        self._neutral = tuple(neutral for _, neutral in self._semantic)
        self.features = frozenset(
            feature_name(item.name, value) for item in self.facets.values() if item.semantic for value in item.values
        )

    def flags(self, facets: Mapping[str, Any]) -> list[str]:
        """Facets as flags of the commands, without defaults and facets that follow from the others."""
        usual = {item.name: item.default for item in dataclasses.fields(self.problem_type)}
        given = {name: value for name, value in facets.items() if value != usual[name]}
        while True:
            made = {**usual, **self.complete(dict(given))}
            other = {name: value for name, value in facets.items() if made[name] != value and name not in given}
            if not other:
                return [flag_of(self.facets[name], given[name]) for name in facets if name in given]
            given |= other

    def features_used(self, problem: Problem) -> list[str]:
        """Names of the features that a problem needs."""
        if not self._neutral or self._values(problem) == self._neutral:
            return []
        used = []
        for name, neutral in self._semantic:
            value = getattr(problem, name)
            if value != neutral:
                used.append(feature_name(name, value))
        return used


def feature_name(name: str, value: object) -> str:
    """Name of a feature in records: the facet's name for True, else name and value."""
    return name if value is True else f"{name}={value}"


def as_dict(problem: Problem) -> dict[str, Any]:
    """The facets of a problem as plain values; the device as its name and architecture."""
    plain = {item.name: getattr(problem, item.name) for item in dataclasses.fields(problem)}
    plain["device"] = str(problem.device)
    return plain
