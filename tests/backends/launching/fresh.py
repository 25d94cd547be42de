"""Collectives without given results that the extension makes: `python -m tests.backends.launching.fresh [NAME ...]`."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument, NoKernel, RanksDisagree
from kernelhub.ops import ready
from kernelhub.ops.comm.experts.problem import CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.experts.results import Fresh, outputs_of
from kernelhub.probes.device import simulated
from kernelhub.runtime import launch as runtime
from tests.backends.launching.check import WHOLE, _collectives, _groups_of_two, _Workspaces, on_stub_by_function
from tests.backends.launching.stub import OneDevice, Stub, addresses_of, perform
from tests.backends.launching.whole import _alike, _plan_of, assert_apart

FACETS = {"device": simulated("H100"), "link": "nvlink", "peers": "atomics", "world_size": 2}
EXPERTS = {"capacity": "few", "hidden_size": 256, "top_k": 2, "num_experts": 8}
FORMATS = [*itertools.product(("tokens", "contiguous", "masked"), (False, True))]


class Case(NamedTuple):
    """A collective whose kernel is bound.

    Attributes:
        op: its function.
        call: makes a call, by a plan's run or a direct call, of these arguments; without destinations.
        given: arguments.
        reached: calls that Python made.
        memory: of the ranks.
        group: theirs.
        adapter, bound: of the kernel.
    """

    op: Any
    call: Callable[..., Any]
    given: dict[str, Any]
    reached: list[Any]
    memory: _Workspaces
    group: Any
    adapter: Any
    bound: Bound

    def learned(self, calls: int = 2 * WHOLE) -> None:
        """Make calls until they are known, without what they return."""
        for _ in range(calls):
            self.call(**self.given)


def cases(ways: tuple[bool, ...] = (False, True)) -> Iterator[Case]:
    """Every collective, by a plan's run and by a direct call."""
    _groups_of_two()
    for direct in ways:
        for op, adapter, good, places in _collectives():
            yield _case(op, adapter, {one: good[one] for one in good if one not in places}, direct)
        for format, scaled in FORMATS:
            yield (exchange := exchanged(format, scaled, direct))
            yield combined(exchange, direct)


def made_by(*calls: Any, given: Case) -> list[torch.Tensor]:
    """The tensors that calls made, without those that they were given."""
    arguments = [*given.given.values()]
    return [one for call in calls for one in tensors_of(call) if not any(one is of for of in arguments)]


def exchanged(format: str = "tokens", scaled: bool = False, direct: bool = False) -> Case:
    """A dispatch with a capacity."""
    dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
    problem = DispatchProblem(**FACETS, **EXPERTS, dtype=str(dtype)[6:], format=format, scales=scaled)
    given = {"x": torch.zeros(4, 256).to(dtype), "topk_ids": torch.zeros(4, 2, dtype=torch.int32)}
    given |= {"topk_weights": torch.zeros(4, 2)} | ({"scales": torch.ones(4, 2)} if scaled else {})
    return _case(kernelhub.moe_dispatch, PushRows(problem), given, direct, num_experts=8, format=format, max_tokens=4)


def combined(exchange: Case, direct: bool = False) -> Case:
    """The combine of what a dispatch gives."""
    sent = exchange.call(**exchange.given)
    adapter = PushSums(CombineProblem(**FACETS, **EXPERTS, dtype="bfloat16", format=sent.format, rows="fixed"))
    return _case(kernelhub.moe_combine, adapter, {"y": sent.x.to(torch.bfloat16), "handle": sent.handle}, direct)


def _case(op: Any, adapter: Any, given: dict[str, Any], direct: bool, **fixed: Any) -> Case:
    group, memory, reached = dist.group.WORLD, _Workspaces(), []
    getattr(adapter, "parts", adapter).attach(group.group_name, memory.own)
    if not direct:
        plan = _plan_of(op, adapter, given | fixed, group, reached)
        BOUND.append(plan.bound)
        return Case(op, plan.run, given, reached, memory, group, adapter, plan.bound)
    form = getattr(adapter.problem, "format", None)
    if op is kernelhub.all_reduce_rms_norm and form != "none":
        fixed = {"format": form, "scale_layout": "column" if adapter.problem.column else "row"}
    counter, named = itertools.count(), {"group": group, **fixed}
    run = op.op.contract.bind(adapter, adapter.problem, -1, counter.__next__, int)
    noted = lambda *arguments: (reached.append(arguments), run(*arguments))[1]  # noqa: E731
    bound = Bound(SimpleNamespace(selected="a kernel", problem=adapter.problem), adapter, noted, counter, -1)  # type: ignore[arg-type]
    BOUND.append(bound)
    HUB.ledger.add(bound)
    op.op._forget_calls()
    op.op.table[op.op.parse(None, (), given | named).key] = noted

    def call(**changed: Any) -> Any:
        return op(**{**named, **changed})

    return Case(op, call, given, reached, memory, group, adapter, bound)


BOUND: list[Bound] = []  # alive: of one that is gone the report asks the selection


def tensors_of(results: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a call writes."""
    if type(results) is Dispatched:
        return outputs_of(results)
    return results if type(results) is tuple else (results,)


def apart(stub: Stub) -> None:
    """Results have the forms of the first ones, and share memory with no other, however many are kept."""
    _begin(stub)
    for case in cases():
        stub.take()
        first = tensors_of(case.call(**case.given))
        case.learned()
        case.reached.clear()
        kept: list[torch.Tensor] = []
        for _ in range(40):
            like = _alike(case.given)
            like |= (
                {
                    "handle": [
                        case.given["handle"][0],
                        *map(torch.clone, case.given["handle"][1:4]),
                        *case.given["handle"][4:],
                    ]
                }
                if "handle" in like
                else {}
            )
            stub.take()
            made = tensors_of(case.call(**like))
            addresses = set().union(*map(addresses_of, stub.take()))
            assert not case.reached, (case.op.__name__, type(case.adapter))
            assert {one.data_ptr() for one in made} <= addresses
            assert {one.data_ptr() for one in like.values() if isinstance(one, torch.Tensor)} <= addresses
            forms = [(one.shape, one.stride(), one.dtype, one.device) for one in made]
            assert forms == [(one.shape, one.stride(), one.dtype, one.device) for one in first]
            kept += made
        assert_apart(kept)
        kept[0].zero_()
        assert kept[0]._version == 1
        assert not any(one._version for one in kept[1:]), "what autograd keeps of others is unchanged"


def counts(stub: Stub) -> None:
    """Each call is counted."""
    _begin(stub)
    for case in cases():
        case.learned()
        before = case.bound.calls
        case.learned(10)
        assert case.bound.calls == before + 10


def begin_as_zeros(stub: Stub) -> None:
    """Counts of a dispatch of tokens begin as zeros in each call."""
    _begin(stub)
    _groups_of_two()
    case = exchanged("tokens")
    case.learned()
    for _ in range(40):
        counted = case.call(**case.given).counts
        assert not counted.any()
        counted.fill_(7)


def streams(stub: Stub) -> None:
    """Results on a stream come from memory that was allocated on it, also after calls on others."""
    _begin(stub)
    for case in cases():
        case.learned()
        case.reached.clear()
        blocks: dict[int, set[int]] = {}
        for stream in (0, 3, 0, 5, 3, 0, 7, 9, 11, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OneDevice, "stream_of", staticmethod(lambda device, stream=stream: stream))
                kept = [case.call(**case.given) for _ in range(3)]
            assert_apart(made_by(*kept, given=case))
            KEPT.append(kept)
            own = blocks.setdefault(stream, set())
            own |= {one.untyped_storage().data_ptr() for one in made_by(*kept, given=case)}
        assert not case.reached
        for one, other in itertools.combinations(blocks.values(), 2):
            assert not one & other
        KEPT.clear()


KEPT: list[Any] = []  # so that memory that was given back is not another stream's later


def captured(stub: Stub) -> None:
    """A captured call has memory of its own, of which nothing is kept for others."""
    _begin(stub)
    for case in cases():
        case.learned()
        outside = [case.call(**case.given) for _ in range(3)]
        case.reached.clear()
        stub.capturing.value = 1
        try:
            inside = [case.call(**case.given) for _ in range(20)]
        finally:
            stub.capturing.value = 0
        assert not case.reached
        outside += [case.call(**case.given) for _ in range(40)]
        assert_apart(made_by(*inside, *outside, given=case))
        shared = {one.untyped_storage().data_ptr() for one in made_by(*outside, given=case)}
        for one in made_by(*inside, given=case):
            assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
            assert one.untyped_storage().data_ptr() not in shared


def devices(stub: Stub) -> None:
    """While another device is current, Python decides."""
    _begin(stub)
    case = next(cases())
    case.learned()
    taken = len(stub.take())
    case.reached.clear()
    OneDevice.current = 1
    try:
        assert taken
        assert case.op.op.again(case.given["x"], case.group, None, None) is None
        assert not stub.take()
    finally:
        OneDevice.current = 0


def groups(stub: Stub) -> None:
    """A call is of its group, which it does not keep alive; one by a group's name reaches Python."""
    _begin(stub)
    both = _groups_of_two()
    direct = (
        case for case in cases() if case.op is kernelhub.all_reduce and "<plan" not in case.call.__code__.co_filename
    )
    case = next(direct)
    case.learned()
    case.reached.clear()
    case.call(**case.given)
    assert not case.reached
    both = [dist.group.WORLD, dist.new_group([0, 1])]
    other = _Workspaces()
    case.adapter.attach(both[1].group_name, other.own)
    for group, memory in ((both[1], other), (both[0], case.memory)) * 2:
        for _ in range(2 * WHOLE):
            stub.take()
            case.op(case.given["x"], group)
            [launch] = stub.take()
            assert memory.own.missing.data_ptr() in addresses_of(launch)
    for _ in range(2 * WHOLE):
        case.reached.clear()
        case.op(case.given["x"], case.group.group_name)
        assert case.reached, "the name may be another group's later"
    for nothing in (None, 7, "no group", object()):
        with pytest.raises(InvalidArgument, match="group"):
            case.op(case.given["x"], nothing)
    case.reached.clear()
    gone = weakref.ref(both[1])
    call, x = case.op.op.again, case.given["x"]
    del case, both, group
    dist.destroy_process_group()
    gc.collect()
    assert gone() is None
    assert call(x, None, None, None) is None


def missing(stub: Stub) -> None:
    """Nothing is launched after a rank was missing, and memory of a group that was connected anew is used."""
    _begin(stub)
    for case in cases():
        case.learned()
        case.memory.own.missing[1] = 1
        for _ in range(3):
            stub.take()
            with pytest.raises(RanksDisagree, match="rank 1"):
                case.call(**case.given)
            assert not stub.take()
        case.memory.own.missing[1] = 0
        newer = _Workspaces()
        getattr(case.adapter, "parts", case.adapter).attach(case.group.group_name, newer.own)
        case.learned()
        case.reached.clear()
        stub.take()
        case.call(**case.given)
        addresses = set().union(*map(addresses_of, stub.take()))
        assert not case.reached
        assert addresses & {memory.data_ptr() + at for memory in newer.memories for at in range(0, 1 << 20, 16)}


def handles(stub: Stub) -> None:
    """A combine is made again only of a handle whose numbers are those that it was learned with."""
    _begin(stub)
    _groups_of_two()
    for direct in (False, True):
        case = combined(exchange := exchanged("contiguous", direct=direct), direct)
        case.learned()
        case.reached.clear()
        y, handle = case.given["y"], case.given["handle"]
        case.call(y=y, handle=handle)
        assert not case.reached
        for wrong in (
            [handle[0].clone(), *handle[1:]],
            [*handle[:4], *map(torch.clone, handle[4:])],
            (*handle,),
            [*handle[:-1], handle[-1].clone()],
        ):
            case.reached.clear()
            case.call(y=y, handle=wrong)
            assert case.reached, "Python looks at another handle"
        for wrong in ([*handle[:3]], [*handle, handle[0]], handle[0], None, [None] * 7, [handle[0]] * 7):
            with pytest.raises(InvalidArgument, match="handle"):
                case.call(y=y, handle=wrong)
        numbers = handle[0].clone()
        for at in range(7):
            handle[0][at] += 1
            case.reached.clear()
            with pytest.raises((InvalidArgument, NoKernel)):
                case.call(y=y, handle=handle)
            assert case.reached or direct
            handle[0].copy_(numbers)
        case.reached.clear()
        case.call(y=y, handle=handle)
        assert not case.reached
        storage = handle[0].clone()
        storage[4] = 3
        with torch.no_grad():
            before = handle[0].data
            handle[0].set_(storage)  # another memory in the same tensor
            with pytest.raises((InvalidArgument, NoKernel)):
                case.call(y=y, handle=handle)
            handle[0].set_(before)
        sent = exchange.call(**exchange.given)
        assert type(sent) is Dispatched
        assert sent.handle[1] is exchange.given["topk_ids"]
        case.reached.clear()
        case.call(y=y, handle=sent.handle)
        assert not case.reached, "handles of one form share what is compared"
        kept = weakref.ref(sent.handle[2])
        del sent
        gc.collect()
        assert kept() is None


def inference(stub: Stub) -> None:
    """What a call in inference mode leaves ready is for calls outside of it, too."""
    _begin(stub)
    for case in cases():
        case.learned()
        with torch.inference_mode():
            inside = [case.call(**case.given) for _ in range(20)]
        made = [case.call(**case.given) for _ in range(20)]
        assert_apart(made_by(*inside, *made, given=case), inference=True)
        assert_apart(made_by(*made, given=case))


def traced(stub: Stub) -> None:
    """Nothing is launched while torch traces; a mode that looks on gets the same results."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    _begin(stub)
    for case in cases((True,)):
        case.learned()
        stub.take()
        with pytest.raises(InvalidArgument, match="the call is traced"):
            make_fx(functools.partial(case.call, **case.given))()
        assert not stub.take()
        with FlopCounterMode(display=False):
            case.call(**case.given)
        assert stub.take()
        case.reached.clear()
        case.call(**case.given)
        assert not case.reached


def compared(stub: Stub) -> None:
    """With KERNELHUB_CHECK=1 ranks compare each call, so Python makes it."""
    from tests.runtime.world import variables

    _begin(stub)
    with variables(KERNELHUB_CHECK="1"), pytest.MonkeyPatch.context() as patch:
        kernelhub.reload()
        for name in ("ops.comm.sums", "ops.comm.all_gather", "ops.comm.all_reduce_rms_norm", "ops.comm.quantised_norm"):
            patch.setattr(f"kernelhub.{name}.comparing", lambda *of: lambda *said: None)
        for name in ("dispatch", "combine"):
            patch.setattr(f"kernelhub.ops.comm.experts.{name}.comparing", lambda *of: lambda *said: None)
        for case in cases():
            case.learned()
            case.reached.clear()
            case.learned(5)
            assert len(case.reached) == 5, (case.op.__name__, type(case.adapter))
    kernelhub.reload()


def threads(stub: Stub) -> None:
    """Threads that share the memory of results get none that another one has."""
    _begin(stub)
    for case in itertools.islice(cases(), 0, None, 7):
        case.learned()
        kept: list[list[Any]] = [[] for _ in range(4)]
        failures: list[BaseException] = []

        def work(own: list[Any], case: Case = case, failures: list[BaseException] = failures) -> None:
            try:
                own += [case.call(**case.given) for _ in range(200)]
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(own,)) for own in kept]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures, failures
        assert_apart(made_by(*itertools.chain.from_iterable(kept), given=case))


def given_back(stub: Stub) -> None:
    """What is ready takes so many bytes at most, of all calls together."""
    _begin(stub)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "_MOST_READY", 1 << 16)
        kept = []
        for case in cases((False,)):
            case.learned()
            kept.append(case)
        held = ready._KEPT._bytes
        assert sum(held.values()) <= 1 << 16
        for case in kept:
            assert_apart(made_by(*[case.call(**case.given) for _ in range(20)], given=case))
        assert sum(held.values()) <= 1 << 16
        alive = [(of(), stream) for of, stream in held]
        live = [one for one in gc.get_objects() if type(one) in (ready.Ready, Fresh)]
        for one in live:
            assert all(any(one is of and stream == at for of, at in alive) for stream in one.ready)


def leaks(stub: Stub) -> None:
    """Calls keep no argument, no result and no list alive."""
    _begin(stub)
    for case in cases():
        case.learned()
        results = weakref.ref(tensors_of(case.call(**case.given))[0])
        gc.collect()
        assert results() is None
        tracked = [*(one for one in case.given.values() if isinstance(one, torch.Tensor)), case.group, None, ()]
        before = [sys.getrefcount(one) for one in tracked]
        objects = len(gc.get_objects())
        for _ in range(300):
            case.call(**case.given)
        after = [sys.getrefcount(one) for one in tracked]
        assert all(abs(a - b) < 60 for a, b in zip(before, after, strict=True)), (case.op.__name__, before, after)
        assert len(gc.get_objects()) < objects + 200
        stub.take()


def wrong(stub: Stub) -> None:
    """What Python gives the extension is checked."""
    _begin(stub)
    module, native = runtime.native().module, runtime.native()
    case = next(cases())
    learned = {"known": None}
    add = type(native.driver)
    assert add is module.Driver

    def noted(*given: Any, **more: Any) -> Any:
        learned.update(known=given[0], given=given, more=more)
        return module.Call(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        recognised = HUB.calls_of
        patch.setattr(HUB, "calls_of", lambda *of: (recognised(*of)[0], noted))
        plan = _plan_of(case.op, case.adapter, case.given, case.group, [])
        for _ in range(2 * WHOLE):
            plan.run(**case.given)
    given, more = list(learned["given"]), learned["more"]
    assert given[4] == (None,)
    for changed in (
        {"stock": None},
        {"stock": []},
        {"at": 64},
        {"at": -2},
        {"contents": b"12", "contents_of": 0},
        {"contents": b"12", "contents_of": 64, "weak": ~0 & (1 << 64) - 1},
        {"contents": "12"},
        {"weak": "1"},
    ):
        with pytest.raises((TypeError, ValueError)):
            module.Call(*given, **(more | changed))
    without = {name: value for name, value in more.items() if name not in ("stock", "refill")}
    with pytest.raises(ValueError, match="stock"):
        module.Call(*given, **without)
    for refill, error in (
        (lambda stream: None, TypeError),
        (lambda stream: (), IndexError),
        (_fails, ZeroDivisionError),
    ):
        calls = module.Calls(native.driver, print, [], HUB.contexts.get, torch.autograd.forward_ad)
        calls.add((case.given["x"], None), module.Call(*given, **(more | {"stock": {}, "refill": refill})))
        with pytest.raises(error):
            calls.again(case.given["x"], None)
    calls = module.Calls(native.driver, print, [], HUB.contexts.get, torch.autograd.forward_ad)
    with pytest.raises(ValueError, match="argument"):
        calls.add((case.given["x"], None), module.Call(*given, **(more | {"finish": print, "at": 9})))
    with pytest.raises(TypeError):  # None has no weak reference
        calls.add((case.given["x"], None), module.Call(*given, **(more | {"weak": 2})))


def _fails(stream: Any) -> Any:
    raise ZeroDivisionError


def _begin(stub: Any) -> None:
    on_stub_by_function(stub)
    runtime.recognise_in_c(runtime.native())
    stub.take()


SCENARIOS = (
    apart,
    counts,
    begin_as_zeros,
    streams,
    captured,
    devices,
    groups,
    missing,
    handles,
    inference,
    traced,
    compared,
    threads,
    given_back,
    leaks,
    wrong,
)


def main(names: list[str]) -> None:
    perform(SCENARIOS, names)


if __name__ == "__main__":
    main(sys.argv[1:])
