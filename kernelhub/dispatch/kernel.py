"""A kernel record: everything selection needs to know of one implementation, as data.

To add a kernel, write one record in the `kernels.py` of its backend and one adapter beside it:

1. Say what it is: `op`, `name`, `summary`, `target`.
2. Say all its limits: `features`, and `constraints` that together mention every structural facet of the
   op's problem, if only with `anything(...)`. What is not listed is not supported.
3. Say what it promises: `band`, `graph`, `deterministic`, `batch_invariant`, `reads_lengths`.
4. Say on which families of devices it ran: `standings`. Elsewhere `kernelhub verify` has to pass before it is chosen.

Records are light to import; `target` is imported only once the kernel has been chosen.
"""

from __future__ import annotations

import enum
import fnmatch
from dataclasses import dataclass

from kernelhub.dispatch.constraint import Constraint
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.standing import Standing, standing_on


class Band(enum.IntEnum):
    """Where a kernel ranks that no line of `backends/order` mentions."""

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


@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation of one op by one backend. Records are told apart by identity.

    Attributes:
        op: name of the op, e.g. ``"paged_attention"``.
        name: ``"backend.variant"``, e.g. ``"triton.split_kv"``.
        target: ``"module:attribute"`` of the adapter; what it must be is said by the op's contract.
        summary: what the kernel does and for whom, in one line.
        band: rank where no order line mentions the kernel.
        constraints: every limit that can be told from the problem and the machine.
        features: semantic features that the kernel honours (see `problem.feature_name`).
        layouts: layouts of weights that the kernel reads: as in a checkpoint unless said, and tags of packed ones.
        packs_to: the one of `layouts` that its adapter's `pack` makes; empty if it packs nothing.
        graph: what the kernel allows under CUDA-graph capture.
        deterministic: the same call gives the same bits, run to run.
        batch_invariant: a row's bits do not depend on the other rows of the batch.
        reads_lengths: `begin` needs sequence lengths on the host, and syncs when they are not given.
        compiles_sizes: a ragged call is compiled for each number of sequences and longest sequence, as powers of two.
        configurable: its adapter is a `Configurable`: `kernelhub tune` tries other sizes of it than its own.
        source: where the algorithm or library comes from.
        standings: what is known of the kernel on each family of devices; on a family that none names it is untested.
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
    configurable: bool = False
    source: str = ""
    standings: tuple[Standing, ...] = ()

    @property
    def needs_packing(self) -> bool:
        """It cannot read weights as they lie in a checkpoint."""
        return CHECKPOINT not in self.layouts

    @property
    def backend(self) -> str:
        return self.name.partition(".")[0]

    def standing_on(self, family: str) -> Standing:
        """What is known of the kernel on a family of devices."""
        return standing_on(self.standings, family)

    def matches(self, pattern: str) -> bool:
        """Does the user's word mean this kernel? A backend, a kernel's name, or a glob over names."""
        return pattern in (self.backend, self.name) or fnmatch.fnmatchcase(self.name, pattern)


@dataclass(frozen=True)
class Watch:
    """What makes a library tell of what it compiles, loads, downloads and tunes.

    Attributes:
        module: the library's module, which is never imported for this.
        target: ``"module:function"``; called once with that name and the `Journal`, when the module has been imported.
    """

    module: str
    target: str


@dataclass(frozen=True)
class Backend:
    """Who provides kernels: the `BACKEND` of a backend's `kernels.py`.

    Attributes:
        name: first part of its kernels' names.
        summary: what it is, in one line.
        package: import name of the library behind it, or "" for kernelhub itself.
        homepage: where to read about the library.
        watches: what tells of the library's work besides launching.
        portable: its kernels are the same program on every device that their constraints admit, and are what runs where
            nothing else is trusted: trust does not ask for evidence about them.
    """

    name: str
    summary: str
    package: str = ""
    homepage: str = ""
    watches: tuple[Watch, ...] = ()
    portable: bool = False


@dataclass(frozen=True)
class KnownBad:
    """A kernel that gives wrong numbers somewhere: never chosen there, forced only with `unsafe=True`.

    Attributes:
        kernel: name or glob of the kernels it speaks of.
        op: the op, or ``"*"``.
        where: all of these must *hold* for the entry to apply.
        symptom: what goes wrong, as a sentence.
        issue: link to the report.
        remedy: what gets rid of it; empty if nothing does yet.
    """

    kernel: str
    op: str
    where: tuple[Constraint, ...]
    symptom: str
    issue: str
    remedy: str = ""
