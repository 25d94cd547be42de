"""The tiles and the number of parts that occupy every multiprocessor."""

from __future__ import annotations

import functools
from typing import NamedTuple

from kernelhub.backends.triton.attention.tiles import Tiles


@functools.lru_cache(maxsize=4096)
def full_waves(programs: int, room: int, most: int) -> int:
    """Parts of each of `programs`, up to `most`, with which rounds of `room` programs are nearly full.

    As many as one round holds; if that fills less than 85 % of what the best number would, the fewest that fill
    as much.
    """
    filled = [programs * parts / (-(-programs * parts // room) * room) for parts in range(1, most + 1)]
    fewest = 1 + next(index for index, share in enumerate(filled) if share >= 0.85 * max(filled))
    return max(fewest, min(most, room // programs))


class Kind(NamedTuple):
    """Tiles of the split-KV kernel, and what of it fits a multiprocessor.

    Attributes:
        tiles: the tiles.
        programs: how many run at once on a multiprocessor.
        loads_kib: shared memory that each of them keeps filling.
        cost: time for a byte, relative to other kinds.
        later: the same, where they take more than one round; 0 if it is no other.
    """

    tiles: Tiles
    programs: int
    loads_kib: int
    cost: float
    later: float = 0.0


class Division(NamedTuple):
    """How the keys of a batch are divided.

    Attributes:
        tiles: the tiles.
        parts: most parts of a sequence, where all are equally long.
        shares: if not 0, parts of unequal lengths have all keys of the batch over so many, see `balanced`.
        filled: lengths count as equal where they make so many parts together; see `shared`. Without shares and with
            tiles that look ahead: so many parts get more keys before there are more.
        least: where lengths share keys out, equal ones of fewer keys have one part each.
    """

    tiles: Tiles
    parts: int
    shares: int = 0
    filled: int = 0
    least: int = 0

    def items(self, num_seqs: int) -> int:
        """Programs for each KV head and block of rows."""
        if not self.shares:
            return num_seqs * self.parts
        return num_seqs + max(num_seqs * (self.parts - 1), self.shares)

    def stored(self, num_seqs: int) -> int:
        """Most parts whose results are stored, for each KV head and row: those of sequences that have several."""
        equal = num_seqs * self.parts if self.parts > 1 else 0
        return max(equal, self.shares + min(num_seqs, self.shares) if self.shares else 0)


MEASURED_ROWS = 16  # of a tile
# For sm_90, by bytes of an element of the cache and the width of a head. More than `_ENOUGH_KIB` in flight do not raise
# the bandwidth of a multiprocessor; one program alone reaches 55 %. Merging costs a launch, `_MERGE_BYTES`, and the
# traffic of the parts. Wide tiles keep more bytes in flight where few programs fit; of small ones so many fit that
# batches of 64 sequences with 8 KV heads take one round instead of two. Two rounds of small ones are as fast as wide
# ones alone, but attention of vLLM's server took 5 % longer with them. Fitted to times on an H200, Triton 3.6.0:
# benchmarks/results/splits_h200.json by scripts/measure_splits.py, splits_rounds_h200.json. A byte's code takes as many
# registers and as much shared memory as that of two, so its kinds are the same: splits_fp8_values_h200.json.
HOPPER = {
    (2, 64): (Kind(Tiles(16, 128, 4, 3), 4, 28, 0.97), Kind(Tiles(16, 64, 2, 3), 8, 24, 1.06)),
    (2, 128): (Kind(Tiles(16, 128, 4, 3), 3, 50, 1.0), Kind(Tiles(16, 64, 4, 2), 4, 36, 1.03, 1.1)),
    (2, 256): (Kind(Tiles(16, 32, 4, 2), 3, 48, 1.06), Kind(Tiles(16, 64, 4, 2), 2, 56, 1.0)),
    (1, 64): (Kind(Tiles(16, 128, 4, 3), 4, 28, 0.97), Kind(Tiles(16, 64, 2, 3), 7, 24, 1.06)),
    (1, 128): (Kind(Tiles(16, 128, 4, 3), 3, 50, 1.0), Kind(Tiles(16, 64, 4, 2), 4, 36, 1.03, 1.1)),
    (1, 256): (Kind(Tiles(16, 32, 4, 3), 3, 48, 1.06), Kind(Tiles(16, 64, 4, 2), 2, 56, 1.0)),
}
# For batches of up to so many programs, of a row for each warp at most (benchmarks/results/splits_few_h200.json).
# Latency decides their time, so each part has few keys, which are all under way at once. On a multiprocessor
# FEW_AT_ONCE of them are at work; of one sequence one is, until parts have FEW_FULL keys.
FEW = {(2, 128): Tiles(16, 64, 4, 3, ahead=True), (1, 128): Tiles(16, 64, 4, 3, ahead=True)}
FEW_PROGRAMS = 32
FEW_AT_ONCE = 2
FEW_FULL = 256
FEW_PARTS = 32  # of a sequence, where all are equally long
_ENOUGH_KIB = 125
_MERGE_BYTES = 500_000
_NEAR = 1.02
_MOST_ROUNDS = 14  # more parts than fill so many rounds gain nothing
# Parts of unequal lengths fill the device so many times: a long last part then idles it for a fraction of the whole.
_ROUNDS = 2
_EQUAL_ROUNDS = 10  # of parts of equal lengths, where unequal ones share keys out
# By the lengths, which are no bound, parts pay earlier. Fitted to times on an H200 of 16 to 200 sequences of 1024 to
# 4096 keys (benchmarks/results/splits_rule_h200.json): what merging costs, what one program alone on a multiprocessor
# and several, of so many KiB of loads for all, draw of its share of the bandwidth, and the most that it draws while
# others have less to do. Keys of a byte take longer than half of those of two.
_MERGE_BYTES_OF_LENGTHS = 240_000
_ALONE, _SHARE_KIB, _MOST_SHARE = 0.62, 111, 1.15
_READING_OF_FP8 = 1.75
_LONG = 3072  # more keys are divided, whatever these say


@functools.lru_cache(maxsize=4096)
def cheapest(
    programs: int, num_sms: int, kinds: tuple[Kind, ...], keys: int, row_bytes: int, most: int, shares: bool = False
) -> Division:
    """The tiles and the fewest parts of each of `programs`, up to `most`, that take the least time, or 2 % more.

    Fewest, because `keys` is a bound, and shorter sequences gain less by parts than they pay for merging.

    Programs run in rounds. A full round fills each multiprocessor; the last may leave some with fewer programs, which
    then draw less bandwidth. Time is counted in bytes that a multiprocessor could have read.

    Args:
        programs: programs with one part each.
        num_sms: multiprocessors of the device.
        kinds: those to select from.
        keys: keys of a program.
        row_bytes: bytes of a key and its value.
        most: most parts.
        shares: whether unequal lengths share the keys out; then parts of equal lengths make the grid of unequal ones
            longer, too, and where few sequences run, not longer than a round, see `shared`.
    """

    def time_of(kind: Kind, parts: int) -> float:
        count, each, room = programs * parts, keys * row_bytes / parts, kind.programs * num_sms
        rounds, rest = divmod(count, room)
        spent = rounds * _busy(kind.programs, kind) * each
        if rest:
            spent += _busy(-(-rest // num_sms), kind) * each
        spent *= kind.later if kind.later and count > room else kind.cost
        if parts > 1:
            spent += _MERGE_BYTES + count * MEASURED_ROWS * 2 * row_bytes / num_sms
        return spent

    times = []
    for kind in kinds:
        room = kind.programs * num_sms
        filling = _MOST_ROUNDS * room // programs
        if shares:
            filling = room // programs if 2 * programs <= room else _EQUAL_ROUNDS * room // programs
        filling = max(1, min(most, filling))
        times += [(parts, time_of(kind, parts), kind) for parts in range(1, filling + 1)]
    enough = _NEAR * min(spent for _, spent, _ in times)
    parts, _, kind = min((item for item in times if item[1] <= enough), key=lambda item: item[:2])
    return Division(kind.tiles, parts)


def _busy(programs: int, kind: Kind) -> float:
    """How much longer `programs` on one multiprocessor take than their bytes at full bandwidth, times their number."""
    share = 0.55 if programs == 1 else min(1.0, programs * kind.loads_kib / _ENOUGH_KIB)
    return programs / share


@functools.lru_cache(maxsize=4096)
def fewest_keys(programs: int, parts: int, num_sms: int, kind: Kind, elements: int, itemsize: int) -> int:
    """Keys of each of `programs` from which so many parts take less time than one, `_LONG` at most.

    Args:
        programs: programs with one part each.
        parts: of each of them.
        num_sms: multiprocessors of the device.
        kind: the tiles.
        elements: of a key and its value.
        itemsize: bytes of an element.
    """

    def rounds(count: int) -> float:
        full, rest = divmod(count, kind.programs * num_sms)
        if not rest:
            return full * kind.programs
        most = -(-rest // num_sms) if full else kind.programs  # in a long grid a first round is packed, see `shared`
        share = _ALONE if most == 1 else min(_MOST_SHARE, most * kind.loads_kib / _SHARE_KIB)
        return full * kind.programs + max(rest / num_sms, most / share)

    gained = rounds(programs) - rounds(programs * parts) / parts
    if gained <= 0:
        return _LONG
    merging = _MERGE_BYTES_OF_LENGTHS + programs * parts * MEASURED_ROWS * 4 * elements / num_sms
    return min(_LONG, int(merging / (gained * elements * (_READING_OF_FP8 if itemsize == 1 else itemsize))))


def shared(division: Division, num_seqs: int, at_once: int, room: int, least: int) -> Division:
    """The division with the shares of unequal lengths.

    One round where it has room for a part and the rest of each sequence, with as many programs on a multiprocessor as
    parts of equal lengths take: of more, some multiprocessors would get several such parts, others programs without
    keys. In a longer grid multiprocessors get as many programs as fit, one after another, even those without keys. So
    where more than two fit, equal lengths of fewer parts than a round has would leave some multiprocessors idle (32 x
    4096 takes 1.10 of its time so on an H200), and share all keys, too.

    The parts of equal lengths are those for the bound on the lengths: one of sequences of fewer than `least` keys, but
    where several of each fit in one round.

    Args:
        num_seqs: sequences.
        at_once: programs that run at once on a multiprocessor.
        room: programs of a KV head that run at once on the device.
        least: keys from which the parts of the division take less time than one, see `fewest_keys`.
    """
    if 2 * num_seqs > room:
        division = division._replace(least=least)
    else:
        rounds = min(at_once, -(-num_seqs * division.parts * at_once // room))
        return division._replace(shares=max(1, room * rounds // at_once - num_seqs))
    if at_once <= 2:
        return division._replace(shares=max(1, _ROUNDS * room))
    rounds = 1 if num_seqs < room else _ROUNDS
    return division._replace(shares=max(1, rounds * room), filled=room)
