"""Kernel records: all that selection needs of one implementation, as data.

To add a kernel, write one record in the `kernels.py` of its backend, and one adapter in the same folder:

1. Identify it: `op`, `name`, `summary`, `target`.
2. List all its limits: `features`, and `constraints` that together mention every structural facet of the op's problem,
   at least with `anything(...)`. A feature that is not listed is not supported.
3. Declare its properties: `band`, `graph`, `deterministic`, `batch_invariant`, `reads_lengths`.
4. List the families of devices on which it ran: `standings`. On others, `kernelhub verify` must pass before the kernel
   is selected.

Records are cheap to import. `target` is imported once the kernel is selected.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.constraint import Constraint
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.standing import Standing, standing_on


class Band(enum.IntEnum):
    """Rank of kernels that no line of `backends/order` mentions; a higher band comes first."""

    REFERENCE = 0
    PORTABLE = 1
    TUNED = 2
    SPECIALISED = 3
    PLUGIN = 4


class GraphLevel(enum.IntEnum):
    """Which steps of an engine may be captured in a CUDA graph."""

    NONE = 0
    UNIFORM_DECODE = 1
    FULL = 2


Choose = Callable[[str, Any], Any]  # an op and a problem -> their `Selection`


@dataclass(frozen=True, eq=False)
class Kernel:
    """Record of one implementation of one op by one backend. Records compare by identity.

    Attributes:
        op: name of the op, e.g. ``"paged_attention"``.
        name: ``"backend.variant"``, e.g. ``"triton.split_kv"``.
        target: ``"module:attribute"`` of the adapter: called with the problem, it returns an instance of the adapter
            class of the op's contract.
        summary: what the kernel does and for which use, in one line.
        band: rank if no order line mentions the kernel.
        constraints: every limit on the problem and the machine.
        features: supported semantic features (see `problem.feature_name`).
        layouts: layouts of weights that the kernel reads: ``"checkpoint"``, or tags of packed weights.
        packs_to: the layout of `layouts` that the adapter's `pack` makes; empty if it does not pack.
        graph: which steps may be captured in a CUDA graph.
        deterministic: results are bitwise equal from run to run.
        batch_invariant: a row's bits do not depend on the other rows of the batch.
        reads_lengths: `begin` needs sequence lengths on the host, and syncs if they are not given.
        compiles_sizes: a ragged call is compiled for each number of sequences and longest sequence, as powers of two.
        compiles_when_made: making the adapter compiles its kernels, in any thread, so that adapters of several
            problems can be made at once.
        configurable: the adapter is a `Configurable`, whose sizes `kernelhub tune` measures.
        parts: of a kernel that is made of other ops: for a problem, these ops with their problems. Each selects its own
            kernel, and the record rejects a problem for which one has none.
        calls: of a kernel that calls other ops by their functions: for a problem the selections of these in order,
            each by ``choose(op, problem)``. `explain` shows them; the record rejects nothing by them.
        gives: where kernels of an op give results of several forms: the value of the facet of the op that takes them.
        steps: of a kernel that calls other ops: these, and what it converts between them, in order, as `explain` shows
            them. A step begins with the name of its op.
        source: origin of the algorithm or library.
        standings: evidence for the kernel by family of devices; on a family that none names it is untested.
    """

    op: str
    name: str
    target: str
    summary: str
    band: Band
    constraints: tuple[Constraint, ...]
    features: frozenset[str] = frozenset()
    layouts: tuple[str, ...] = (CHECKPOINT,)
    packs_to: str = ""
    graph: GraphLevel = GraphLevel.NONE
    deterministic: bool = False
    batch_invariant: bool = False
    reads_lengths: bool = False
    compiles_sizes: bool = False
    compiles_when_made: bool = False
    configurable: bool = False
    parts: Callable[[Any], tuple[tuple[str, Any], ...]] | None = None
    calls: Callable[[Any, Choose], tuple[Any, ...]] | None = None
    gives: str = ""
    steps: tuple[str, ...] = ()
    source: str = ""
    standings: tuple[Standing, ...] = ()

    @property
    def needs_packing(self) -> bool:
        """Whether the kernel cannot read checkpoint weights."""
        return CHECKPOINT not in self.layouts

    @property
    def backend(self) -> str:
        return self.name.partition(".")[0]

    def standing_on(self, family: str) -> Standing:
        """The standing of the kernel on a family of devices."""
        return standing_on(self.standings, family)

    def matches(self, pattern: str) -> bool:
        """Whether a name in a request means this kernel: a backend, a kernel, or a glob over kernels."""
        return means(pattern, self.name)


def means(pattern: str, kernel: str) -> bool:
    """Whether a name in a request means the kernel of this name."""
    return pattern in (kernel.partition(".")[0], kernel) or fnmatch.fnmatchcase(kernel, pattern)


@dataclass(frozen=True)
class Watch:
    """A hook that logs what a library compiles, loads, downloads and tunes.

    Attributes:
        module: name of the library's module; the hook does not import it.
        target: ``"module:function"``, called once with that name and the `Journal` after the module was imported.
    """

    module: str
    target: str


@dataclass(frozen=True)
class Backend:
    """Record of a backend: the `BACKEND` of its `kernels.py`.

    Attributes:
        name: first part of its kernels' names.
        summary: what it is, in one line.
        package: import name of its library; empty for kernelhub itself.
        homepage: URL of the library.
        watches: hooks that log the library's work other than launches.
        portable: its kernels are the same program on every device that their constraints admit. They run where no
            other kernel is trusted, so that the policy of trust requires no evidence for them.
    """

    name: str
    summary: str
    package: str = ""
    homepage: str = ""
    watches: tuple[Watch, ...] = ()
    portable: bool = False


@dataclass(frozen=True)
class KnownBad:
    """A known defect: kernels that give wrong numbers for some problems. They are rejected there without `unsafe=True`.

    Attributes:
        kernel: name or glob of the kernels.
        op: name of the op, or ``"*"``.
        where: conditions; the entry applies if none of them rejects the problem.
        symptom: what goes wrong, as a sentence.
        issue: link to the report.
        remedy: command or version that fixes it; empty if there is none yet.
    """

    kernel: str
    op: str
    where: tuple[Constraint, ...]
    symptom: str
    issue: str
    remedy: str = ""
