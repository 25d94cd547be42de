"""The exchange of messages between ranks through the process group's store, with a time-out for every wait.

Each meeting has its own keys. The first writer sets ``decision``, once: the lead, when every rank has confirmed, or any
rank that gives up. So all ranks get the same result, also if their clocks and time-outs differ; a late rank reads the
decision of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from kernelhub.runtime.ranks.settle import LEAD, Failure

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        host: name of the host, for display.
        namespace: equal for two processes that share process ids; empty if unknown.
        pid: process id there.
        started: start time in the kernel's ticks, which identifies a reused process id; 0 if unknown.
    """

    host: str
    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"

    def gone(self) -> str:
        """Why the process no longer runs, as a phrase; empty if it runs, or cannot be seen from here."""
        if not self.namespace or self.namespace != _namespace():
            return ""
        state, started = _state_of(self.pid)
        if not state or (self.started and started != self.started):
            return "has ended"
        return "was killed or has ended" if state in "ZX" else ""

    def stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger."""
        return self.namespace == _namespace() and bool(self.namespace) and _state_of(self.pid)[0] in ("T", "t")


def this_process() -> Process:
    """The current process."""
    return Process(socket.gethostname(), _namespace(), os.getpid(), _state_of(os.getpid())[1])


def _namespace() -> str:
    """Boot and PID namespace: two containers of one machine do not see each other's processes."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; empty and 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0


BEAT_S = 0.5
SILENT_S = 30.0  # an import of a large library may block heartbeats for many seconds
LINGER_S = 3.0  # for others to read the decision from a store that this process may host
GRACE_S = LINGER_S + 2.0  # beyond the time-out, for a rank that is reading the store
_PAUSE_S = (0.002, 0.1)  # between reads of the store: at first, and later
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20  # limit for a statement, which has some hundred kilobytes
_AGREED = "agreed"
_OF_DEAF_RANKS = ("rank_dead", "rank_silent", "rank_slow")  # the ranks concerned do not read the store


class Ended(Exception):
    """The meeting failed; contains the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class Clock:
    """Deadline of the meeting, current step of this rank, and the lead, once it is known.

    Attributes:
        stood_s: the longest time that this process did not run, as when it is stopped and continued.
        reported: the failure that the caller got already, since the store did not answer.
    """

    timeout_s: float
    begun: float
    doing: str = "arriving"
    lead: Process | None = None
    stood_s: float = 0.0
    reported: Failure | None = None

    @property
    def grace_s(self) -> float:
        return GRACE_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def stood_long(self) -> bool:
        """Whether other ranks that wait for this process now count it as silent."""
        return self.stood_s > SILENT_S

    @property
    def over(self) -> bool:
        return self.elapsed_s >= self.timeout_s

    @property
    def long_over(self) -> bool:
        """Whether no rank still waits, not even for a store that does not answer."""
        return self.elapsed_s >= self.timeout_s + self.grace_s


class Meeting:
    """One call of `agree`, from the view of one rank.

    Args:
        store: store of the process group; any `torch.distributed.Store`.
        rank, size: rank of this process, and size of the group.
        clock: clock of this call.
    """

    def __init__(self, store: Any, rank: int, size: int, clock: Clock) -> None:
        self.store = store
        self.rank, self.size, self.clock = rank, size, clock
        self.peers: dict[int, Process] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        number = store.add(f"kernelhub.agree/calls/{rank}", 1)
        self._prefix = f"kernelhub.agree/{number}"

    def arrive(self) -> None:
        """Announce this rank.

        Raises:
            Ended: the others have ended the meeting already.
        """
        failure = self._decided()
        if failure is not None and failure.code == "rank_missing":
            late = f"rank {self.rank} came too late; the others had given up: {failure.message}"
            raise Ended(Failure("too_late", late, (self.rank,)))
        if failure is not None:
            raise Ended(failure)
        self._set(f"hello/{self.rank}", asdict(this_process()))
        self._known(LEAD)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats of this rank within the block, from a separate thread and connection.

        The thread also opens the connection: name lookup takes 5 s if the name server does not answer.
        """
        done = threading.Event()

        def beat() -> None:
            number = 0
            try:
                store = self.store.clone() if hasattr(self.store, "clone") else self.store
                while not done.wait(BEAT_S):
                    number += 1
                    store.set(self._key(f"beat/{self.rank}"), str(number))
            except Exception:  # the store is not reachable, which the meeting itself reports
                return

        thread = threading.Thread(target=beat, name="kernelhub beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()

    def say(self, word: str, value: Any) -> None:
        """Store this rank's value under a word, unless it is too late."""
        if self.clock.over:
            message = f"rank {self.rank} ({this_process()}) was {self.clock.doing} for {self.clock.elapsed_s:.0f} s"
            self.give_up(Failure("rank_slow", f"{message}; give a longer timeout_s", (self.rank,)))
        self._set(f"{word}/{self.rank}", value)

    def hear_all(self, word: str) -> list[Any]:
        """Every rank's value under a word, in order; called by the lead."""
        heard: dict[int, Any] = {}

        def look() -> bool:
            for rank in range(self.size):
                if rank not in heard and self._has(f"{word}/{rank}"):
                    heard[rank] = self._get(f"{word}/{rank}")
            return len(heard) == self.size

        self._wait(look, watch=range(self.size), owed=word, first=word)
        return [heard[rank] for rank in range(self.size)]

    def hear_lead(self, word: str, after: str = "") -> Any | None:
        """The lead's value under a word; None if the lead announced instead that all agree.

        Args:
            word: the lead's next word.
            after: the word that the lead needs from every rank before.
        """
        agreed = False

        def look() -> bool:
            nonlocal agreed
            failure = self._decided()
            agreed = failure is not None and failure.code == _AGREED
            return agreed or self._has(f"{word}/{LEAD}")

        self._wait(look, watch=(LEAD,), owed=word, first=after)
        return None if agreed else self._get(f"{word}/{LEAD}")

    def conclude(self) -> None:
        """Announce that all agree; called by the lead.

        Raises:
            Ended: a rank gave up before.
        """
        self._decide(Failure(_AGREED, "", ()))

    def give_up(self, failure: Failure) -> NoReturn:
        """End the meeting for every rank.

        If no rank ended it although its time is long over, the store did not answer. When the store is back, the next
        rank that reads it writes the failure that its caller got.

        Raises:
            Ended: the first failure that was written.
        """
        if self.clock.reported is not None:
            failure = self.clock.reported
        elif self.rank == LEAD and self.clock.long_over:
            message = f"the group's store did not answer while rank {LEAD} ({this_process()}) did not run"
            message += f", within {self.clock.timeout_s:g} s: it was stopped or cut off"
            failure = Failure("store_silent", f"{message}; restart all ranks", (LEAD,))
        self._decide(failure)
        raise Ended(failure)

    def leave(self, failure: Failure | None) -> None:
        """Confirm that this rank has the decision; the lead waits briefly for all ranks that can confirm."""
        with contextlib.suppress(RuntimeError, OSError):  # the store is not reachable, so no rank reads it
            self._set(f"left/{self.rank}", True)
            until = time.monotonic() + LINGER_S
            deaf = failure.ranks if failure is not None and failure.code in _OF_DEAF_RANKS else ()
            while self.rank == LEAD and time.monotonic() < until:
                here = [rank for rank in range(self.size) if rank not in deaf and self._known(rank)]
                if all(self._has(f"left/{rank}") or self.peers[rank].gone() for rank in here):
                    return
                time.sleep(_PAUSE_S[1] / 4)

    def _decide(self, decision: Failure) -> None:
        """Write the decision unless one exists; raise if the existing one is a failure."""
        text = json.dumps(asdict(decision))
        stands = _failure(self.store.compare_set(self._key("decision"), "", text))
        if stands.code != _AGREED:
            raise Ended(stands)
        if decision.code != _AGREED:
            raise _AgreedMeanwhile

    def _decided(self) -> Failure | None:
        return _failure(self.store.get(self._key("decision"))) if self._has("decision") else None

    def _wait(self, look: Callable[[], bool], watch: Sequence[int], owed: str, first: str) -> None:
        """Wait for a value; end the meeting if a watched rank dies or time is over.

        Args:
            look: returns whether the value exists.
            watch: ranks that have to send it.
            owed: the awaited word.
            first: the word that all ranks send before, or empty.
        """
        pause, checked = _PAUSE_S[0], 0.0
        while not look():
            failure = self._decided()
            if failure is not None and failure.code != _AGREED:
                raise Ended(failure)
            try:
                if time.monotonic() - checked > BEAT_S / 2:
                    checked = time.monotonic()
                    self._watch(watch, owed)
                if self.clock.over:
                    self.give_up(self._who_is_missing(owed, first))
            except _AgreedMeanwhile:  # the lead has agreed; the next read finds the value
                continue
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    def _watch(self, ranks: Sequence[int], owed: str) -> None:
        """End the meeting if one of the ranks has died, or sends no heartbeat."""
        for rank in ranks:
            if rank == self.rank or not self._known(rank) or self._has(f"{owed}/{rank}"):
                continue
            peer = self.peers[rank]
            gone = peer.gone()
            if gone:
                message = f"rank {rank} ({peer}) {gone} while ranks were agreeing; see its log, and restart all ranks"
                self.give_up(Failure("rank_dead", message, (rank,)))
            silent_s = self._silent_s(rank)
            if silent_s > SILENT_S:
                state = "is stopped" if peer.stopped() else "is stopped, swapped out or cut off"
                message = f"rank {rank} ({peer}) has sent no heartbeat for {silent_s:.0f} s: it {state}"
                self.give_up(Failure("rank_silent", message, (rank,)))

    def _who_is_missing(self, owed: str, first: str) -> Failure:
        """The failure that names ranks that did not come, or that came and did not finish.

        The first rank whose time is over reports it, so all ranks must name the same ones: those that the lead waits
        for, and the lead only if there are none.
        """
        waited = f"within {self.clock.timeout_s:g} s"
        absent = [rank for rank in range(self.size) if not self._known(rank)]
        if absent:
            message = f"{_ranks(absent)} did not call agree() {waited}: dead, stuck or slow"
            return Failure("rank_missing", f"{message}; see the log there, or give a longer timeout_s", tuple(absent))
        slow = [rank for rank in range(self.size) if first and not self._has(f"{first}/{rank}")]
        lacking, slow = (first, slow) if slow else (owed, [LEAD])
        where = "; ".join(f"rank {rank} ({self.peers[rank]})" for rank in slow)
        message = f"{where} called agree() and runs, but was not ready {waited} ({lacking} is missing)"
        return Failure("rank_slow", f"{message}; warm up before, or give a longer timeout_s", tuple(slow))

    def _known(self, rank: int) -> bool:
        if rank not in self.peers and self._has(f"hello/{rank}"):
            self.peers[rank] = Process(**self._get(f"hello/{rank}"))
            self.clock.lead = self.peers.get(LEAD)
        return rank in self.peers

    def _silent_s(self, rank: int) -> float:
        """Seconds since a rank's last heartbeat, as seen from this rank."""
        number = int(self.store.get(self._key(f"beat/{rank}"))) if self._has(f"beat/{rank}") else 0
        known = self._beats.get(rank)
        if known is None or known[0] != number:
            self._beats[rank] = number, time.monotonic()
            return 0.0
        return time.monotonic() - known[1]

    def _key(self, word: str) -> str:
        return f"{self._prefix}/{word}"

    def _has(self, word: str) -> bool:
        return bool(self.store.check([self._key(word)]))

    def _set(self, word: str, value: Any) -> None:
        """Store a value, in pieces that any store accepts; the piece that others wait for comes last."""
        data = zlib.compress(json.dumps(value).encode(), 1)
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            self.store.set(self._key(f"{word}#{number}"), piece)
        self.store.set(self._key(word), bytes(f"{len(pieces)} ", "ascii") + pieces[0])

    def _get(self, word: str) -> Any:
        count, _, data = bytes(self.store.get(self._key(word))).partition(b" ")
        try:
            for number in range(1, int(count)):
                data += bytes(self.store.get(self._key(f"{word}#{number}")))
            return json.loads(_decompressed(data))
        except (ValueError, zlib.error) as error:
            sender = word.rpartition("/")[2]
            message = f"the message of rank {sender} did not reach rank {self.rank} complete ({word}: {error})"
            self.give_up(Failure("message_damaged", f"{message}; agree again", (self.rank,)))


def _decompressed(data: bytes) -> bytes:
    """Decompress a value of `_set`, up to a limit that no statement reaches."""
    stream = zlib.decompressobj()
    plain = stream.decompress(data, _MOST_BYTES)
    if not stream.eof:
        raise ValueError(f"it is truncated, or longer than {_MOST_BYTES >> 20} MiB")
    return plain


class _AgreedMeanwhile(Exception):
    """This rank was about to give up, but the lead had already announced that all agree."""


def _failure(text: bytes | str) -> Failure:
    plain = json.loads(text)
    return Failure(plain["code"], plain["message"], tuple(plain["ranks"]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
