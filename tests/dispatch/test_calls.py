"""Calls under policies: the kernel that was asked for runs, nothing is replaced in silence."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import itertools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.attention.adapter import SplitKV
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.plan import Plan
from kernelhub.errors import ConfigurationError, InvalidArgument, KernelUnavailable, NoKernel
from tests.dispatch.backends import Ones, Twos, qkv, record, register


@pytest.fixture
def ones_and_twos():
    """Two backends that answer with a constant; the first is chosen by itself."""
    register("ones", record("ones.k", "Ones"))
    register("twos", record("twos.k", "Twos"))
    return qkv()


def answer(*operands: torch.Tensor, **kwargs: object) -> float:
    return float(kernelhub.attention(*operands, **kwargs).mean())


class TestBackendArgument:
    def test_a_plugin_is_chosen_by_itself(self, ones_and_twos) -> None:
        assert answer(*ones_and_twos) == 1.0

    def test_backend_names_who_runs(self, ones_and_twos) -> None:
        assert answer(*ones_and_twos, backend="twos") == 2.0
        assert answer(*ones_and_twos, backend="twos.k") == 2.0
        assert answer(*ones_and_twos, backend=("twos", "ones")) == 2.0
        assert answer(*ones_and_twos, backend=["ones", "twos"]) == 1.0

    def test_an_unable_backend_raises_with_every_reason(self, ones_and_twos) -> None:
        q, k, v = (t.half().float() for t in ones_and_twos)
        with pytest.raises(NoKernel) as caught:
            kernelhub.attention(q, k, v, softcap=2.0, backend="torch.sdpa")
        assert "does not support softcap" in str(caught.value)
        assert {d.kernel for d in caught.value.selection.decisions} == set(kernelhub.attention.kernels())

    def test_an_unknown_backend_is_an_error_with_the_nearest_name(self, ones_and_twos) -> None:
        with pytest.raises(ConfigurationError, match=r"'tritn' is not a backend.*did you mean triton"):
            kernelhub.attention(*ones_and_twos, backend="tritn")


class TestContexts:
    def test_the_innermost_context_wins_and_ends(self, ones_and_twos) -> None:
        with kernelhub.use(attention="twos"):
            assert answer(*ones_and_twos) == 2.0
            with kernelhub.use(attention="ones"):
                assert answer(*ones_and_twos) == 1.0
            assert answer(*ones_and_twos) == 2.0
        assert answer(*ones_and_twos) == 1.0

    def test_the_call_s_own_argument_is_stronger(self, ones_and_twos) -> None:
        with kernelhub.use(attention="twos"):
            assert answer(*ones_and_twos, backend="ones") == 1.0

    def test_disable_in_a_context_is_stronger_than_the_argument(self, ones_and_twos) -> None:
        with kernelhub.use(disable="ones"), pytest.raises(NoKernel, match=r"disabled by use\(disable='ones'\)"):
            kernelhub.attention(*ones_and_twos, backend="ones")

    def test_a_context_is_a_decorator_too(self, ones_and_twos) -> None:
        @kernelhub.use(attention="twos")
        def inside() -> float:
            return answer(*ones_and_twos)

        assert inside() == 2.0
        assert answer(*ones_and_twos) == 1.0

    def test_a_context_object_may_be_entered_again_inside_itself(self, ones_and_twos) -> None:
        context = kernelhub.use(attention="twos")
        with context, context:
            assert answer(*ones_and_twos) == 2.0
        assert answer(*ones_and_twos) == 1.0

    def test_an_exception_leaves_the_context(self, ones_and_twos) -> None:
        with pytest.raises(ZeroDivisionError), kernelhub.use(attention="twos"):
            raise ZeroDivisionError
        assert answer(*ones_and_twos) == 1.0

    def test_other_threads_do_not_see_it(self, ones_and_twos) -> None:
        with kernelhub.use(attention="twos"), concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(answer, *ones_and_twos).result() == 1.0
            assert answer(*ones_and_twos) == 2.0

    def test_a_task_keeps_the_context_it_was_started_in(self, ones_and_twos) -> None:
        async def late() -> float:
            await asyncio.sleep(0)
            return answer(*ones_and_twos)

        async def main() -> tuple[float, float]:
            with kernelhub.use(attention="twos"):
                task = asyncio.create_task(late())
            return await task, answer(*ones_and_twos)

        assert asyncio.run(main()) == (2.0, 1.0)

    def test_a_copied_context_keeps_it_after_the_block(self, ones_and_twos) -> None:
        with kernelhub.use(attention="twos"):
            copied = contextvars.copy_context()
        assert copied.run(answer, *ones_and_twos) == 2.0
        assert answer(*ones_and_twos) == 1.0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"atention": "torch"}, r"'atention' is not an op.*did you mean attention"),
            ({"attention": "torhc"}, r"'torhc' is not a backend.*did you mean torch"),
            ({"disable": "torch.sdap"}, r"did you mean torch.sdpa"),
            ({"prefer": {"attentoin": "torch"}}, r"'attentoin' is not an op"),
        ],
    )
    def test_a_misspelt_name_is_an_error_when_it_is_written(self, arguments, message) -> None:
        with pytest.raises(ConfigurationError, match=message):
            kernelhub.use(**arguments)


class TestConfigure:
    def test_configure_holds_for_the_process_and_is_replaced_by_the_next(self, ones_and_twos) -> None:
        assert answer(*ones_and_twos) == 1.0
        kernelhub.configure(attention="twos")
        assert answer(*ones_and_twos) == 2.0
        with kernelhub.use(attention="ones"):
            assert answer(*ones_and_twos) == 1.0
        kernelhub.configure()
        assert answer(*ones_and_twos) == 1.0

    def test_configure_reaches_other_threads(self, ones_and_twos) -> None:
        kernelhub.configure(attention="twos")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(answer, *ones_and_twos).result() == 2.0


class TestEnvironment:
    def test_force_is_stronger_than_everything_but_disable(self, ones_and_twos, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_FORCE", "attention=twos")
        kernelhub.reload()
        with kernelhub.use(attention="ones"):
            assert answer(*ones_and_twos, backend="ones") == 2.0

    def test_disabling_torch_alone_leaves_the_rest(self, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_DISABLE", "torch.packed")
        kernelhub.reload()
        selection = kernelhub.explain(kernelhub.attention, *qkv())
        assert selection.selected == "cpp.split_kv"
        assert {d.kernel: d.code for d in selection.decisions}["torch.packed"] == "disabled"

    @pytest.mark.fault("everything_disabled")
    def test_everything_disabled_is_an_error_that_lists_why(self, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_DISABLE", "*.*")
        kernelhub.reload()
        with pytest.raises(NoKernel) as caught:
            kernelhub.attention(*qkv())
        assert str(caught.value).count("disabled by KERNELHUB_DISABLE=*.*") >= len(kernelhub.attention.kernels())


class TestFallback:
    def test_a_kernel_that_cannot_be_imported_is_passed_once_with_its_reason(self, caplog) -> None:
        register("broken", record("broken.k", "no_such_module:Thing"))
        operands = qkv()
        with caplog.at_level(logging.WARNING, "kernelhub.fallback"):
            kernelhub.attention(*operands)
            kernelhub.attention(*(t[:, :2] for t in operands))
        assert len(caplog.records) == 1
        assert "no_such_module" in caplog.text
        report = kernelhub.report()
        assert [(f.kernel, f.code) for f in report.fallbacks] == [("broken.k", "load_failed")]
        selection = kernelhub.explain(kernelhub.attention, *operands)
        assert {d.kernel: d.code for d in selection.decisions}["broken.k"] == "load_failed"

    @pytest.mark.fault("unavailable_forced")
    def test_what_was_requested_is_not_replaced_when_it_cannot_be_imported(self) -> None:
        register("broken", record("broken.k", "no_such_module:Thing"))
        with pytest.raises(NoKernel, match="No module named 'no_such_module'"):
            kernelhub.attention(*qkv(), backend="broken")

    def test_strict_forbids_falling(self) -> None:
        register("broken", record("broken.k", "no_such_module:Thing"))
        with kernelhub.strict(), pytest.raises(KernelUnavailable, match="strict is on"):
            kernelhub.attention(*qkv())

    def test_a_launch_that_fails_is_never_tried_on_another_kernel(self) -> None:
        register("bad", record("bad.k", "DeviceError"))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kernelhub.attention(*qkv())
        assert [(row.kernel, row.calls) for row in kernelhub.report().rows] == [("bad.k", 1)]

    def test_an_adapter_of_the_wrong_class_is_refused(self) -> None:
        register("odd", record("odd.k", "builtins:object"))
        with pytest.raises(NoKernel, match="object"):
            kernelhub.attention(*qkv(), backend="odd")


class TestPlans:
    def test_say_whether_a_step_waits_for_the_device(self) -> None:
        for device, syncs in (("H200", True), ("CPU", False)):
            problem = kernelhub.explain("paged_attention", device=device).problem
            selection = kernelhub.paged_attention.op.select(problem, "torch.blocked")
            plan = Plan(types.SimpleNamespace(selection=selection, adapter=None), lambda: None)
            assert plan.reads_lengths
            assert plan.syncs is syncs

    def test_say_how_much_memory_they_take(self) -> None:
        problem = kernelhub.explain("paged_attention", device="H200").problem
        selection = kernelhub.paged_attention.op.select(problem, "triton.split_kv")
        plan = Plan(types.SimpleNamespace(selection=selection, adapter=SplitKV(problem)), lambda: None)
        one_long = plan.workspace_bytes(num_seqs=1, num_tokens=1, max_kv_len=1 << 17)
        parts = one_long / (8 * 16 * (128 + 1) * 4)  # KV heads, rows of a tile, width and LSE, bytes
        assert 1 < parts <= 64
        assert plan.workspace_bytes(num_seqs=1024, num_tokens=1024, max_kv_len=64) == 0


class TestReport:
    def test_calls_are_counted_per_choice(self, ones_and_twos) -> None:
        for _ in range(3):
            kernelhub.attention(*ones_and_twos)
        kernelhub.attention(*ones_and_twos, backend="twos")
        rows = {row.kernel: row for row in kernelhub.report().rows}
        assert (rows["ones.k"].calls, rows["ones.k"].source) == (3, "band")
        assert (rows["twos.k"].calls, rows["twos.k"].source) == (1, "kwarg")
        assert "ones.k" in str(kernelhub.report())
        assert kernelhub.report().to_dict()["rows"][0]["problem"]["head_dim_qk"] == 16

    def test_a_captured_call_counts_once_and_its_replays_do_not(self, monkeypatch) -> None:
        """As a report of a GPU says; the graph and the GPU are made up."""
        register("ones", record("ones.k", "Ones"))
        q, k, v = qkv()
        out = torch.zeros_like(q)
        graph: list[Callable[[], None]] = []
        launch = Ones.launch

        def captured(*arguments: Any) -> None:
            graph.append(lambda: launch(*arguments))

        monkeypatch.setattr(Ones, "launch", captured)
        kernelhub.attention(q, k, v, out=out)
        for _ in range(3):
            graph[0]()
        assert out.eq(1.0).all()
        report = kernelhub.report()
        assert [row.calls for row in report.rows] == [1]
        assert not report.on_gpu
        assert "replays" not in str(report)
        problem = kernelhub.explain(kernelhub.attention, q, k, v, device="H200").problem
        on_gpu = Bound(kernelhub.attention.op.select(problem, "ones"), Ones(problem), print, itertools.count(), 0)
        HUB.ledger.add(on_gpu)
        told = kernelhub.report()
        assert (told.on_gpu, told.to_dict()["on_gpu"]) == (True, True)
        assert "captured in a CUDA graph counts once; replays are not counted" in str(told)

    def test_a_call_that_was_refused_is_not_counted(self, ones_and_twos) -> None:
        kernelhub.attention(*ones_and_twos)
        with pytest.raises(InvalidArgument, match="out"):
            kernelhub.attention(*ones_and_twos, out=ones_and_twos[0])
        assert [row.calls for row in kernelhub.report().rows] == [1]

    def test_a_report_begun_anew_counts_what_is_made_ready_after_it_and_nothing_older(self, ones_and_twos) -> None:
        kernelhub.attention(*ones_and_twos)
        HUB.forget_report()
        kernelhub.attention(*ones_and_twos, backend="twos")
        kernelhub.attention.op._forget()
        kernelhub.attention(*ones_and_twos, backend="ones")
        assert {row.kernel: row.calls for row in kernelhub.report().rows} == {"twos.k": 1, "ones.k": 1}

    def test_problems_that_differ_are_distinguished(self) -> None:
        register("ones", record("ones.k", "Ones"))
        q, k, v = qkv()
        kernelhub.attention(q, k, v)
        assert "q_dtype" not in str(kernelhub.report())
        kernelhub.attention(q.double().half(), k.half(), v.half())
        lines = str(kernelhub.report()).splitlines()[1:]
        assert ["q_dtype=float16" in line for line in lines].count(True) == 1
        assert not any("head_dim_qk" in line for line in lines)


class TestTable:
    def test_a_function_made_for_one_device_passes_others_on(self) -> None:
        register("ones", record("ones.k", "Ones", OnDevice("cpu")))
        register("twos", record("twos.k", "Twos", OnDevice("nvidia")))
        operands = qkv()
        assert answer(*operands) == 1.0
        op = kernelhub.attention.op
        problem = kernelhub.explain(kernelhub.attention, device="H200").problem
        ((key, _),) = op.table.items()
        op.table[key] = op.contract.bind(
            Twos(problem), problem, 0, lambda: 0, lambda device: op.bound_for(key, device, None).run
        )
        launches = Twos.launches
        assert answer(*operands) == 1.0, "the kernel of another device ran"
        assert Twos.launches == launches

    def test_its_size_does_not_depend_on_lengths(self) -> None:
        register("ones", record("ones.k", "Ones"))
        base = torch.zeros(2, 400, 2, 16)
        for tokens in range(17, 400):
            kernelhub.attention(base[:, :tokens], base, base)
        assert len(kernelhub.attention.op.table) == 1

    def test_one_disabled_kernel_runs_nowhere(self) -> None:
        register("ones", record("ones.k", "Ones"), record("ones.k", "Ones", op="paged_attention"))
        Ones.launches = 0
        q, k, v = qkv()
        cache = torch.zeros(2, 4, 2, 16)
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        with kernelhub.use(disable="ones"):
            kernelhub.attention(q, k, v)
            kernelhub.attention.prepare(q, k, v).begin().run(q, k, v)
            kernelhub.paged_attention(q[:, 0], cache, cache, table, lengths)
            plan = kernelhub.paged_attention.prepare(q[:, 0], cache, cache, table, lengths)
            plan.begin(table, lengths).run(q[:, 0], cache, cache)
            torch.compile(lambda q: kernelhub.attention(q, k, v), backend="eager")(q)
            assert kernelhub.explain(kernelhub.attention, q, k, v).selected != "ones.k"
        assert Ones.launches == 0

    def test_requiring_grad_is_refused_on_every_call_not_only_the_first(self) -> None:
        q, k, v = qkv()
        kernelhub.attention(q, k, v)
        with pytest.raises(InvalidArgument, match="requires grad"):
            kernelhub.attention(q.requires_grad_(), k, v)
        with torch.no_grad():
            kernelhub.attention(q, k, v)


@pytest.mark.fault("sixteen_threads")
def test_sixteen_threads_on_first_use_choose_once(ones_and_twos) -> None:
    Twos.launches = 0
    barrier = threading.Barrier(16)

    def first_use() -> float:
        barrier.wait()
        return answer(*ones_and_twos, backend="twos")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert {future.result() for future in [pool.submit(first_use) for _ in range(16)]} == {2.0}
    assert Twos.launches == 16
    assert [row.calls for row in kernelhub.report().rows if row.kernel == "twos.k"] == [16]
