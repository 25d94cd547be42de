"""Whole calls that the extension makes, on the stub driver: `python -m tests.backends.launching.whole [NAME ...]`."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import itertools
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument, RanksDisagree
from kernelhub.ops.comm.preparing import CollectivePlan
from kernelhub.ops.comm.problem import BUCKETS
from kernelhub.ops.comm.topology import GroupFacts
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.runtime import launch as runtime
from tests.backends.launching.check import (
    WHOLE,
    _collectives,
    _groups_of_two,
    _Workspaces,
    believed_on_gpu,
    counted,
    on_stub,
)
from tests.backends.launching.stub import OneDevice, Stub, addresses_of, install_launcher, perform

E4M3 = torch.float8_e4m3fn


def arguments(op: Any, **given: Any) -> list[Any]:
    """All arguments of a call, as its function asks for it."""
    bound = inspect.signature(op).bind(**given)
    bound.apply_defaults()
    return [bound.arguments[name] for name in op.op.parameters]


def quantised(tokens: int = 4, width: int = 512, fresh: bool = False, **more: Any) -> dict[str, Any]:
    """A call of `quantize_fp8`."""
    given = {"x": torch.zeros(tokens, width, dtype=torch.bfloat16), "backend": "triton", **more}
    if not fresh:
        given |= {"out": torch.zeros(tokens, width).to(E4M3), "out_scale": torch.zeros(tokens, 1)}
    return given


@contextmanager
def quantising(stub: Stub) -> Iterator[Callable[..., Any]]:
    """`quantize_fp8` with a kernel of the stub; gives `again` of a call, by its keywords."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    op = kernelhub.quantize_fp8
    with believed_on_gpu(op.op):
        adapter = type(op.prepare(quantised()["x"], backend="triton").adapter)
        with counted(adapter):
            op.op._forget()
            yield lambda **given: op.op.again(*arguments(op, **given))


def learned(given: dict[str, Any], op: Any = kernelhub.quantize_fp8) -> None:
    for _ in range(WHOLE):
        op(**given)


def pointers(stub: Stub) -> set[int]:
    return {struct.unpack("<Q", value)[0] for one in stub.take() for value in one.parameters}


def assert_apart(tensors: Iterable[torch.Tensor], inference: bool = False) -> None:
    """No two share a byte, and each is a tensor like one of its own, perhaps one of inference mode."""
    spans = []
    for one in tensors:
        assert not one._is_view()
        assert not one.requires_grad
        assert inference or not one.is_inference()
        begin = one.data_ptr()
        last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
        spans.append((begin, begin + (last + 1) * one.element_size()))
        assert begin % 16 == 0
    spans.sort()
    for before, after in itertools.pairwise(spans):
        assert before[1] <= after[0], (before, after)


def values(stub: Stub) -> None:
    """A call is made only if all its values are those of one before."""
    with quantising(stub) as again:
        good = quantised()
        assert again(**good) is None
        learned(good)
        stub.take()
        like = quantised()
        assert again(**like) == (like["out"], like["out_scale"])
        assert {like[name].data_ptr() for name in ("x", "out", "out_scale")} <= pointers(stub)
        for other in (
            {"granularity": "tensor"},
            {"group_size": 64},
            {"group_size": 128.0},
            {"ue8m0": True},
            {"ue8m0": 0},
            {"scale_dtype": torch.float8_e8m0fnu},
            {"backend": "triton.rows"},
            {"backend": ("triton",)},
            {"backend": ["triton"]},
            {"backend": None},
            {"scale": torch.zeros(4, 1)},
            {"x": good["x"][:3]},
            {"x": good["x"].float()},
            {"x": good["x"].tolist()},
            {"x": [good["x"]]},
            {"x": good["x"].t()},
            {"x": torch.nested.nested_tensor([good["x"]])},
            {"out": None},
            {"out": good["x"]},
            {"out_scale": good["x"]},
        ):
            assert again(**(good | other)) is None, other
        assert not stub.take()
        spelled = "".join(["trit", "on"])
        assert again(**(good | {"backend": spelled, "group_size": int("128")})) is not None, "equal, not the same"


def contexts(stub: Stub) -> None:
    """Inside a `use` block, and of a thread that is in one, nothing is made before the function decides."""
    with quantising(stub) as again:
        good = quantised()
        learned(good)
        with kernelhub.use(disable="flashinfer"):
            assert again(**good) is None
            learned(good)
            assert again(**good) is None
        assert again(**good) is not None
        HUB.forget_selections()
        assert again(**good) is None, "settings may have changed"
        learned(good)
        assert again(**good) is not None


def counts(stub: Stub) -> None:
    """Each call is counted where the report finds it."""
    with quantising(stub) as again:
        good = quantised()
        learned(good)
        [bound] = [bound for _, bound in kernelhub.quantize_fp8.op._requests() if bound.calls]
        before = bound.calls
        for _ in range(10):
            assert again(**good) is not None
        assert bound.calls == before + 10


def layers(stub: Stub) -> None:
    """Calls of several layers take turns; more kinds than are kept, or in another order, are right, too."""
    with quantising(stub) as again:
        kinds = [
            quantised(tokens, width, fresh) for tokens, width, fresh in itertools.product((1, 4), (128, 512), (0, 1))
        ]
        for _ in range(WHOLE):
            for given in kinds:
                kernelhub.quantize_fp8(**given)
        stub.take()
        for order in (kinds, kinds[::-1], kinds[::3]):
            for given in order * 2:
                codes, scales = again(**given)
                assert (codes.shape, scales.shape) == (given["x"].shape, (len(given["x"]), 1))
                assert {given["x"].data_ptr(), codes.data_ptr(), scales.data_ptr()} <= pointers(stub)
        many = [quantised(1 + at, 128, True) for at in range(100)]
        for given in [*many, *many]:
            learned(given)
            assert again(**given) is not None
        assert again(**many[0]) is None, "64 are kept"
        assert again(**many[-1]) is not None


def results(stub: Stub) -> None:
    """Results that a call makes are new in each call."""
    with quantising(stub) as again:
        good = quantised(fresh=True)
        learned(good)
        made = [again(**good) for _ in range(5)]
        addresses = {one.data_ptr() for pair in made for one in pair}
        assert len(addresses) == 10
        assert {(pair[0].dtype, pair[1].dtype) for pair in made} == {(E4M3, torch.float32)}


def kept_results(stub: Stub) -> None:
    """Results that are kept share memory with no other, and each begins where a tensor of its own might."""
    for more in ({}, {"granularity": "group"}):
        with quantising(stub) as again:
            good = quantised(3, fresh=True, **more)
            learned(good)
            made = [again(**good) for _ in range(100)]
            assert_apart(one for pair in made for one in pair)
            assert not any((one.data_ptr() - one.untyped_storage().data_ptr()) % 256 for pair in made for one in pair)
            for like in (again(**quantised(3, fresh=True, **more)), *made):
                assert [(one.shape, one.stride(), one.dtype) for one in like] == [
                    ((3, 512), (512, 1), E4M3),
                    ((3, 4), (4, 1), torch.float32) if more else ((3, 1), (1, 1), torch.float32),
                ]
            large = quantised(512, 8192, True, **more)
            learned(large)
            codes, scales = again(**large)
            assert codes.untyped_storage().nbytes() == codes.nbytes, "it has an allocation of its own"
            assert scales.shape[0] == 512


def given_and_made(stub: Stub) -> None:
    """One result is given, and the other is made; a destination in the place of an operand is refused."""
    with quantising(stub) as again:
        for name in ("out", "out_scale"):
            good = quantised(fresh=True) | {name: quantised()[name]}
            learned(good)
            made = [again(**good) for _ in range(20)]
            place = name == "out_scale"
            assert all(pair[place] is good[name] for pair in made)
            assert_apart(pair[not place] for pair in made)
            inside = good["x"].view(torch.uint8).flatten()[: good[name].nbytes].view(good[name].dtype)
            assert again(**(good | {name: inside.view(good[name].shape)})) is None


def streams_of_results(stub: Stub) -> None:
    """Results come from memory that was allocated on the stream of the call; a captured call has memory of its own."""
    with quantising(stub) as again:
        good, blocks, kept = quantised(fresh=True), {}, []
        learned(good)
        for stream in (0, 3, 0, 5, 3, 0, 7, 9, 11, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OneDevice, "stream_of", staticmethod(lambda device, stream=stream: stream))
                made = [again(**good) for _ in range(3)]
            kept += made
            blocks.setdefault(stream, set()).update(one[0].untyped_storage().data_ptr() for one in made)
        for one, other in itertools.combinations(blocks.values(), 2):
            assert not one & other
        outside = {one.untyped_storage().data_ptr() for pair in kept for one in pair}
        stub.capturing.value = 1
        try:
            inside = [one for _ in range(20) for one in again(**good)]
        finally:
            stub.capturing.value = 0
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in inside)
        assert not outside & {one.untyped_storage().data_ptr() for one in inside}
        kept += [again(**good) for _ in range(40)]
        assert_apart([*inside, *(one for pair in kept for one in pair)])
        stub.take()


def inference(stub: Stub) -> None:
    """A call that is learned in inference mode gives tensors that are usable outside of it, too."""
    with quantising(stub) as again:
        good = quantised(fresh=True)
        with torch.inference_mode():
            learned(good)
            made = [again(**good) for _ in range(20)]
            assert_apart(one for pair in made for one in pair)
        assert again(**good) is None, "outside of it, operands have another form"
        learned(good)
        assert_apart([one for _ in range(20) for one in again(**good)])  # a list, which keeps them


def pools(stub: Stub) -> None:
    """Once a program has made a pool of memory, results come from torch's allocator, which has them in the pool."""
    counter = ctypes.c_uint64(2)
    with quantising(stub) as again, pytest.MonkeyPatch.context() as patch:
        fresh_of, asked = HUB.fresh_of, []

        def on_gpu(known: Any, operands: Any, made: Any) -> Any:
            asked.append(counter.value)
            facts = fresh_of(known, operands, made)
            if counter.value > 2:
                return facts._replace(stock=None, in_stock=())
            return facts._replace(pools_at=ctypes.addressof(counter), pools=2)

        patch.setattr(HUB, "fresh_of", on_gpu)
        good = quantised(fresh=True)
        learned(good)
        assert any(one.untyped_storage().nbytes() > one.nbytes for one in again(**good))
        counter.value = 3
        assert again(**good) is None
        learned(good)
        assert asked == [2, 3]
        assert all(one.untyped_storage().nbytes() == one.nbytes for _ in range(20) for one in again(**good))


def lists(stub: Stub) -> None:
    """Tensors in a list are operands; a tuple of the same is another call."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    op, outs, lses = kernelhub.merge_attention_states, torch.randn(3, 3, 4, 16), torch.randn(3, 4, 3)
    out, out_lse = torch.empty(3, 4, 16), torch.empty(4, 3)
    good = {"outs": [*outs[:2]], "lses": [*lses[:2]], "out": out, "out_lse": out_lse, "backend": "triton"}
    with believed_on_gpu(op.op):
        adapter = type(op.prepare([*outs[:2]], [*lses[:2]], return_lse=True, backend="triton").adapter)
        with counted(adapter):
            op.op._forget()
            learned(good, op)
            stub.take()
            assert op.op.again(*arguments(op, **good)) == (out, out_lse)
            assert {*(one.data_ptr() for one in (*outs[:2], *lses[:2], out, out_lse))} <= pointers(stub)
            other = [*outs[1:]]
            assert op.op.again(*arguments(op, **(good | {"outs": other}))) is not None
            assert {one.data_ptr() for one in other} <= pointers(stub)
            for wrong in ((*outs[:2],), [*outs], [outs[0], None], [outs[0]] * 2, [], outs[:2]):
                assert op.op.again(*arguments(op, **(good | {"outs": wrong}))) is None, wrong


def plans(stub: Stub) -> None:
    """A plan's runs are made so, too: in a `use` block and after settings changed, since its kernel is bound."""
    with quantising(stub):
        good = quantised()
        given = {name: good[name] for name in ("x", "out", "out_scale")}
        launched: list[Any] = []
        launches = KnownCalls.launches
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KnownCalls, "launches", lambda *of: (launched.append(of), launches(*of))[1])
            kernelhub.quantize_fp8.op._forget()
            plan = kernelhub.quantize_fp8.prepare(good["x"], backend="triton")
            for _ in range(WHOLE):
                plan.run(**given)
            assert launched
            launched.clear()
            calls = plan.bound.calls
            stub.take()
            like = quantised()
            assert plan.run(like["x"], out=like["out"], out_scale=like["out_scale"]) == (like["out"], like["out_scale"])
            assert {like[name].data_ptr() for name in ("x", "out", "out_scale")} <= pointers(stub)
            with kernelhub.use(disable="flashinfer"):
                plan.run(**given)
            HUB.forget_selections()
            plan.run(**given)
            assert not launched
            assert plan.bound.calls == calls + 3
            plan.run(given["x"][:3])
            assert plan.bound.calls == calls + 4
            with pytest.raises(kernelhub.errors.InvalidArgument, match="the plan is for"):
                plan.run(given["x"].float())


def collectives(stub: Stub) -> None:
    """A plan's collectives are made so, too, in place as well, until a rank is missing or its group has other memory.

    A call in place and one that is not are two: each has the launches of its own kind, whichever was learned first.
    """
    on_stub(stub)
    runtime.recognise_in_c(runtime.native())
    group = _groups_of_two()[0]
    for op, adapter, good, places in _collectives():
        adapter_of_parts, memory = getattr(adapter, "parts", adapter), _Workspaces()
        adapter_of_parts.attach(group.group_name, memory.own)
        reached: list[Any] = []  # calls that Python made
        asked = {one: value for one, value in good.items() if one not in places}
        plan = _plan_of(op, adapter, asked, group, reached)
        inside = {"all_reduce": {"out": "x"}, "all_reduce_rms_norm": {"out": "x", "residual_out": "residual"}}
        place = inside.get(op.__name__, {})
        if good["out"].dtype is not torch.bfloat16:  # codes
            place = {"residual_out": "residual"}
        kinds = [good, *([_in_place(good, place)] if place else [])]

        def launched(given: dict[str, Any], plan: Any = plan, reached: list[Any] = reached) -> tuple[bool, set[int]]:
            """Whether Python saw the call, and the addresses of its launch."""
            before, counted = len(reached), plan.bound.calls
            stub.take()
            results = plan.run(**given)
            results = results if isinstance(results, tuple) else (results,)
            assert all(any(one is of for of in given.values()) for one in results)
            assert plan.bound.calls == counted + 1
            [launch] = stub.take()
            return len(reached) > before, addresses_of(launch)

        for order in (kinds, kinds[::-1]):
            for given in order * 2:
                for _ in range(2 * WHOLE):
                    launched(given)
            for given in order:
                like = _alike(given)
                seen, addresses = launched(like)
                assert not seen, (op.__name__, type(adapter), given is good)
                tensors = {one.data_ptr() for one in like.values() if isinstance(one, torch.Tensor)}
                assert tensors | {memory.own.missing.data_ptr()} <= addresses
        if place:  # the result is in the place of another tensor than in the calls before
            other = {**good, **dict.fromkeys(list(place)[-1:], good["x"])}
            reached.clear()
            launched(other)
            assert reached or op is kernelhub.all_reduce
        memory.own.missing[1] = 1
        for given in kinds:
            with pytest.raises(RanksDisagree, match="rank 1"):
                plan.run(**given)
        memory.own.missing[1] = 0
        newer = _Workspaces()
        adapter_of_parts.attach(group.group_name, newer.own)
        for given in kinds:
            for _ in range(2 * WHOLE):
                _, addresses = launched(given)
                assert newer.own.missing.data_ptr() in addresses, "prepared anew, over other memory"
            seen, _ = launched(_alike(given))
            assert not seen
    stub.forget()


def _plan_of(op: Any, adapter: Any, given: dict[str, Any], group: Any, reached: list[Any]) -> Any:
    """A plan of rank 0 of two, whose kernel is bound for all messages."""
    plan = inspect.signature(op.prepare).return_annotation
    counter, selection = itertools.count(), SimpleNamespace(selected="the kernel", problem=adapter.problem)
    bound = Bound(selection, adapter, None, counter, -1)  # type: ignore[arg-type]  # reports are not asked
    run = op.op.contract.bind(adapter, adapter.problem, -1, counter.__next__, int)
    bound.run = lambda *arguments: (reached.append(arguments), run(*arguments))[1]
    HUB.ledger.add(bound)
    form = getattr(adapter.problem, "format", "none")
    named = {} if form == "none" else {"format": form}
    if op is kernelhub.all_reduce_rms_norm and adapter.problem.column:
        named["scale_layout"] = "column"
    parsed = op.op.parse(None, (), {**given, "group": group, **({} if op is kernelhub.moe_combine else named)})
    if not issubclass(plan, CollectivePlan):
        return plan(op.op, bound, parsed)
    return plan(op.op, dict.fromkeys(BUCKETS, bound), "32KB", parsed, GroupFacts("nvlink", "atomics", "a stub"))


def _in_place(given: dict[str, Any], place: dict[str, str]) -> dict[str, Any]:
    return given | {one: given[operand] for one, operand in place.items()}


def _alike(given: dict[str, Any]) -> dict[str, Any]:
    """Other tensors, one for each."""
    tensors = {id(one): one.clone() for one in given.values() if isinstance(one, torch.Tensor)}
    return {name: tensors.get(id(one), one) for name, one in given.items()}


def errors(stub: Stub) -> None:
    """An error of the driver is raised as the function raises it; nothing is counted, and later calls go on."""
    with quantising(stub) as again:
        good = quantised()
        learned(good)
        stub.fail(700)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS, 700") as raised:
            again(**good)
        assert any("raised by kernel triton" in note for note in raised.value.__notes__)
        assert again(**good) is not None
        stub.take()


def wrong(stub: Stub) -> None:
    """What Python gives the extension is checked."""
    with quantising(stub) as again:
        good = quantised()
        learned(good)
        assert again(**good) is not None
        module, native = runtime.native().module, runtime.native()
        call = kernelhub.quantize_fp8.op._calls
        holds = module.Known(native.driver, lambda *tensors: True, 1, (0,), (), ())
        for given in ((holds, (0,), (0,), True), (holds, (), (), True), (None, (0,), (0,), True)):
            with pytest.raises((TypeError, ValueError)):
                module.Call(*given, (), int, print)
        with pytest.raises((TypeError, ValueError)):
            call.add((1, 2), None)
        assert call.flat(1, [good["x"], good["out"]], (1, 2)) == (1, good["x"], good["out"], (1, 2))
        assert call.flat(*[good["x"]] * 65) is None
        assert call.again(*[good["x"]] * 65) is None
        empty = module.Calls.__new__(module.Calls)
        with pytest.raises(TypeError):
            empty.again(1)


def subclasses(stub: Stub) -> None:
    """Tensors of a subclass go where traced ones do, though the launcher is there."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with quantising(stub), FakeTensorMode():
        for op, given in (
            (kernelhub.quantize_fp8, {"x": torch.zeros(4, 512, dtype=torch.bfloat16)}),
            (kernelhub.attention, {name: torch.zeros(1, 8, 2, 64) for name in "qkv"}),
        ):
            assert op.op.again is not None
            made = op(**given)
            assert all(type(one) is FakeTensor for one in (made if isinstance(made, tuple) else (made,)))


def traced(stub: Stub) -> None:
    """A call that would be made again is refused while torch traces, and made again under a mode that looks on."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    with quantising(stub) as again:
        good, fresh = quantised(), quantised(fresh=True)
        learned(good)
        learned(fresh)
        stub.take()
        for given in (good, fresh):
            with pytest.raises(InvalidArgument, match="the call is traced"):
                make_fx(functools.partial(kernelhub.quantize_fp8, **given))()
            with (
                FakeTensorMode(allow_non_fake_inputs=True),
                pytest.raises(InvalidArgument, match=": the call is traced"),
            ):
                kernelhub.quantize_fp8(**given)
            assert not stub.take(), "its graph would lack the launch"
            with FlopCounterMode(display=False):
                kernelhub.quantize_fp8(**given)
            assert stub.take()
            assert again(**given) is not None
            stub.take()


def traced_by_python(stub: Stub) -> None:
    """The same where torch has no function of C++ that says how many modes there are."""
    install_launcher(stub, modes_of=0)
    try:
        traced(stub)
    finally:
        install_launcher(stub)


def threads(stub: Stub) -> None:
    """Threads call one op with tensors of their own, while selections are forgotten."""
    with quantising(stub):
        done, failures = threading.Event(), []

        def work(fresh: bool, width: int) -> None:
            try:
                while not done.is_set():
                    given = quantised(4, width, fresh)
                    codes, scales = kernelhub.quantize_fp8(**given)
                    assert codes.shape == (4, width)
                    assert fresh or (codes is given["out"] and scales is given["out_scale"])
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(at % 2 == 0, 128 << at % 3)) for at in range(4)]
        for worker in workers:
            worker.start()
        for _ in range(20):
            done.wait(0.05)
            HUB.forget_selections()
        done.set()
        for worker in workers:
            worker.join()
        assert not failures, failures
        stub.take()


def leaks(stub: Stub) -> None:
    """Calls keep no argument, no result and no exception alive."""
    with quantising(stub) as again:
        for good in (quantised(), quantised(fresh=True)):
            learned(good)
            assert again(**good) is not None
            given = arguments(kernelhub.quantize_fp8, **good)
            call = kernelhub.quantize_fp8.op.again
            tracked = [*(one for one in given if isinstance(one, torch.Tensor)), call.__self__, None, True, False]
            gc.collect()
            before = [sys.getrefcount(one) for one in tracked]
            objects = len(gc.get_objects())
            for _ in range(1000):
                call(*given)
                call(given[0].tolist(), *given[1:])
            after = [sys.getrefcount(one) for one in tracked]
            assert all(abs(a - b) < 20 for a, b in zip(before, after, strict=True)), (before, after)
            assert len(gc.get_objects()) < objects + 100
        stub.take()


SCENARIOS = (
    values,
    contexts,
    counts,
    layers,
    results,
    kept_results,
    given_and_made,
    streams_of_results,
    inference,
    pools,
    lists,
    plans,
    collectives,
    errors,
    wrong,
    subclasses,
    traced,
    traced_by_python,
    threads,
    leaks,
)


def main(names: list[str]) -> None:
    perform(SCENARIOS, names)


if __name__ == "__main__":
    main(sys.argv[1:])
