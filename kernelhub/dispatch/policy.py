"""What the user said, from every place it can be said, as one value.

Order of decision, from the strongest:

1. ``disable`` from anywhere removes a kernel.
2. ``KERNELHUB_FORCE``
3. ``backend=`` of the call
4. ``use(...)``, innermost first
5. ``configure(...)``
6. ``prefer``: of contexts (innermost first), of `configure`, ``KERNELHUB_PREFER``, of the config file
7. tuned evidence, then the order line of the device, then the band, then the name

1 to 5 are explicit: the kernel asked for runs, or the call fails with every reason. 6 and 7 only rank.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace

Names = tuple[str, ...]


@dataclass(frozen=True)
class Wish:
    """Backends or kernels named for some ops, and where that was said.

    Attributes:
        ops: op name or glob.
        names: backends, kernels or globs over kernels, in order.
        source: stable word for the place: ``"force"``, ``"kwarg"``, ``"context"``, ``"configure"``,
            ``"environment"``, ``"file"``.
        origin: the place as a user would write it, e.g. ``KERNELHUB_FORCE=triton``.
    """

    ops: str
    names: Names
    source: str
    origin: str

    def concerns(self, op: str) -> bool:
        return self.ops == "*" or self.ops == op or fnmatch.fnmatchcase(op, self.ops)


@dataclass(frozen=True, eq=False)
class Layer:
    """What one place says: a context, a `configure` call, the environment or a config file.

    Layers are told apart by identity, which keeps them cheap in the key of a table.
    `deterministic`, `batch_invariant`, `strict` and `unsafe` are None where the place is silent.
    """

    requests: tuple[Wish, ...] = ()
    prefers: tuple[Wish, ...] = ()
    disables: tuple[Wish, ...] = ()
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    strict: bool | None = None
    unsafe: bool | None = None


@dataclass(frozen=True)
class Policy:
    """All layers put together for one call; what the selector reads.

    Attributes:
        requests: explicit choices, strongest first; the first that concerns the op decides.
        prefers: soft wishes, strongest first.
        disables: every removal, whoever said it.
    """

    requests: tuple[Wish, ...] = ()
    prefers: tuple[Wish, ...] = ()
    disables: tuple[Wish, ...] = ()
    deterministic: bool = False
    batch_invariant: bool = False
    strict: bool = False
    unsafe: bool = False

    def request_for(self, op: str) -> Wish | None:
        """The explicit choice that decides for `op`, or None if nothing explicit was said."""
        return next((wish for wish in self.requests if wish.concerns(op)), None)

    def asking(self, op: str, names: Names) -> Policy:
        """The same policy with ``backend=names`` on the call."""
        wish = Wish(op, names, "kwarg", f"backend={names[0] if len(names) == 1 else names!r}")
        forces = sum(1 for request in self.requests if request.source == "force")
        requests = (*self.requests[:forces], wish, *self.requests[forces:])
        return replace(self, requests=requests)


def combine(layers: tuple[Layer, ...]) -> Policy:
    """One policy out of layers given strongest first."""

    def decided(name: str) -> bool:
        return next((value for layer in layers if (value := getattr(layer, name)) is not None), False)

    return Policy(
        requests=tuple(wish for layer in layers for wish in layer.requests),
        prefers=tuple(wish for layer in layers for wish in layer.prefers),
        disables=tuple(wish for layer in layers for wish in layer.disables),
        deterministic=decided("deterministic"),
        batch_invariant=decided("batch_invariant"),
        strict=decided("strict"),
        unsafe=decided("unsafe"),
    )
