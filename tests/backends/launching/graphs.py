"""Sequences as CUDA graphs, on the stub driver: `python -m tests.backends.launching.graphs [NAME ...]`.

A graph of the stub launches what its nodes were given last, so what the driver receives is what plain launches give it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import struct
import sys
import threading
from collections.abc import Iterator
from ctypes import c_int
from typing import Any

import pytest
import torch

from kernelhub.backends.shared.launches import Shared, sequence
from kernelhub.backends.triton.launch import Launcher
from kernelhub.runtime import launch as runtime
from tests.backends.launching.check import latent_decode_of_cuda, on_stub, turned_scales_of_cuda, twice
from tests.backends.launching.stub import ROOM, Memory, OneDevice, Stub, install_launcher, perform

AFTER = 2
MOST_ROOM = 64 << 20  # as in `cuda_types.h`
MOST_BYTES = 256 << 20
MOST_ROOMS = 16
MADE = {
    "cuGraphCreate": 1,
    "cuGraphAddKernelNode_v2": 2,
    "cuGraphInstantiateWithFlags": 1,
    "cuGraphUpload": 1,
    "cuStreamGetPriority": 1,
    "cuStreamGetGreenCtx": 1,
}
LAUNCHED = {"cuGraphLaunch": 1, "cuThreadExchangeStreamCaptureMode": 2}


def two_launches(stub: Stub, after: int = AFTER, **options: Any) -> Any:
    """A sequence from x to memory between, and from there to y; of graphs after so many launches, if not 0."""
    on_stub(stub)
    install_launcher(stub, after)
    tensors = [torch.zeros(64) for _ in range(3)]
    launcher = Launcher(twice, {"SIZE": 64}, 4, **options)
    steps, places = [], [[(0, 0), (1, 0), None], [(1, 0), (2, 0), None]]
    for grid, source in ((3, 0), (5, 1)):
        launcher(grid, (0,), tensors[source], tensors[source + 1], 7)
        steps.append(launcher.step(grid, (0,), tensors[source], tensors[source + 1], 7))
    return sequence(steps, places, 3, [0, 1, 2])


def one_launch(
    stub: Stub, least: int = 2, room: int = 0, install: bool = True, shared: Any = None, **options: Any
) -> Any:
    """A sequence from x to itself, or to memory for temporaries."""
    if install:
        install_launcher(stub, AFTER, least)
    launcher, x = Launcher(twice, {"SIZE": 64}, 4, **options), torch.zeros(64)
    launcher(3, (0,), x, x, 7)
    step = launcher.step(3, (0,), x, x, 7)
    return sequence([step], [[(0, 0), (1 if room else 0, 0), None]], 1, [0], room, shared=shared)


def as_graph(stub: Stub, **options: Any) -> Any:
    """The same, where the next launch makes the graph."""
    made = two_launches(stub, **options)
    for _ in range(AFTER):
        assert made.launch(*some()) is True
    stub.take(), stub.take_graph_calls()
    return made


def some() -> list[int]:
    """Addresses of operands."""
    return [16 * random.randrange(1, 1 << 40) for _ in range(3)]


def received(stub: Stub) -> list[tuple[int, int, int, int]]:
    """Grid, source, destination and stream of each launch since the last time."""
    return [(one.grid[0], *struct.unpack("<QQ", b"".join(one.parameters[:2])), one.stream) for one in stub.take()]


def of(operands: list[int], stream: int = 77) -> list[tuple[int, int, int, int]]:
    """What a call has to launch."""
    x, between, y = operands
    return [(3, x, between, stream), (5, between, y, stream)]


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    before = OneDevice.stream_of
    OneDevice.stream_of = staticmethod(lambda device: number)
    try:
        yield
    finally:
        OneDevice.stream_of = before


def counts() -> dict[str, int]:
    return runtime.graph_counts()


def what_is_updated(stub: Stub) -> None:
    """A graph is made after some launches; later ones give new parameters to the nodes that need them."""
    plain, made = two_launches(stub, 0), two_launches(stub)
    for _ in range(AFTER):
        operands = some()
        stub.take()
        assert made.launch(*operands) is True
        assert received(stub) == of(operands)
        assert not stub.take_graph_calls()
    x, between, y = operands
    for given, updates in (
        ((x, between, y), None),
        ((x, between, y), 0),
        ((x, between, y + 16), 1),
        ((x + 16, between, y + 16), 1),
        ((x + 16, between + 16, y + 16), 2),
        ((x + 16, between + 16, y + 16), 0),
    ):
        stub.take(), stub.take_graph_calls()
        assert plain.launch(*given) is True
        wanted = stub.take()
        assert made.launch(*given) is True
        assert stub.take() == wanted, "every parameter, size and attribute"
        expected = LAUNCHED | (MADE if updates is None else {})
        assert stub.take_graph_calls() == expected | ({"cuGraphExecKernelNodeSetParams_v2": updates} if updates else {})
    for _ in range(1000):
        given = [random.choice((one, one + 64)) for one in (x, between, y)]
        assert made.launch(*given) is True
        assert received(stub) == of(given)
    assert counts()["live"] == counts()["made"] == 1
    assert counts()["launches"] == 1006
    del made
    assert [one.value for one in stub.live_graphs] == [0, 0]
    assert counts()["live"] == 0


def captures(stub: Stub) -> None:
    """Launches that are captured are plain, before there is a graph and after."""
    made = as_graph(stub)
    for _ in range(2):
        stub.capturing.value = 1
        given = some()
        assert made.launch(*given) is True
        assert received(stub) == of(given)
        assert "cuGraphLaunch" not in stub.take_graph_calls()
        stub.capturing.value = 0
        assert made.launch(*given) is True
        assert received(stub) == of(given)
        assert stub.take_graph_calls()["cuGraphLaunch"] == 1
    assert made.launch(*given[:2], given[2] + 8) is False, "an operand off alignment is launched otherwise"
    made.close()
    assert made.launch(*given) is False
    assert not stub.take()


def streams(stub: Stub) -> None:
    """Each stream has its own graph, four at most; one that was not used for long makes room."""
    made = as_graph(stub)
    for stream in (77, 78, 79, 80, 81):
        with on_stream(stream):
            for _ in range(2):
                given = some()
                assert made.launch(*given) is True
                assert received(stub) == of(given, stream)
    assert counts() | {"made": 4, "live": 4, "launches": 8, "evicted": 0} == counts()
    stub.take_graph_calls()
    for _ in range(260):
        made.launch(*given)
    with on_stream(81):
        made.launch(*given)
    assert counts() | {"made": 5, "live": 4, "evicted": 1} == counts()
    assert [one.value for one in stub.live_graphs] == [4, 4]
    stub.stream_generation.value = 1  # all are destroyed, and others get their handles
    assert made.launch(*given) is True
    stub.stream_generation.value = 0
    assert counts()["made"] == 6
    stub.take()


def other_streams(stub: Stub) -> None:
    """Kernels have the priority of the stream; a green context's stream launches plainly."""
    made = as_graph(stub)
    stub.priority.value, given = -3, some()
    made.launch(*given)
    assert [one.attributes for one in stub.take()] == [((8, 2**32 - 3, 0, 0),)] * 2
    stub.priority.value, stub.green_context.value = 0, 5
    stub.take_graph_calls()
    with on_stream(90):
        made.launch(*given)
    assert received(stub) == of(given, 90)
    assert "cuGraphLaunch" not in stub.take_graph_calls()
    stub.green_context.value = 0


def attributes(stub: Stub) -> None:
    """Nodes have the attributes of the launches; one that only launches can have makes them plain."""
    x = torch.zeros(64)
    for option, value in (("num_ctas", 2), ("launch_cooperative_grid", True)):
        plain, made = two_launches(stub, 0, **{option: value}), as_graph(stub, **{option: value})
        given = some()
        plain.launch(*given)
        wanted = stub.take()
        made.launch(*given)
        assert all(one.attributes for one in wanted)
        assert stub.take() == wanted
        assert stub.take_graph_calls()["cuGraphLaunch"] == 1
    del made
    made = as_graph(stub, launch_pdl=True)
    made.launch(*given)
    assert received(stub) == of(given)
    assert not stub.take_graph_calls()
    for word, graphs in ((2, 0), (3, 1)):  # programmatic where captured; the second, `cuda.decode`'s, else a node
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runtime, "CAPTURED_ONLY", word)
            made = as_graph(stub, launch_pdl=True, captured_only=True)
        given = some()
        made.launch(*given)
        assert stub.take_graph_calls().get("cuGraphLaunch", 0) == graphs, word
        launches = stub.take()
        assert [one.attributes for one in launches] == [launches[0].attributes] * 2
        assert not launches[0].attributes
        stub.capturing.value = 1
        made.launch(*given)
        stub.capturing.value = 0
        assert [[ids[0] for ids in one.attributes] for one in stub.take()] == [[6], [6]]
        assert "cuGraphLaunch" not in stub.take_graph_calls()
    for least, graphs in ((2, 0), (1, 7)):
        one = one_launch(stub, least)
        stub.take_graph_calls()
        for _ in range(AFTER + 7):
            one.launch(torch.zeros(64))
        assert stub.take_graph_calls().get("cuGraphLaunch", 0) == graphs, least
    one = one_launch(stub, 1, shared=Shared((), 0, 0, x))
    stub.take_graph_calls()
    for _ in range(AFTER + 7):
        assert one.launch(x) is True
    assert not stub.take_graph_calls(), "one that may wait for other ranks"
    stub.take()


def latent_decode(stub: Stub) -> None:
    """`cuda.decode`'s two launches are a graph with the parameters of plain ones, descriptors included."""
    install_launcher(stub, 1)
    before = counts()["launches"]
    latent_decode_of_cuda(stub)
    assert counts()["launches"] == before + 2
    assert counts()["refused"] == 0


def turned_scales(stub: Stub) -> None:
    """The launch that turns scales of rows for `cuda.fp8_gemm`, and the product, are a graph, too."""
    install_launcher(stub, 1)
    before = counts()["launches"]
    turned_scales_of_cuda(stub)
    assert counts()["launches"] == before + 2
    assert counts()["refused"] == 0


def collectives(stub: Stub) -> None:
    """On request a sequence over memory of all ranks is a graph, too, if no rank is missing and the stream stays."""
    install_launcher(stub, AFTER, 1, shared=True)
    words = torch.zeros(2, dtype=torch.int64)
    words[1] = 77
    missing = words.data_ptr()
    one = one_launch(stub, install=False, shared=Shared((), missing, missing + 8, words))
    for _ in range(AFTER):
        assert one.launch(torch.zeros(64)) is True
    stub.take(), stub.take_graph_calls()
    x = torch.zeros(64)
    for _ in range(3):
        assert one.launch(x) is True
        [(_, source, _, stream)] = received(stub)
        assert (source, stream) == (x.data_ptr(), 77)
    assert stub.take_graph_calls()["cuGraphLaunch"] == 3
    words[0] = 1
    assert one.launch(x) is False, "a rank is missing"
    words[0] = 0
    with on_stream(78):
        assert one.launch(x) is False, "another stream than the last call's"
        words[1] = 78
        for _ in range(2):
            assert one.launch(x) is True
    assert [stream for *_, stream in received(stub)] == [78, 78]
    early = {"launch_pdl": True, "captured_only": True}
    always = early | {"captured_only": False}
    for options, is_shared, graphs in ((early, True, 3), (early, False, 0), (always, True, 0)):
        given = Shared((), missing, missing + 8, words) if is_shared else None
        words[1] = 77
        one = one_launch(stub, install=False, shared=given, **options)
        stub.take_graph_calls()
        for _ in range(AFTER + 3):
            assert one.launch(x) is True
        calls = stub.take_graph_calls()
        assert calls.get("cuGraphLaunch", 0) == graphs, "in a graph of the launcher it begins as any other"
        assert counts()["refused"] == 0
        stub.take()


def rooms(stub: Stub) -> None:
    """The sequences of a stream share memory for temporaries; what is captured, large or of two threads has its own."""
    on_stub(stub)
    install_launcher(stub, AFTER)
    sizes = (256, ROOM + 1, MOST_ROOM - 5, MOST_ROOM, MOST_ROOM + 1)
    made = {size: one_launch(stub, room=size, install=False) for size in sizes}
    x = torch.zeros(64)

    def memory_of(size: int, stream: int = 77) -> int:
        stub.take()
        with on_stream(stream):
            assert made[size].launch(x) is True
        (noted,) = stub.take()
        return int.from_bytes(noted.parameters[1], "little")

    assert not Memory.rooms
    first = memory_of(256)
    assert {address: (memory.numel(), stream) for address, (memory, stream) in Memory.rooms.items()} == {
        first: (ROOM, 77)
    }
    assert memory_of(256) == first
    assert memory_of(256, 78) != first
    OneDevice.current = 1
    other = one_launch(stub, room=256, install=False)
    stub.take()
    with on_stream(77):
        assert other.launch(x) is True
    assert int.from_bytes(stub.take()[0].parameters[1], "little") != first, "a device has memory of its own"
    OneDevice.current = 0
    larger = memory_of(ROOM + 1)
    assert larger == memory_of(256)
    assert first not in Memory.rooms, "it was given back"
    assert memory_of(256, 78) == memory_of(256, 78)
    held = set(Memory.rooms)
    for size, capturing in ((256, 1), (MOST_ROOM + 1, 0)):
        stub.capturing.value = capturing
        assert memory_of(size) not in held
        stub.capturing.value = 0
    assert not Memory.live
    seen: set[int] = set()

    def nested(size: int, stream: int) -> int:  # another thread, while the room is being made
        Memory.allocating = None
        seen.add(memory_of(256, 90))
        return Memory.allocate(size, stream)

    Memory.allocating = nested
    room = memory_of(256, 90)
    assert room not in seen
    assert len(seen) == 1
    assert memory_of(256, 90) == room
    for stream in range(100, 140):
        memory_of(256, stream)
    assert len(Memory.rooms) == MOST_ROOMS
    assert not Memory.live
    for stream in (77, 78, 90, 100):
        memory_of(MOST_ROOM - 5, stream)
    held = sum(memory.numel() for memory, _ in Memory.rooms.values())
    assert MOST_BYTES - MOST_ROOM < held <= MOST_BYTES, "one of them would be too much"
    assert memory_of(MOST_ROOM, 77) == memory_of(256, 77)
    Memory.rooms.clear()


def rooms_of_graphs(stub: Stub) -> None:
    """Before a graph is captured, a stream keeps no memory of its pool: calls have their own."""
    on_stub(stub)
    pooled = True

    def keep(size: int, stream: int) -> int | None:
        return None if pooled else Memory.allocate(size, stream)

    install_launcher(stub, AFTER, keep=keep)
    small, large = (one_launch(stub, room=size, install=False) for size in (256, ROOM + 1))

    def memory_of(made: Any) -> int:
        stub.take()
        assert made.launch(torch.zeros(64)) is True
        (noted,) = stub.take()
        return int.from_bytes(noted.parameters[1], "little")

    for _ in range(3):
        memory_of(small)
        assert not Memory.rooms
        assert not Memory.live
    pooled = False
    kept = memory_of(small)
    assert list(Memory.rooms) == [kept]
    pooled = True
    assert memory_of(small) == kept
    assert memory_of(large) != kept
    assert memory_of(small) == kept, "a larger one that was refused leaves it"
    pooled = False
    assert memory_of(large) == memory_of(small) != kept
    Memory.rooms.clear()


def failures(stub: Stub) -> None:
    """What the driver refuses is launched plainly from then on, once per call, and counted; graphs are freed."""
    making = [name for name in MADE if name != "cuStreamGetGreenCtx"]
    for function in (*making, "cuGraphExecKernelNodeSetParams_v2"):
        made = as_graph(stub)
        if function not in making:
            made.launch(*some())
        stub.take(), stub.take_graph_calls()
        stub.fail_graph(function, 2)
        for _ in range(3):
            given = some()
            assert made.launch(*given) is True
            assert received(stub) == of(given), function
        assert "cuGraphLaunch" not in stub.take_graph_calls()
        assert counts() | {"refused": 1, "status": 2, "live": 0} == counts()
        assert [one.value for one in stub.live_graphs] == [0, 0]
    for function in ("cuStreamGetId", "cuStreamGetGreenCtx", "cuThreadExchangeStreamCaptureMode", *making):
        made = as_graph(stub)
        stub.fail_graph(function, 201)  # the thread has no context yet
        for launched in (0, 1):
            given = some()
            assert made.launch(*given) is True
            assert received(stub) == of(given), function
            assert stub.take_graph_calls().get("cuGraphLaunch", 0) == launched, function
        assert counts()["refused"] == 0
    made = as_graph(stub)
    made.launch(*some())
    stub.take()
    stub.fail_graph("cuGraphLaunch", 700)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS, 700.* twice"):
        made.launch(*some())
    assert not stub.take(), "nothing is launched a second time"
    assert counts() | {"refused": 1, "status": 700, "live": 0} == counts()


def threads(stub: Stub) -> None:
    """A graph is one thread's at a time, and has the parameters of one call."""
    made = as_graph(stub)
    overlaps, torn = (c_int.in_dll(stub.library, name) for name in ("num_overlaps", "num_torn"))

    def work() -> None:
        for _ in range(2000):
            assert made.launch(*some()) is True

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (overlaps.value, torn.value) == (0, 0)
    assert counts()["made"] == 1
    assert counts()["launches"] > 1000
    stub.take()


def forks(stub: Stub) -> None:
    """A child does not touch the graphs of its parent."""
    made = as_graph(stub)
    made.launch(*some())
    stub.take(), stub.take_graph_calls()
    child = os.fork()
    if child == 0:
        given = some()
        right = made.launch(*given) is True and received(stub) == of(given)
        del made
        os._exit(0 if right and not stub.take_graph_calls() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made.launch(*some())
    assert stub.take_graph_calls()["cuGraphLaunch"] == 1
    stub.take()


def bounds(stub: Stub) -> None:
    """A process has graphs of 2048 kernels at most; other sequences launch plainly until some are gone."""
    first = as_graph(stub)
    step = [[(0, 0), (1, 0), None], [(1, 0), (2, 0), None]]
    launcher, x = Launcher(twice, {"SIZE": 64}, 4), torch.zeros(64)
    launcher(3, (0,), x, x, 7)
    steps = [launcher.step(grid, (0,), x, x, 7) for grid in (3, 5)]
    stub.take()
    many = [first, *(sequence(steps, step, 3, [0]) for _ in range(260))]
    for stream in range(80, 84):
        with on_stream(stream):
            for made in many:
                for _ in range(AFTER + 1):
                    given = some()
                    made.launch(*given)
                    assert received(stub) == of(given, stream)
    assert counts()["live"] == counts()["made"] == 1024
    assert counts()["nodes"] == 2048
    del many, made, first
    gc.collect()
    assert counts()["live"] == counts()["nodes"] == 0
    assert [one.value for one in stub.live_graphs] == [0, 0]


SCENARIOS = (
    what_is_updated,
    captures,
    streams,
    other_streams,
    attributes,
    collectives,
    rooms,
    rooms_of_graphs,
    failures,
    threads,
    forks,
    bounds,
    latent_decode,
    turned_scales,
)


def main(names: list[str]) -> None:
    perform(SCENARIOS, names)


if __name__ == "__main__":
    main(sys.argv[1:])
