"""Runs warp-specialised Gluon kernels for Hopper on a CPU, one partition a thread and one thread at a time.

What is asynchronous on the device happens here at any time between its issue and its wait: a seed chooses, and makes
some parts much slower than others, so that a race shows as a wrong result under some seed. Raised besides are
deadlocks, arrivals that nobody awaits, accesses outside a tensor's memory, and shared memory that was written by
threads and is then read by a product or a TMA store with no fence between. Shared memory begins as NaN.

Numbers have 32 bits unless a kernel widens them. Not shown: layouts, bank conflicts, registers, speed.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernelhub.backends.gluon import language
from kernelhub.backends.gluon.language import TensorDescriptor

_COPIERS = 128  # threads of a partition that copies rows, each of which arrives
_SLOWNESS = (1, 1, 0.02, 0.0005)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class EmulationError(Exception):
    """The kernel does what is undefined, or hangs, on a device."""


def run(
    kernel: Any, grid: tuple[int, ...] | int, arguments: Iterable[Any], static: dict[str, Any], seed: int = 0
) -> None:
    """Run every program of the grid, one after the other.

    Args:
        kernel: a function jitted by Gluon.
        grid: up to three sizes.
        arguments: what a launch takes, in order: tensors on the CPU, descriptors of such, numbers, None.
        static: the constexpr arguments by name.
        seed: chooses the interleaving.
    """
    sizes = ((grid,) if isinstance(grid, int) else tuple(grid)) + (1, 1)
    made = [_argument(value) for value in arguments]
    for z in range(sizes[2]):
        for y in range(sizes[1]):
            for x in range(sizes[0]):
                _Program((x, y, z), sizes[:3], f"{seed} {x} {y} {z}").run(kernel, made, static)


class Values(np.ndarray):
    """Registers: float32, integers or bool. Numbers are of no dimension."""

    def __array_wrap__(self, made: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(made).view(Values)

    def to(self, dtype: Any, bitcast: bool = False) -> Values:
        return _converted(self, dtype, bitcast)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(np.asarray(self)[key]).view(Values)

    # Registers are values: what a function adds to its argument is not added to its caller's.
    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def values(x: Any) -> Values:
    """As registers."""
    return np.asarray(x).view(Values)


def _number(x: int) -> Values:
    """A number of 32 bits, or of 64 if it needs them, as Triton types arguments."""
    return values(np.int32(x) if -(1 << 31) <= x < 1 << 31 else np.int64(x))


def _range(*limits: Any) -> Iterator[Values]:
    return (_number(at) for at in range(*map(int, limits)))


class Pointer:
    """Addresses within the memory of a tensor, in elements from the tensor's first one."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, np.add(self.at, offset))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, np.asarray(self.at)[key])

    def _places(self, mask: Any) -> tuple[Any, Any]:
        at, kept = np.broadcast_arrays(np.asarray(self.at), np.asarray(True if mask is None else mask))
        place = at.astype(np.int64) + self.tensor.storage_offset()
        size = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize
        outside = kept & ((place < 0) | (place >= size))
        if outside.any():
            raise EmulationError(f"{int(outside.sum())} accesses outside a tensor of shape {list(self.tensor.shape)}")
        return torch.from_numpy(np.where(kept, place, 0)), kept

    def load(self, mask: Any = None, other: Any = 0) -> Values:
        place, kept = self._places(mask)
        taken = _memory(self.tensor)[place.reshape(-1)]
        found = _plain(taken.view(self.tensor.dtype) if self.tensor.dtype in _FP8 else taken).reshape(place.shape)
        return values(np.where(kept, found, np.asarray(other, found.dtype)) if mask is not None else found)

    def store(self, given: Any, mask: Any = None) -> None:
        place, kept = self._places(mask)
        filled = np.broadcast_to(np.asarray(given), kept.shape)
        places = place.numpy()[kept]
        _memory(self.tensor)[torch.from_numpy(places)] = _encoded(filled[kept], self.tensor.dtype)

    def add(self, given: Any) -> Values:
        """Of a number: what was there before."""
        found = self.load()
        self.store(found + given)
        return found


class Descriptor:
    """A host descriptor: what TMA reads and writes, with the checks of the driver."""

    def __init__(self, host: Any) -> None:
        base, size = host.base, host.base.itemsize
        if any(stride * size % 16 or stride <= 0 for stride in host.strides[:-1]) or base.data_ptr() & 15:
            raise EmulationError(f"no descriptor can be made of strides {host.strides} at {base.data_ptr():#x}")
        last = base.storage_offset() + sum((n - 1) * s for n, s in zip(host.shape, host.strides, strict=True))
        if last >= base.untyped_storage().nbytes() // size:
            raise EmulationError(f"a descriptor of shape {host.shape} reaches beyond its tensor")
        raw = torch.uint8 if base.dtype in _FP8 else base.dtype
        self._real, self._raw = base.dtype, _memory(base)
        self._view = self._raw.view(raw).as_strided(host.shape, host.strides, base.storage_offset())
        whole = -(-host.shape[-1] * size // 16) * 16 // size  # TMA stores pieces of 16 bytes
        room = base.untyped_storage().nbytes() // size - last > whole - host.shape[-1]
        wide = (*host.shape[:-1], whole if room else host.shape[-1])
        self._written = self._raw.view(raw).as_strided(wide, host.strides, base.storage_offset())
        self.block, self.dtype, self.layout, self.shape = list(host.block_shape), base.dtype, host.layout, host.shape
        nbytes = int(np.prod(self.block)) * size
        self.block_type = types.SimpleNamespace(nbytes=nbytes, shape=self.block)
        self.nbytes_per_cta = nbytes

    def _parts(self, at: Any, view: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor and of the block: the box at these coordinates as far as it lies inside."""
        inside, within = [], []
        for begin, width, size in zip((int(x) for x in at), self.block, view.shape, strict=True):
            low, high = max(begin, 0), max(max(begin, 0), min(begin + width, size))
            inside.append(slice(low, high))
            within.append(slice(low - begin, high - begin))
        return tuple(inside), tuple(within)

    def read(self, at: Any) -> np.ndarray:
        inside, within = self._parts(at, self._view)
        block = np.zeros(self.block, np.float32)
        block[within] = _plain(self._view[inside].contiguous().view(self._real)).reshape(block[within].shape)
        return block

    def write(self, at: Any, block: np.ndarray) -> None:
        inside, within = self._parts(at, self._written)
        piece = _encoded(block[within], self._real)
        self._written[inside] = piece.view(self._view.dtype).reshape(self._written[inside].shape)


class Shared:
    """Shared memory. `dirty` are elements that threads wrote and no fence has published to TMA and wgmma."""

    def __init__(self, data: Any, dirty: Any, dtype: Any) -> None:
        self.data, self.dirty, self.dtype = data, dirty, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, at: Any) -> Any:
        at = int(at)
        if not 0 <= at < len(self.data):
            raise EmulationError(f"buffer {at} of {len(self.data)}")
        if self.data.dtype == object:
            return self.data[at].flat[0] if isinstance(self.data[at], np.ndarray) else self.data[at]
        return Shared(self.data[at], self.dirty[at], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if start + length > self.data.shape[dim]:
            raise EmulationError(f"rows {start} to {start + length} of {self.data.shape[dim]}")
        at = (slice(None),) * dim + (slice(start, start + length),)
        return Shared(self.data[at], self.dirty[at], self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.transpose(order), self.dirty.transpose(order), self.dtype)

    layout = None

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Any:
        """The same memory with elements of another dtype of the same size, which a store has to come before.

        As int32: tiles of 64 columns, of pairs.
        """
        if str(dtype) == "int32":
            return _Words(self, list(shape))
        assert tuple(shape) == self.shape
        return Shared(self.data, self.dirty, dtype)

    reinterpret = _reinterpret

    def load(self, layout: Any = None) -> Values:
        return values(self.data.copy())

    def store(self, given: Any) -> None:
        self.data[...] = np.asarray(given)
        self.dirty[...] = 1

    def check(self) -> None:
        if self.dirty.any():
            raise EmulationError("shared memory written by threads is read asynchronously with no fence between")


class _Words:
    """Tiles of 64 columns of float16, to be written as words of two."""

    def __init__(self, memory: Shared, shape: list[int]) -> None:
        self._memory, self._across = memory, memory.shape[-1] // 64
        assert shape == [self._across * len(memory.data), memory.shape[-2], 32], shape
        assert str(memory.dtype) in ("fp16", "torch.float16"), memory.dtype

    def index(self, at: Any) -> Any:
        at = int(at)
        tile = self._memory.index(at // self._across).slice(at % self._across * 64, 64, dim=1)

        def store(given: Any) -> None:
            words = np.ascontiguousarray(np.asarray(given), np.int32)
            tile.store(words.view(np.float16).reshape(tile.shape).astype(np.float32))

        return types.SimpleNamespace(store=store)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        self.settle()

    def settle(self) -> None:
        if self.pending < 0:
            raise EmulationError("more arrivals than the barrier counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Product:
    """A product in flight: it reads shared memory when it runs, not when it is issued."""

    def __init__(self, part: _Part, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.part, self.a, self.b, self.acc, self.use_acc, self.value = part, a, b, acc, use_acc, None

    def run(self) -> None:
        sides = []
        for side in (self.a, self.b):
            if isinstance(side, Shared):
                side.check()
            sides.append(np.asarray(side.data if isinstance(side, Shared) else side, np.float32))
        with np.errstate(invalid="ignore", over="ignore"):
            product = sides[0] @ sides[1]
            if self.use_acc:
                product = product + np.asarray(self.acc.value if isinstance(self.acc, Product) else self.acc)
        self.value = values(product)


class _Part:
    """A partition of the warps: a thread that runs only when it is told to."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.done, self.error, self.blocked, self.where = False, None, None, "the start"
        self.queue: list[Product] = []
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

        def start() -> None:
            self._go.acquire()
            try:
                body()
            except BaseException as error:  # handed to the scheduler, which raises it
                self.error = error
            self.done = True
            self._back.release()

        self.thread = threading.Thread(target=start, daemon=True)

    def resume(self) -> None:
        self.blocked = None
        self._go.release()
        self._back.acquire()

    def pause(self, until: Callable[[], bool] | None = None, where: str = "") -> None:
        self.blocked, self.where = until, where
        self._back.release()
        self._go.acquire()

    def execute(self) -> None:
        self.queue.pop(0).run()


class _Copy:
    """A copy in flight, by TMA or by cp.async."""

    def __init__(self, act: Callable[[], None], owner: _Part | None, kind: str) -> None:
        self.act, self.owner, self.kind = act, owner, kind


class _Program:
    """One program: its partitions, its copies in flight, its shared memory, and the functions that it calls."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], seed: str) -> None:
        self._place, self._grid, self._random = place, grid, random.Random(seed)
        self._parts: list[_Part] = []
        self._current: _Part | None = None
        self._copies: list[_Copy] = []
        self._shared: list[Shared] = []
        self._weights: dict[Any, float] = {}
        self._replaced = self._functions()
        self._modules: dict[str, dict[str, Any]] = {}

    def run(self, kernel: Any, arguments: list[Any], static: dict[str, Any]) -> None:
        self._function(kernel)(*arguments, **static)

    def _function(self, jitted: Any) -> Any:
        """A jitted function as Python, whose names are those of its module with what runs here in their place."""
        plain = jitted.fn
        names = self._modules.get(plain.__module__)
        if names is None:
            names = self._modules[plain.__module__] = dict(vars(sys.modules[plain.__module__]))
            for name, value in list(names.items()):
                names[name] = self._replacement(value)
            names["range"] = _range
        return types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)

    def _replacement(self, value: Any) -> Any:
        if isinstance(value, JITFunction) and id(value) not in self._replaced:
            made: list[Any] = []

            def call(*arguments: Any, **named: Any) -> Any:
                if not made:
                    made.append(self._function(value))
                return made[0](*arguments, **named)

            return call
        if type(value).__name__ == "constexpr":
            return value.value
        return self._replaced.get(id(value), value)

    # Scheduling.

    def _specialise(self, functions: Any, _warps: Any, _registers: Any) -> None:
        self._parts = [_Part(lambda f=f, a=a: f(*a)) for f, a in functions]
        for part in self._parts:
            part.thread.start()
        while any(not part.done for part in self._parts):
            ready: list[Any] = [p for p in self._parts if not p.done and (p.blocked is None or p.blocked())]
            ready += [part.queue[0] for part in self._parts if part.queue]
            ready += self._copies
            if not ready:
                stuck = ", ".join(f"partition {at} at {p.where}" for at, p in enumerate(self._parts) if not p.done)
                raise EmulationError(f"deadlock: {stuck}")
            chosen = self._random.choices(ready, [self._weight(one) for one in ready])[0]
            if isinstance(chosen, _Part):
                self._current = chosen
                chosen.resume()
                if chosen.error:
                    raise chosen.error
            elif isinstance(chosen, Product):
                chosen.part.execute()
            else:
                self._copies.remove(chosen)
                chosen.act()
        for part in self._parts:
            if part.queue:
                raise EmulationError("a product is in flight at the end of a partition")
        if any(copy.kind == "store" for copy in self._copies):
            raise EmulationError("a store is in flight at the end of the program")
        self._current = None
        for copy in list(self._copies):
            copy.act()

    def _weight(self, one: Any) -> float:
        key = one if isinstance(one, _Part) else one.part if isinstance(one, Product) else one.kind
        key = ("product", key) if isinstance(one, Product) else key
        if key not in self._weights:
            self._weights[key] = self._random.choice(_SLOWNESS)
        return self._weights[key]

    def _maybe_pause(self) -> None:
        if self._current is not None and self._random.random() < 0.3:
            self._current.pause()

    # What kernels call.

    def _allocate(self, dtype: Any, shape: Any, layout: Any = None) -> Any:
        if "int64" in str(dtype):
            barriers = np.empty(shape, object)
            for at in np.ndindex(*shape):
                barriers[at] = Barrier()
            return Shared(barriers, np.zeros(shape), dtype) if len(shape) > 1 else barriers.flat[0]
        kind = np.int64 if _whole(dtype) else np.float32
        poison = -(1 << 40) if kind is np.int64 else np.nan
        made = Shared(np.full(shape, poison, kind), np.zeros(shape, np.uint8), dtype)
        self._shared.append(made)
        return made

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _wait(self, barrier: Barrier, phase: Any, pred: bool = True, deps: Any = ()) -> None:
        self._maybe_pause()
        phase = int(phase) & 1
        if pred and barrier.phase == phase:
            self._pause_until(lambda: barrier.phase != phase, f"a wait for phase {phase}")

    def _pause_until(self, ready: Callable[[], bool], where: str) -> None:
        if self._current is None:
            raise EmulationError(f"deadlock at {where}")
        self._current.pause(ready, where)

    def _arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.arrive(count)
        self._maybe_pause()

    def _expect(self, barrier: Barrier, nbytes: int = 0, pred: bool = True) -> None:
        if pred:
            barrier.bytes += nbytes
            barrier.arrive(1)

    def _load(self, desc: Descriptor, at: Any, barrier: Barrier, into: Shared, pred: bool = True) -> None:
        if not pred:
            return
        at = [int(x) for x in at]
        if into.shape != tuple(desc.block):
            raise EmulationError(f"a block of {desc.block} is loaded into {into.shape}")

        def act() -> None:
            into.data[...] = desc.read(at)
            into.dirty[...] = 0
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        self._issue(act, "load")

    def _store(self, desc: Descriptor, at: Any, source: Shared) -> None:
        at = [int(x) for x in at]
        if source.shape != tuple(desc.block):
            raise EmulationError(f"a block of {desc.block} is stored from {source.shape}")

        def act() -> None:
            source.check()
            desc.write(at, source.data)

        self._issue(act, "store")

    def _issue(self, act: Callable[[], None], kind: str) -> None:
        if self._current is None:
            act()
            return
        self._copies.append(_Copy(act, self._current, kind))
        self._maybe_pause()

    def _store_wait(self, pending: int) -> None:
        me = self._current

        def mine() -> int:
            return sum(copy.owner is me and copy.kind == "store" for copy in self._copies)

        if mine() > pending:
            self._pause_until(lambda: mine() <= pending, "a wait for stores")

    def _copy_rows(self, into: Shared, pointer: Pointer, mask: Any = None, **_options: Any) -> None:
        taken = pointer.load(mask, 0) if mask is not None else pointer.load()

        def act() -> None:
            into.data[...] = taken
            into.dirty[...] = 1

        self._issue(act, "copy")

    def _copy_arrive(self, barrier: Barrier, increment_count: bool = True) -> None:
        mine = [copy for copy in self._copies if copy.owner is self._current and copy.kind == "copy"]

        def act() -> None:
            for copy in mine:
                if copy in self._copies:
                    self._copies.remove(copy)
                    copy.act()
            barrier.arrive(_COPIERS)

        self._issue(act, "copies' arrival")

    def _fence(self, *_: Any, **__: Any) -> None:
        for shared in self._shared:
            shared.dirty[...] = 0

    def _multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False, **_: Any) -> Any:
        a = a.copy() if isinstance(a, np.ndarray) else a
        product = Product(self._current, a, b, acc if isinstance(acc, Product) else acc.copy(), use_acc)
        self._current.queue.append(product)
        self._maybe_pause()
        if not is_async:
            return self._multiply_wait(0, (product,))
        return product

    def _multiply_wait(self, pending: int, deps: Any = ()) -> Any:
        while len(self._current.queue) > pending:
            self._current.execute()
        out = tuple(d.value if isinstance(d, Product) and d.value is not None else d for d in deps)
        return out[0] if len(out) == 1 else out

    def _functions(self) -> dict[int, Any]:
        """By identity of what a kernel's module imports: what runs here in its place."""
        gl = types.SimpleNamespace(
            **{name: getattr(language.gl, name) for name in _DTYPES},
            **_ELEMENTWISE,
            load=lambda pointer, mask=None, other=0, **_: pointer.load(mask, other),
            store=lambda pointer, given, mask=None, **_: pointer.store(given, mask),
            atomic_add=lambda pointer, given, **_: pointer.add(given),
            program_id=lambda axis: _number(self._place[axis]),
            num_programs=lambda axis: _number(self._grid[axis]),
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialise,
        )
        barrier = types.SimpleNamespace(
            init=self._init,
            wait=self._wait,
            arrive=self._arrive,
            expect=self._expect,
            MBarrierLayout=lambda: None,
        )
        pairs = (
            (language.gl, gl),
            (language.mbarrier, barrier),
            (language.tma, types.SimpleNamespace(store_wait=self._store_wait)),
            (language.tma_load, self._load),
            (language.tma_store, self._store),
            (language.copy_rows, self._copy_rows),
            (language.copy_arrive, self._copy_arrive),
            (language.fence_async_shared, self._fence),
            (language.halves_of_float8, _halves_of_float8),
            (language.bring_to_cache, _bring_to_cache),
            (language.quick_exp2, _quietly(np.exp2)),
            (language.quick_reciprocal, _quietly(np.reciprocal)),
            (language.rounded_to, lambda x, dtype: _converted(_converted(x, dtype), torch.float32)),
            (language.masked_after, lambda x, key, last: _where(key <= last, x, -np.inf)),
            (language.masked_outside, lambda x, key, first, last: _where((key >= first) & (key <= last), x, -np.inf)),
            (language.softmax_is_done, lambda sums: None),
            (language.warpgroup_mma, self._multiply),
            (language.warpgroup_mma_wait, self._multiply_wait),
        )
        return {id(real): ours for real, ours in pairs}


def _halves_of_float8(words: Any) -> tuple[Values, Values]:
    """Words of two float16 each, of the first two e4m3 of words and of the last two."""
    codes = torch.from_numpy(np.ascontiguousarray(np.asarray(words), np.int32)).view(torch.float8_e4m3fn)
    halves = codes.half().numpy().view(np.int32).reshape(*np.shape(words), 2)
    return values(halves[..., 0]), values(halves[..., 1])


def _bring_to_cache(addresses: Pointer, wanted: Any) -> None:
    """Checks that what is brought is memory of the tensor."""
    addresses.load(np.asarray(wanted) != 0)


def _argument(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, Tensor):
        return Pointer(value)
    return _number(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _memory(tensor: Tensor) -> Tensor:
    """All elements of the tensor's storage, of its dtype; bytes for those that torch cannot index."""
    raw = torch.uint8 if tensor.itemsize == 1 else tensor.dtype
    flat = torch.empty(0, dtype=raw)
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat.set_(tensor.untyped_storage(), 0, (size,))
    return flat if raw is tensor.dtype else flat.view(tensor.dtype) if tensor.dtype not in _FP8 else flat.view(raw)


def _plain(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _encoded(given: Any, dtype: torch.dtype) -> Tensor:
    """Numbers in a dtype, rounded as a device does: float8 saturates."""
    tensor = torch.from_numpy(np.ascontiguousarray(given))
    if dtype in _FP8:
        largest = torch.finfo(dtype).max
        return tensor.float().clamp(-largest, largest).to(dtype).view(torch.uint8)
    return tensor.to(dtype)


def _whole(dtype: Any) -> bool:
    return "int" in str(dtype) and "float" not in str(dtype)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else _OF_GLUON[str(dtype)]


def _converted(x: Any, dtype: Any, bitcast: bool = False) -> Values:
    to = _torch_dtype(dtype)
    if bitcast:
        return values(
            np.asarray(x).astype(np.int32).view(np.float32) if to is torch.float32 else np.asarray(x).view(np.int32)
        )
    source = torch.from_numpy(np.ascontiguousarray(np.asarray(x)))
    if to in _FP8:
        return values(_encoded(source.numpy(), to).view(to).float().numpy())
    made = source.to(to)
    return values(_plain(made).reshape(np.shape(x)))


_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8e4nv": torch.float8_e4m3fn,
    "float8e5": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "int1": torch.bool,
}
_OF_GLUON = {str(getattr(language.gl, name)): dtype for name, dtype in _DTYPES.items()}


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **_options: Any) -> Values:
        with np.errstate(all="ignore"):
            made = function(*arguments)
        if any(isinstance(one, np.ndarray) for one in arguments):
            return values(made)
        return values(np.float32(made)) if isinstance(made, float) else _number(int(made))

    return call


def _where(condition: Any, x: Any, y: Any) -> Values:
    return values(np.where(condition, *(np.float32(one) if isinstance(one, float) else one for one in (x, y))))


_ELEMENTWISE: dict[str, Any] = {
    "zeros": lambda shape, dtype=None, layout=None: values(np.zeros(shape, np.int32 if _whole(dtype) else np.float32)),
    "full": lambda shape, value, dtype=None, layout=None: values(
        np.full(shape, value, np.int32 if _whole(dtype) else np.float32)
    ),
    "arange": lambda begin, end, layout=None: values(np.arange(begin, end, dtype=np.int32)),
    "cdiv": lambda a, b: -(-a // b),
    "minimum": _quietly(np.minimum),
    "maximum": _quietly(np.maximum),
    "exp2": _quietly(np.exp2),
    "log2": _quietly(np.log2),
    "abs": _quietly(np.abs),
    "div_rn": _quietly(np.divide),
    "fma": _quietly(lambda x, y, z: (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32)),
    "erf": lambda x: values(torch.erf(torch.from_numpy(np.asarray(x, np.float32))).numpy()),
    "zeros_like": lambda x, *_: values(np.zeros_like(np.asarray(x))),
    "associative_scan": lambda x, axis, combine: values(np.cumsum(np.asarray(x), axis)),
    "max": lambda x, axis=None, **_: values(np.max(x, axis)),
    "sum": lambda x, axis=None, **_: values(np.sum(x, axis, dtype=np.asarray(x).dtype)),
    "where": _where,
    "convert_layout": lambda x, layout, **_: x,
    "join": lambda x, y: values(np.stack([np.asarray(x), np.asarray(y)], -1)),
    "expand_dims": lambda x, axis: values(np.expand_dims(x, axis)),
    "static_range": range,
    "static_assert": lambda *_: None,
    "constexpr": None,
    "BlockedLayout": lambda *a, **_: None,
    "SliceLayout": lambda *a, **_: None,
    "NVMMADistributedLayout": lambda **_: None,
    "DotOperandLayout": lambda **_: None,
    "DistributedLinearLayout": lambda *a, **_: None,
    "SwizzledSharedLayout": lambda *a, **_: None,
    "NVMMASharedLayout": types.SimpleNamespace(get_default_for=lambda *a, **_: None),
}
