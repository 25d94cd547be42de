"""The PTX of programs of one row that are a cluster, warp by warp in any order: no interpreter runs it."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kernelhub.backends.triton.comm import clusters

ALL, LANES = 0xFFFFFFFF, 32
PLACE, PROGRAM = 64, 1 << 24  # where a program's place is, and what an address in a program's memory has above it
EPS = 1e-5


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float_of(word: int) -> np.float32:
    return np.frombuffer(struct.pack("<I", word), np.float32)[0]


class Program:
    """The shared memory of a program: words by address, and the state of its barrier."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.lacking_bytes: int | None = None  # None: there is no barrier yet


class Warp:
    """A warp of a program, whose lanes run together."""

    def __init__(self, cluster: Sequence[Program], rank: int, warp: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.lanes = [{"%tid.x": 32 * warp + lane, "%cluster_ctarank": rank} for lane in range(LANES)]

    def run(self, text: str, operands: Sequence[dict[str, int]]) -> list[dict[str, int]] | None:
        """The registers of each lane at the end; None where the warp waits for what has not come."""
        values = [{**lane, **given, "place": PLACE} for lane, given in zip(self.lanes, operands, strict=True)]
        statements = [one.strip() for one in re.split(r"[;\n]", text.strip("{}\n")) if one.strip()]
        at = 0
        while at < len(statements):
            statement, at = statements[at], at + 1
            if statement.startswith((".reg", ".shared")) or statement.endswith(":"):
                continue
            active = list(range(LANES))
            if statement.startswith("@"):
                guard, statement = statement[1:].split(" ", 1)
                active = [lane for lane in active if bool(values[lane][guard.strip("!")]) != guard.startswith("!")]
            name, _, rest = statement.partition(" ")
            if name == "bra":
                assert len(active) in (0, LANES), "the lanes of a warp part"
                target = statements.index(f"{rest}:")
                if active and target < at:
                    return None
                at = target if active else at
                continue
            places = [place.strip() for place in re.sub(r"[{}\[\]]", " ", rest).split(",")]
            self._step(name, places, active, values)
        return values

    def _step(self, name: str, places: list[str], active: list[int], values: list[dict[str, int]]) -> None:
        def of(lane: int, place: str) -> int:
            if place in values[lane]:
                return values[lane][place]
            return bits(float(place)) if "." in place else int(place, 0)

        if name == "shfl.sync.bfly.b32":
            assert len(active) == LANES
            target, source, distance, _, mask = places
            given = [values[lane][source] for lane in range(LANES)]
            assert int(mask, 0) == ALL
            for lane in range(LANES):
                values[lane][target] = given[lane ^ int(distance)]
            return
        if name == "vote.sync.any.pred":
            assert len(active) == LANES
            found = any(values[lane][places[1]] for lane in range(LANES))
            for lane in range(LANES):
                values[lane][places[0]] = found
            return
        for lane in active:
            own = values[lane]
            if name in OPERATIONS:
                own[places[0]] = OPERATIONS[name](*(of(lane, place) for place in places[1:]))
            elif name == "mapa.shared::cluster.u32":
                own[places[0]] = of(lane, places[1]) + PROGRAM * (1 + of(lane, places[2]))
            elif name.startswith("st.async"):
                address, value, barrier = (of(lane, place) for place in places)
                program = self.cluster[address // PROGRAM - 1]
                assert barrier // PROGRAM == address // PROGRAM
                assert barrier % PROGRAM == PLACE
                assert program.lacking_bytes is not None, "a store before the barrier is there"
                assert program.lacking_bytes > 0, "more than the barrier waits for"
                assert address % PROGRAM not in program.words, "two warps at one place"
                program.words[address % PROGRAM] = value
                program.lacking_bytes -= 4
            elif name.startswith("mbarrier.init"):
                self.cluster[self.rank].lacking_bytes = 0
            elif name.startswith("mbarrier.arrive.expect_tx"):
                self.cluster[self.rank].lacking_bytes = int(places[-1])
            elif name.startswith("mbarrier.try_wait"):
                own[places[0]] = self.cluster[self.rank].lacking_bytes == 0
            elif name == "ld.shared.v4.b32":
                base, offset = places[4].split("+")
                for place, target in enumerate(places[:4]):
                    # Beyond the last sum there is memory that nothing has written.
                    own[target] = self.cluster[self.rank].words.get(of(lane, base) + int(offset) + 4 * place, ALL)
            else:
                assert name.startswith(("fence.", "barrier.cluster.")), name


def arithmetic(function: Callable[..., Any]) -> Callable[..., int]:
    def run(*words: int) -> int:
        with np.errstate(all="ignore"):
            return bits(np.float32(function(*map(float_of, words))))

    return run


OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov.b32", "mov.u32"), lambda a: a),
    "add.u32": lambda a, b: (a + b) & ALL,
    "sub.u32": lambda a, b: (a - b) & ALL,
    "mul.lo.u32": lambda a, b: (a * b) & ALL,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & ALL,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "max.u32": max,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.eq.b32": lambda a, b: a == b,
    "setp.num.f32": lambda a, b: not (np.isnan(float_of(a)) or np.isnan(float_of(b))),
    "selp.b32": lambda a, b, condition: a if condition else b,
    "mul.f32": arithmetic(lambda a, b: a * b),
    "add.f32": arithmetic(lambda a, b: a + b),
    "fma.rn.f32": arithmetic(lambda a, b, c: np.float64(a) * np.float64(b) + np.float64(c)),
    "div.full.f32": arithmetic(lambda a, b: a / b),
    "rsqrt.approx.f32": arithmetic(lambda a: 1 / np.sqrt(np.float64(a))),
}


def shared_roots(
    programs: int, warps: int, elements: int, item_bytes: int, row: np.ndarray, empty: set[int], chosen: random.Random
) -> list[tuple[int, int]]:
    """What each thread of a cluster has for a row: one over its root, in bits, and whether something lacks."""
    cluster = [Program() for _ in range(programs)]
    all_warps = [Warp(cluster, rank, warp) for rank in range(programs) for warp in range(warps)]
    nothing: list[dict[str, int]] = [{} for _ in range(LANES)]
    places = {}
    for warp in chosen.sample(all_warps, len(all_warps)):
        places[warp] = warp.run(clusters.beginning_code(programs, warps), nothing)
    # All have begun. Now each shares when it likes, and asks before and after.
    sharing = clusters.sharing_code(elements, item_bytes)
    rooting = clusters.rooting_code(programs, warps, len(row))
    found = []
    waiting = chosen.sample(all_warps, len(all_warps))
    for warp in list(waiting):
        operands, begun = [], places[warp]
        assert begun is not None
        for registers in begun:
            first = elements * (32 * warps * warp.rank + registers["%tid.x"])
            mine = [first + index for index in range(elements)]
            lacks = [index in empty for index in mine]
            words = [row[index] if index < len(row) else 0.0 for index in mine]
            given = {f"${elements + at}": bits(value) for at, value in enumerate(words)}
            came = [(0xFFFF if item_bytes == 2 else ALL) if lacks[at] else 7 for at in range(elements)]
            packed = [came[at] | came[at + 1] << 16 for at in range(0, elements, 2)] if item_bytes == 2 else came
            given |= {f"${2 * elements + at}": word for at, word in enumerate(packed)}
            for at in range(elements):
                given[f"${2 * elements + len(packed) + at}"] = registers["$1"]
                given[f"${3 * elements + len(packed) + at}"] = registers["$2"]
            operands.append(given)
        root = [{"$2": registers["$0"], "$3": bits(EPS)} for registers in begun]
        assert warp.run(rooting, root) is None, "a row is done before all have shared"
        assert warp.run(sharing, operands) is not None
    for warp in chosen.sample(all_warps, len(all_warps)):
        begun = places[warp]
        assert begun is not None
        ended = warp.run(rooting, [{"$2": registers["$0"], "$3": bits(EPS)} for registers in begun])
        assert ended is not None
        found += [(registers["$0"], registers["$1"]) for registers in ended]
    return found


CLUSTERS = [(7, 4, 8, 2, 7168), (4, 2, 8, 2, 2000), (3, 1, 4, 4, 380), (8, 4, 4, 4, 4096), (2, 2, 16, 2, 2048)]


@pytest.mark.parametrize(("programs", "warps", "elements", "item_bytes", "width"), CLUSTERS)
def test_all_threads_of_a_row_have_one_root(
    programs: int, warps: int, elements: int, item_bytes: int, width: int
) -> None:
    """Whatever the order in which warps come; and a row that has a NaN of its own lacks nothing."""
    row = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    of_all = {
        found
        for seed in range(3)
        for found in shared_roots(programs, warps, elements, item_bytes, row, set(), random.Random(seed))
    }
    [(root, late)] = of_all
    assert late == 0
    want = 1 / np.sqrt(np.square(row.astype(np.float64)).mean() + EPS)
    assert abs(float(float_of(root)) / want - 1) < 1e-6
    row[width // 2] = np.nan
    [(root, late)] = set(shared_roots(programs, warps, elements, item_bytes, row, set(), random.Random(9)))
    assert (bool(np.isnan(float_of(root))), late) == (True, 0)


@pytest.mark.parametrize(("programs", "warps", "elements", "item_bytes", "width"), CLUSTERS)
def test_all_programs_of_a_row_learn_what_one_lacks(
    programs: int, warps: int, elements: int, item_bytes: int, width: int
) -> None:
    chosen = random.Random(width)
    for _ in range(2):
        row = np.ones(width, np.float32)
        lacking = chosen.randrange(width)
        row[lacking] = np.nan
        found = set(shared_roots(programs, warps, elements, item_bytes, row, {lacking}, chosen))
        assert {late for _, late in found} == {1}
        assert all(np.isnan(float_of(root)) for root, _ in found)


def test_each_operand_has_a_constraint() -> None:
    for elements, item_bytes in ((8, 2), (4, 4), (16, 2)):
        code, given = clusters.sharing_code(elements, item_bytes), clusters.sharing_constraints(elements, item_bytes)
        places = {int(place) for place in re.findall(r"\$(\d+)", code)}
        assert places <= set(range(len(given.split(","))))
        assert set(range(2 * elements)) <= places
    for units in (1, 2):
        places = {int(place) for place in re.findall(r"\$(\d+)", clusters.waiting_code(units, 2))}
        assert places <= set(range(len(clusters.waiting_constraints(units).split(","))))
