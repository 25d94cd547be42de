"""The measurements of one problem class: times at each size, the resulting ranking, and the versions of its kernels.

An entry is plain values on disk. Reading an invalid entry raises, and counts as a miss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelhub.dispatch.configuration import Configuration
from kernelhub.dispatch.problem_class import Facets
from kernelhub.dispatch.tuned import Tuned
from kernelhub.evidence.tuning.decide import ALONE, WORDS, Regret, Time, regret
from kernelhub.probes.document import SCALAR, difference

_TIMES = {
    "us": float,
    "noise_us": float,
    "samples": int,
    "how": str,
    "configuration?": (None, {str: SCALAR}),
    "own_us?": float,
}
_SCHEMA = {
    "op": str,
    "problem": {str: SCALAR},
    "regime": str,
    "order": [str],
    "ranking": [str],
    "word": str,
    "date": str,
    "kernels": {str: {"versions": {str: str}, "record": str}},
    "sizes": [{"tokens": int, "label": str, "times": {str: _TIMES}, "out?": {str: str}}],
}

WRONG = "wrong:"  # prefix of the reason for a kernel that was not timed because its result was wrong


@dataclass(frozen=True)
class Measured:
    """Times of one kernel at one size.

    Attributes:
        us: median time of a call, in microseconds, with `configuration`.
        noise_us: standard deviation of a sample, from the median distance to the median.
        samples: number of samples.
        how: ``"graph"``, ``"events"`` or ``"clock"``: see `timers`.
        configuration: sizes that were faster than the kernel's defaults; None if the defaults were fastest.
        own_us: time with the default sizes, if others were faster.
    """

    us: float
    noise_us: float
    samples: int
    how: str
    configuration: Configuration | None = None
    own_us: float | None = None

    @property
    def time(self) -> Time:
        return Time(self.us, self.noise_us)

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "us": round(self.us, 4), "noise_us": round(self.noise_us, 4), "samples": self.samples, "how": self.how
        }  # fmt: skip
        if self.configuration is not None:
            plain |= {"configuration": dict(self.configuration), "own_us": round(self.own_us or 0.0, 4)}
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Measured:
        configuration = plain.get("configuration")
        return Measured(
            _positive(plain["us"]),
            _number(plain["noise_us"]),
            int(plain["samples"]),
            str(plain["how"]),
            None if configuration is None else dict(configuration),
            None if configuration is None else _positive(plain["own_us"]),
        )


@dataclass(frozen=True)
class MeasuredSize:
    """One measured call of a problem class.

    Attributes:
        tokens: its number of tokens.
        label: further properties of the call.
        times: times of the right kernels, by name.
        out: kernels that were not timed, each with the reason.
    """

    tokens: int
    label: str
    times: Mapping[str, Measured]
    out: Mapping[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, str]:
        """Kernels with a wrong result, each with its fault."""
        return {name: why for name, why in self.out.items() if why.startswith(WRONG)}

    def excluding(self, wrong: Mapping[str, str]) -> MeasuredSize:
        """The size without the times of kernels that were wrong at another size."""
        times = {name: measured for name, measured in self.times.items() if name not in wrong}
        out = {name: f"at another size {why}" for name, why in wrong.items() if name in self.times}
        return MeasuredSize(self.tokens, self.label, times, {**self.out, **out})

    @property
    def plain_times(self) -> dict[str, Time]:
        """The times for `decide`."""
        return {name: measured.time for name, measured in self.times.items()}

    def to_dict(self) -> dict[str, Any]:
        times = {name: measured.to_dict() for name, measured in self.times.items()}
        return {"tokens": self.tokens, "label": self.label, "times": times, "out": dict(self.out)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> MeasuredSize:
        times = {str(name): Measured.from_dict(item) for name, item in plain["times"].items()}
        out = {str(name): str(why) for name, why in plain.get("out", {}).items()}
        return MeasuredSize(int(plain["tokens"]), str(plain["label"]), times, out)


@dataclass(frozen=True)
class Kind:
    """The state of a kernel at its measurement: versions of its libraries by package, and the digest of its record."""

    versions: Mapping[str, str]
    record: str


@dataclass(frozen=True)
class TuningEntry:
    """One problem class.

    Attributes:
        op: name of the op.
        facets: facets of the problem, without the device.
        regime: the op's name for the phase.
        order: kernels that can run it, as ranked without measurements.
        ranking: measured kernels, best first.
        word: why the first of them is, a key of `decide.WORDS`.
        sizes: the measured sizes.
        kernels: the state of each kernel of `ranking`.
        date: ISO 8601, in UTC.
    """

    op: str
    facets: Facets
    regime: str
    order: tuple[str, ...]
    ranking: tuple[str, ...]
    word: str
    sizes: tuple[MeasuredSize, ...]
    kernels: Mapping[str, Kind]
    date: str

    @property
    def key(self) -> str:
        """The problem class, as key in documents."""
        return key_of(self.facets)

    @property
    def chosen(self) -> str:
        return self.ranking[0]

    def regrets(self, kernel: str | None = None) -> list[tuple[MeasuredSize, Regret | None]]:
        """Extra time of a kernel, by default the selected one, over the fastest at each size."""
        return [(size, regret(kernel or self.chosen, size.plain_times)) for size in self.sizes if size.times]

    def without(self, gone: set[str]) -> TuningEntry | None:
        """The entry without kernels that can no longer be selected; None if none is left."""
        ranking = tuple(name for name in self.ranking if name not in gone)
        return TuningEntry(**{**vars(self), "ranking": ranking}) if ranking else None

    def tuned(self) -> Tuned:
        """The entry in the form that selection reads."""
        configurations: dict[str, dict[int, Configuration]] = {}
        for size in self.sizes:
            for name, measured in size.times.items():
                if measured.configuration is not None and size.tokens > 0:
                    configurations.setdefault(name, {}).setdefault(size.tokens, measured.configuration)
        return Tuned(self.ranking, {name: self.because(name) for name in self.ranking}, configurations)

    def because(self, kernel: str) -> str:
        """Why a kernel is selected: its time, the next one's, noise and date, at the size with the largest gain.

        That is the size at which it gains most on the next in the ranking.
        """
        rest = self.ranking[self.ranking.index(kernel) + 1 :]
        if not rest:
            size = next(size for size in self.sizes if kernel in size.times)
            word = WORDS[ALONE] if len(self.ranking) == 1 else "the slowest of those measured"
            return f"measured {self.date[:10]}: {_time_text(size, kernel)}; {word}"
        shared = [size for size in self.sizes if kernel in size.times and rest[0] in size.times]
        if not shared:
            return f"measured {self.date[:10]}: {kernel} at every size, {rest[0]} not"
        size = max(shared, key=lambda size: size.times[rest[0]].us / size.times[kernel].us)
        more = f", and {len(self.sizes) - 1} other sizes" if len(self.sizes) > 1 else ""
        word = WORDS.get(self.word, self.word) if kernel == self.chosen else "the next best of those measured"
        next_us = size.times[rest[0]]
        return (
            f"measured {self.date[:10]}: {_time_text(size, kernel)}, next {rest[0]} {_us(next_us.us)} "
            f"(noise {_us(size.times[kernel].noise_us)} and {_us(next_us.noise_us)}){more}; {word}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        kernels = {
            name: {"versions": dict(kind.versions), "record": kind.record} for name, kind in self.kernels.items()
        }
        return {
            "op": self.op,
            "problem": dict(self.facets),
            "regime": self.regime,
            "order": list(self.order),
            "ranking": list(self.ranking),
            "word": self.word,
            "date": self.date,
            "kernels": kernels,
            "sizes": [size.to_dict() for size in self.sizes],
        }

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> TuningEntry:
        """The entry from `to_dict`.

        Raises:
            ValueError: the values are not an entry.
        """
        wrong = difference(plain, _SCHEMA)
        if wrong:
            raise ValueError(wrong)
        kernels = {
            str(name): Kind({str(k): str(v) for k, v in kind["versions"].items()}, str(kind["record"]))
            for name, kind in plain["kernels"].items()
        }
        ranking = tuple(map(str, plain["ranking"]))
        sizes = tuple(MeasuredSize.from_dict(size) for size in plain["sizes"])
        known = {name for size in sizes for name in size.times}
        if not ranking or set(ranking) != known or not known <= set(kernels):
            raise ValueError("its ranking is not of the kernels that were measured")
        if plain["word"] not in WORDS:
            raise ValueError(f"its word is {plain['word']!r}")
        return TuningEntry(
            str(plain["op"]),
            tuple(sorted((str(name), value) for name, value in plain["problem"].items())),
            str(plain["regime"]),
            tuple(map(str, plain["order"])),
            ranking,
            str(plain["word"]),
            sizes,
            kernels,
            str(plain["date"]),
        )


def key_of(facets: Facets) -> str:
    """A problem class as text: the same in every process."""
    return json.dumps(dict(facets), sort_keys=True)


def _time_text(size: MeasuredSize, kernel: str) -> str:
    where = f" for {size.tokens} tokens" if size.tokens else ""
    return f"{kernel} {_us(size.times[kernel].us)}{where}"


def _us(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us:.0f} us"


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a time")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if number == 0:
        raise ValueError("a call has a time of zero or less")
    return number
