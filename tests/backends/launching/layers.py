"""Calls of an engine's layers, on the stub driver: `python -m tests.backends.launching.layers [NAME ...]`.

The layers are those of kernelhub's backend of vLLM, with stand-ins of vLLM's modules.
"""

from __future__ import annotations

import gc
import importlib
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.autograd import forward_ad

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument
from kernelhub.ops.layer_calls import no_call
from kernelhub.runtime import launch as runtime
from tests.backends.launching.check import believed_on_gpu, counted, on_stub
from tests.backends.launching.stub import OneDevice, Stub, install_launcher, perform

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 8, 2, 64, 16, 6
LAYERS = 5
E4M3 = torch.float8_e4m3fn


class Layer(torch.nn.Module):
    """A layer whose scales are buffers, as vLLM's are."""

    def __init__(self, impl: Any, cache: torch.Tensor) -> None:
        super().__init__()
        self.impl, self.cache = impl, cache
        for name in ("_k_scale", "_v_scale"):
            self.register_buffer(name, torch.ones(1))


class Model:
    """Layers, and the calls of them that reached the kernel's adapter."""

    def __init__(self, module: Any, stub: Stub, met: list[Any], **options: Any) -> None:
        self._module, self._stub, self.met = module, stub, met
        self.fp8 = options.get("kv_cache_dtype", "auto") == "fp8"
        self.sinks = options.pop("sinks", False)
        self.layers = [self._layer(**options) for _ in range(LAYERS)]

    def _layer(self, **options: Any) -> Any:
        sinks = torch.zeros(HEADS, dtype=torch.bfloat16) if self.sinks else None
        impl = self._module.KernelhubImpl(HEADS, WIDTH, 0.2, KV_HEADS, sinks=sinks, **options)
        if self.fp8:
            return Layer(impl, self.cache())
        return SimpleNamespace(impl=impl, cache=self.cache(), _k_scale=torch.ones(1), _v_scale=torch.ones(1))

    def cache(self) -> torch.Tensor:
        cache = torch.zeros(PAGES, PAGE, KV_HEADS, 2 * WIDTH, dtype=torch.bfloat16).transpose(1, 2)
        return cache.to(E4M3).view(torch.uint8) if self.fp8 else cache

    def step(self, sequences: int = 2, each: int = 1, **other: Any) -> Any:
        tokens = sequences * each
        given = {
            "num_actual_tokens": tokens,
            "max_query_len": each,
            "query_start_loc": torch.arange(0, tokens + 1, each, dtype=torch.int32),
            "seq_lens": torch.full((sequences,), 20, dtype=torch.int32),
            "block_table": torch.tensor([[0, 1, 2]] * sequences, dtype=torch.int32),
            "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
            "queries": each,
            "causal": True,
        }
        return self._module.KernelhubMetadata(**given | other)

    def operands(self, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.zeros(rows, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=torch.bfloat16)
        q = wide[:, : HEADS * WIDTH].view(rows, HEADS, WIDTH)
        return q, torch.zeros(rows, HEADS * WIDTH, dtype=torch.bfloat16)

    def arguments(self, step: Any) -> tuple[Any, ...]:
        """Of the op's call that the first layer makes."""
        keys, values = self.layers[0].impl._parts_of(self.layers[0].cache)[2:]
        return self.operands(step.num_actual_tokens)[0], keys, values, step.block_table, step.seq_lens

    def run(self, layer: Any, step: Any, q: Any = None, out: Any = None, cache: Any = None) -> bool:
        """A call, which has to get its very tensors and be counted; whether it reached no adapter."""
        made = self.operands(step.num_actual_tokens)
        q, out = made[0] if q is None else q, made[1] if out is None else out
        cache = layer.cache if cache is None else cache
        self._stub.take()
        calls, counts = len(self.met), counted_calls()
        assert layer.impl.forward(layer, q, None, None, cache, step, output=out) is out
        found = pointers(self._stub)
        k_cache = layer.impl._parts_of(cache)[2]
        tensors = [q, out, k_cache, layer.impl._parts_of(cache)[3], step.block_table, step.seq_lens]
        if self.sinks:
            tensors.append(layer.impl.sinks)
        if self.fp8:
            tensors += [layer._k_scale, layer._v_scale]
        for tensor in tensors:
            assert tensor.data_ptr() in found, "launched with another tensor"
        assert counted_calls() == counts + 1
        return len(self.met) == calls

    def learn(self, step: Any = None) -> None:
        step = self.step() if step is None else step
        for _ in range(3):
            for layer in self.layers:
                self.run(layer, step)
        for layer in self.layers:
            assert self.run(layer, step)
            assert layer.impl._launch is not no_call
            assert layer.impl._launch(*self.operands(step.num_actual_tokens), layer.cache, *shared(step))


def shared(step: Any) -> tuple[Any, ...]:
    return step.form, step.block_table, step.seq_lens


def counted_calls() -> int:
    return sum(row.calls for row in kernelhub.report().rows)


@contextmanager
def modelling(stub: Stub, **options: Any) -> Iterator[Model]:
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    op = kernelhub.paged_attention
    kernelhub.configure(paged_attention="triton.split_kv")
    module = importlib.import_module("kernelhub.compat.vllm.attention")
    with believed_on_gpu(op.op):
        probe = torch.zeros(2, HEADS, WIDTH, dtype=torch.bfloat16)
        caches = torch.zeros(2, PAGES, PAGE, KV_HEADS, WIDTH, dtype=torch.bfloat16)
        table = torch.zeros(2, 3, dtype=torch.int32)
        adapter = type(kernelhub.paged_attention.prepare(probe, *caches, table, table[:, 0].contiguous()).adapter)
        with counted(adapter) as met:
            small = adapter._launch_anew

            def with_metadata(self: Any, *operands: Any) -> None:
                small(self, *operands, operands[3].block_table, operands[3].seq_lens)

            adapter._launch_anew = with_metadata
            try:
                op.op._forget()
                yield Model(module, stub, met, **options)
            finally:
                del adapter._launch_anew
    kernelhub.configure()


def taken(model: Model, layer: Any, step: Any, *given: Any, cache: Any = None) -> bool:
    """Whether the extension would make a call at once."""
    q, out = given or model.operands(step.num_actual_tokens)
    return bool(layer.impl._launch(q, out, layer.cache if cache is None else cache, *shared(step)))


def steps(stub: Stub) -> None:
    """Layers in turn, over steps and batches, are launched with their own tensors and those of the step."""
    for options in ({}, {"sinks": True, "sliding_window": 7}, {"kv_cache_dtype": "fp8", "logits_soft_cap": 3.0}):
        with modelling(stub, **options) as model:
            for sequences in (2, 3, 1):
                model.learn(model.step(sequences))
            for sequences in (2, 3, 1, 2, 1, 3):
                step = model.step(sequences)
                for layer in model.layers:
                    assert taken(model, layer, step)
                    assert model.run(layer, step)


def speculation(stub: Stub) -> None:
    """Several queries of each sequence, and rows of padding, are part of the form."""
    with modelling(stub) as model:
        model.learn(model.step(2, 3))
        model.learn(model.step(6, 1))
        for step in (model.step(2, 3), model.step(6, 1)):
            for layer in model.layers:
                assert taken(model, layer, step)
                assert model.run(layer, step)
        padded = model.operands(8)
        for _ in range(3):
            model.run(model.layers[0], model.step(6, 1), *padded)
        assert model.run(model.layers[0], model.step(6, 1), *padded)
        ragged = model.step(2, 3, queries=0)
        assert ragged.form is None
        assert not taken(model, model.layers[0], ragged)
        assert not taken(model, model.layers[0], model.step(3, 2))


def operands(stub: Stub) -> None:
    """Queries and destinations of another form, and memory that overlaps, take the way of all calls."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer, (q, out) = model.layers[0], model.operands()
        assert taken(model, layer, step, q, out)
        packed = torch.zeros(2, HEADS, WIDTH, dtype=torch.bfloat16)
        for other in (packed, packed.transpose(1, 2).contiguous().transpose(1, 2), packed[:1].expand(2, -1, -1)):
            assert not taken(model, layer, step, other, out)
            model.run(layer, step, other, out)
        assert not taken(model, layer, step, q, out.view(2, HEADS, WIDTH))
        model.run(layer, step, q, out.view(2, HEADS, WIDTH))
        memory = torch.zeros(2 * q.untyped_storage().nbytes(), dtype=torch.uint8).view(torch.bfloat16)
        wrong = [
            (q, q.new_empty(0).set_(q.untyped_storage(), 64, out.shape), InvalidArgument),
            (q, layer.cache.new_empty(0).set_(layer.cache.untyped_storage(), 0, out.shape), InvalidArgument),
            (q.half(), out, InvalidArgument),
            (q, out.half(), InvalidArgument),
            (q.detach().requires_grad_(), out, InvalidArgument),
            (torch.nested.nested_tensor([q[0], q[1]]), out, Exception),
            (q[:1], out, Exception),
            (q, memory[: out.numel()].view(out.shape)[:, ::2], Exception),
            (q.to("meta"), out, Exception),
            (None, out, Exception),
        ]
        for given, into, error in wrong:
            assert not taken(model, layer, step, given, into)
            with pytest.raises(error):
                layer.impl.forward(layer, given, None, None, layer.cache, step, output=into)
        assert taken(model, layer, step)
        assert model.run(layer, step, q, out)


def caches(stub: Stub) -> None:
    """Another cache, sinks, scales and factor of a layer are used from the next call on."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer, other = model.layers[0], model.cache()
        assert not taken(model, layer, step, cache=other)
        model.run(layer, step, cache=other)
        layer.cache = other
        model.run(layer, step)
        assert taken(model, layer, step)
        module = importlib.import_module("kernelhub.compat.vllm.attention")
        module.forget(layer.impl)
        assert not taken(model, layer, step)
        model.run(layer, step)
        assert taken(model, layer, step)
        layer.impl.scale = 0.3
        assert not taken(model, layer, step)
        assert not model.run(layer, step)
        assert model.met[-1][4].scale == 0.3
        assert model.run(model.layers[1], step)
        with pytest.raises(NotImplementedError):
            layer.impl.forward(layer, *model.operands()[:1], None, None, other, step, step, torch.ones(1))
    with modelling(stub, sinks=True) as model:
        model.learn(step)
        model.layers[0].impl.sinks = torch.ones(HEADS, dtype=torch.bfloat16)
        assert not taken(model, model.layers[0], step)
        for _ in range(2):
            model.run(model.layers[0], step)
    with modelling(stub, kv_cache_dtype="fp8") as model:
        model.learn(step)
        model.layers[0]._k_scale = torch.full((1,), 0.5)
        for _ in range(3):
            model.run(model.layers[0], step)
        assert model.run(model.layers[1], step)


def metadata(stub: Stub) -> None:
    """Other tensors of a step, in its form or another, are those that are launched with."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        for name in ("seq_lens", "block_table"):
            setattr(step, name, getattr(step, name).clone())
            assert all(model.run(layer, step) for layer in model.layers)
        for table in (
            torch.zeros(2, 4, dtype=torch.int32),
            torch.zeros(2, 6, dtype=torch.int32)[:, ::2],
            torch.zeros(2, 6, dtype=torch.int32)[:, :3],
        ):
            other = model.step(block_table=table)
            assert not taken(model, model.layers[0], other)
            if table.stride(1) == 1:
                model.run(model.layers[0], other)
        short = model.step(seq_lens=torch.ones(3, dtype=torch.int32))
        assert not taken(model, model.layers[0], short)
        with pytest.raises(InvalidArgument, match="seq_lens"):
            model.run(model.layers[0], short)
        assert all(model.run(layer, model.step()) for layer in model.layers)


def process(stub: Stub) -> None:
    """Settings, contexts, forward differentiation, hooks, devices, captures and inference mode are noticed."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer = model.layers[0]
        with kernelhub.use(paged_attention="triton.split_kv"):
            assert not taken(model, layer, step)
            model.run(layer, step)
        assert taken(model, layer, step)
        with forward_ad.dual_level():
            assert not taken(model, layer, step)
        with torch.inference_mode():
            assert not taken(model, layer, step)
        assert taken(model, layer, step)
        for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
            hook.add(print)
            assert not taken(model, layer, step)
            hook.remove(print)
            assert taken(model, layer, step)
        triton.knobs.runtime.launch_enter_hook = print
        assert not taken(model, layer, step)
        del triton.knobs.runtime.launch_enter_hook
        OneDevice.current = 1
        assert not taken(model, layer, step)
        OneDevice.current = 0
        assert taken(model, layer, step)
        streams = OneDevice.stream_of
        OneDevice.stream_of = staticmethod(lambda device: 4711)
        stub.take()
        assert taken(model, layer, step)
        assert {one.stream for one in stub.take()} == {4711}
        OneDevice.stream_of = staticmethod(streams)
        for change in (HUB.forget_selections, lambda: kernelhub.configure(paged_attention="triton"), HUB.reload):
            change()
            assert not taken(model, layer, step)
            model.learn(step)
        HUB.forget_device(-1)
        assert not taken(model, layer, step)


def errors(stub: Stub) -> None:
    """An error of the driver is raised with the kernel's name and not counted; the next call is made."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer, counts = model.layers[0], counted_calls()
        stub.fail(700)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS, 700") as raised:
            layer.impl.forward(layer, model.operands()[0], None, None, layer.cache, step, output=model.operands()[1])
        assert any("raised by kernel triton" in note for note in raised.value.__notes__)
        assert counted_calls() == counts
        assert model.run(layer, step)


def wrong(stub: Stub) -> None:
    """What Python gives the extension is checked."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer, native, calls = model.layers[0], runtime.native(), kernelhub.paged_attention.op.calls
        launch, (q, out) = layer.impl._launch, model.operands()
        assert launch(q, out, layer.cache, None) is False
        with pytest.raises(TypeError):
            launch(q, out)
        with pytest.raises(TypeError):
            launch(q, out, layer.cache, [])
        assert launch(q, out, layer.cache, *shared(step)[:2]) is False
        module = native.module
        for given in (
            (calls, {}, None, ()),
            (calls, {}, None, (q,) * 9),
            (None, {}, None, (q,)),
            (calls, [], None, (q,)),
        ):
            with pytest.raises((TypeError, ValueError)):
                module.Layer(*given)
        bad = module.Layer(calls, {step.form: q}, layer.cache, (q,))
        with pytest.raises(TypeError):
            bad.launch(q, out, layer.cache, *shared(step))
        empty = module.Layer.__new__(module.Layer)
        with pytest.raises(TypeError):
            empty.launch(q, out, None, *shared(step))
        with pytest.raises((TypeError, ValueError)):
            module.Layers(calls, None, None, None, None, (), (), print, print)
        one = module.Known(native.driver, lambda *tensors: True, 1, (0,), (), ())
        with pytest.raises((TypeError, ValueError)):
            module.Layers(calls, one, one, one, one, (), (), print, print)


def threads(stub: Stub) -> None:
    """Threads run layers of their own, while selections are forgotten."""
    with modelling(stub) as model:
        model.learn()
        done, failures = threading.Event(), []

        def work(layer: Any, sequences: int) -> None:
            try:
                while not done.is_set():
                    step = model.step(sequences)
                    for _ in range(3):
                        q, out = model.operands(sequences)
                        assert layer.impl.forward(layer, q, None, None, layer.cache, step, output=out) is out
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(layer, 1 + at % 2)) for at, layer in enumerate(model.layers[:4])]
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
    """Calls keep nothing alive but the last step's tensors, and a forgotten layer not its cache."""
    with modelling(stub) as model:
        step = model.step()
        model.learn(step)
        layer, (q, out) = model.layers[0], model.operands()
        launch = layer.impl._launch
        tracked = [q, out, layer.cache, step.form, step.block_table, step.seq_lens, launch.__self__, True, False]
        gc.collect()
        before, objects = [sys.getrefcount(one) for one in tracked], len(gc.get_objects())
        for _ in range(1000):
            assert launch(q, out, layer.cache, *shared(step))
            assert not launch(q, out, None, *shared(step))
        after = [sys.getrefcount(one) for one in tracked]
        assert all(abs(a - b) < 20 for a, b in zip(before, after, strict=True)), (before, after)
        assert len(gc.get_objects()) < objects + 100
        references = sys.getrefcount(layer.cache)
        importlib.import_module("kernelhub.compat.vllm.attention").forget(layer.impl)
        del launch, tracked
        gc.collect()
        assert sys.getrefcount(layer.cache) < references
        stub.take()


def loading(stub: Stub) -> None:
    """The first call of a process loads the launcher; calls like it are made at once, as those of later kernels are."""
    with modelling(stub) as model:
        step, op = model.step(), kernelhub.paged_attention.op
        op._calls, op.again = None, None
        HUB.known_of = HUB.calls_of = HUB.layers_of = None
        adapter = type(kernelhub.paged_attention.prepare(*model.arguments(step), scale=0.2).adapter)
        anew = adapter._launch_anew

        def first(self: Any, *operands: Any) -> None:
            if HUB.layers_of is None:
                runtime.recognise_in_c(runtime.native())
            anew(self, *operands)

        adapter._launch_anew = first
        try:
            model.learn(step)
        finally:
            adapter._launch_anew = anew
        assert op.before is not None


def latent(stub: Stub) -> None:
    """Layers of latent attention: results of their own, other caches and steps, several queries, settings."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    op, module = kernelhub.mla_attention, importlib.import_module("kernelhub.compat.vllm.mla")
    kernelhub.configure(mla_attention="triton")
    names = "alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"
    given = {"attn_type": "decoder", "kv_cache_dtype": "auto", "kv_lora_rank": 64, **dict.fromkeys(names)}
    impls = [module.KernelhubMlaImpl(4, 96, 0.1, 1, **given) for _ in range(3)]
    pages = [torch.zeros(PAGES, PAGE, 96, dtype=torch.bfloat16) for _ in impls]
    table, half = torch.zeros(2, 3, dtype=torch.int32), {"dtype": torch.bfloat16}
    metadata = SimpleNamespace(
        causal=True, decode=SimpleNamespace(block_table=table, seq_lens=torch.full((2,), 20, dtype=torch.int32))
    )
    with believed_on_gpu(op.op):
        plan = op.prepare(
            torch.zeros(2, 4, 96, **half), pages[0], table, table[:, 0].contiguous(), scale=0.1, value_dim=64
        )
        with counted(type(plan.adapter)) as met:
            op.op._forget()

            def run(at: int, q: Any = None, cache: Any = None) -> tuple[Any, bool]:
                q = torch.zeros(2, 4, 96, **half) if q is None else q
                cache = pages[at] if cache is None else cache
                stub.take()
                calls, counts = len(met), counted_calls()
                out, lse = impls[at].forward_mqa(q, cache, metadata, None)
                found = pointers(stub)
                assert {q.data_ptr(), out.data_ptr(), cache.data_ptr()} <= found
                assert lse is None and out.shape == (*q.shape[:2], 64) and counted_calls() == counts + 1  # noqa: PT018
                return out, len(met) == calls

            for _ in range(4):
                for at in range(3):
                    run(at)
            made = [run(at) for at in range(3)]
            assert all(quick for _, quick in made)
            assert all(impl._launch is not no_call for impl in impls)
            assert len({out.data_ptr() for out, _ in made}) == 3
            other = torch.zeros_like(pages[0])
            run(0, cache=other)
            assert run(0)[0] is not run(0, cache=other)[0]
            run(0, torch.zeros(2, 96, 4, **half).transpose(1, 2))
            run(0, torch.zeros(6, 4, 96, **half))
            with pytest.raises(InvalidArgument):
                run(0, torch.zeros(2, 4, 96))
            with pytest.raises((InvalidArgument, RuntimeError)):
                run(0, torch.zeros(3, 4, 96, **half))
            metadata.decode = SimpleNamespace(block_table=table.clone(), seq_lens=metadata.decode.seq_lens.clone())
            assert all(run(at)[1] for at in (1, 2))
            impls[1].scale = 0.2
            assert not run(1)[1]
            HUB.forget_selections()
            assert not run(2)[1]
            module.forget(impls[2])
            assert impls[2]._launch is no_call
    kernelhub.configure()


def writes(stub: Stub) -> None:
    """Layers write their caches in turn, with their own tensors, rows of padding, and other slots in each step."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    kernelhub.configure(write_kv_cache="triton")
    module = importlib.import_module("kernelhub.compat.vllm.attention")
    with believed_on_gpu(kernelhub.write_kv_cache.op):
        _writes(stub, Model(module, stub, []))
        _writes(stub, Model(module, stub, [], kv_cache_dtype="fp8"))
    kernelhub.configure()


def _writes(stub: Stub, model: Model) -> None:
    def split(rows: int, memory: Any = None) -> tuple[torch.Tensor, ...]:
        wide = torch.zeros(rows, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=torch.bfloat16) if memory is None else memory
        _, k, v = wide.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], 1)
        return k.view(rows, KV_HEADS, WIDTH), v.view(rows, KV_HEADS, WIDTH)

    def run(layer: Any, rows: int, slots: torch.Tensor, given: Any = None, cache: Any = None) -> bool:
        k, v = split(rows) if given is None else given
        cache = layer.cache if cache is None else cache
        stub.take()
        calls, counts = len(met), counted_calls()
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
        tensors = [k, v, slots, *layer.impl._parts_of(cache)]
        tensors += [layer._k_scale, layer._v_scale] if model.fp8 else []
        assert {tensor.data_ptr() for tensor in tensors} <= pointers(stub), "written with another tensor"
        assert counted_calls() == counts + 1
        return len(met) == calls

    def at_once(layer: Any, slots: torch.Tensor, given: Any = None) -> bool:
        """Whether the extension would make the call at once."""
        k, v = split(len(slots)) if given is None else given
        return bool(layer.impl._written._launch(k, v, layer.cache, len(slots), slots))

    for layer in model.layers:
        layer.impl._writes = True  # `explain` sees no GPU here
    op, new = kernelhub.write_kv_cache, torch.zeros(2, KV_HEADS, WIDTH, dtype=torch.bfloat16)
    scales = (torch.ones(1), torch.ones(1)) if model.fp8 else ()
    plan = op.prepare(new, new, *model.layers[0].impl._parts_of(model.cache())[2:], torch.arange(2), *scales)
    with counted(type(plan.adapter)) as met:
        op.op._forget()
        for rows, tokens in ((2, 2), (8, 6), (3, 3)):
            for _ in range(4):
                for layer in model.layers:
                    run(layer, rows, torch.arange(tokens))
        for rows, tokens in ((2, 2), (3, 3), (8, 6), (2, 2)):
            slots = torch.tensor([3, 9, -1, 4, 0, -1])[:tokens]
            assert all(run(layer, rows, slots) for layer in model.layers)
            assert all(at_once(layer, slots, split(rows)) for layer in model.layers)
        layer, slots = model.layers[0], torch.arange(2)
        wrong = [
            (split(2), torch.zeros(2, dtype=torch.int32), "slot_mapping"),
            ([one.half() for one in split(2)], slots, "k_cache" if not model.fp8 else None),
            ((split(2)[0], split(2)[1].float()), slots, "v has dtype"),
            ((split(2)[0], split(3)[1]), slots, "v has shape"),
            (([one.requires_grad_() for one in split(2)]), slots, "k"),
            (split(2, new.new_empty(0).set_(layer.cache.untyped_storage(), 0, (2, 12 * WIDTH))), slots, "_cache"),
        ]
        for given, at, text in wrong:
            assert not at_once(layer, at, given), text
            if text is not None:
                with pytest.raises(InvalidArgument, match=text):
                    run(layer, 2, at, given)
        packed = torch.zeros(2, 2, KV_HEADS, WIDTH, dtype=torch.bfloat16).unbind(0)
        assert not at_once(layer, slots, packed)
        run(layer, 2, slots, packed)
        assert not at_once(layer, torch.arange(4)[::2])
        assert at_once(layer, slots)
        before, other = layer.cache, model.cache()
        run(layer, 2, slots, cache=other)
        assert not at_once(layer, slots)
        layer.cache = other
        assert at_once(layer, slots)
        layer.cache = before
        run(layer, 2, slots)
        if model.fp8:
            layer._v_scale = torch.full((1,), 0.5)
            for _ in range(3):
                run(layer, 2, slots)
            assert at_once(layer, slots)
            assert layer.impl._written_scales.are_of(layer)
            for change in (_as_parameter, _as_attribute):
                change(layer)
                assert not layer.impl._written_scales.are_of(layer)
                for _ in range(4):
                    run(layer, 2, slots)
                assert layer.impl._written_scales.are_of(layer)
            assert at_once(layer, slots)
        with kernelhub.use(write_kv_cache="triton"):
            assert not at_once(layer, slots)
            run(layer, 2, slots)
        for change in (HUB.forget_selections, HUB.reload):
            change()
            assert not at_once(layer, slots)
            for _ in range(4):
                run(layer, 2, slots)
            assert at_once(layer, slots)
        counts = counted_calls()
        stub.fail(700)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS, 700") as raised:
            layer.impl.do_kv_cache_update(layer, *split(2), layer.cache, slots)
        assert any("raised by kernel triton" in note for note in raised.value.__notes__)
        assert counted_calls() == counts
        assert run(layer, 2, slots)
        many = torch.arange(600) % (PAGES * PAGE)
        many[PAGES * PAGE :] = -1
        for _ in range(4):
            run(layer, 600, many)
        assert not at_once(layer, many)  # prompts are not remembered
        stub.take()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys.modules[type(layer.impl).__module__], "reshape_and_cache_flash", lambda *given: met.append(given)
            )
            layer.impl._writes = False
            calls = len(met)
            layer.impl.do_kv_cache_update(layer, *split(2), layer.cache, slots)
            assert len(met) == calls + 1
            assert not stub.take()
        layer.impl._writes = True
        assert run(layer, 2, slots)
        sys.modules[type(layer.impl).__module__].forget(layer.impl)
        assert not at_once(layer, slots)


def _as_parameter(layer: Any) -> None:
    del layer._k_scale
    layer._k_scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)


def _as_attribute(layer: Any) -> None:
    del layer._k_scale
    object.__setattr__(layer, "_k_scale", torch.ones(1))


def pointers(stub: Stub) -> set[int]:
    return {struct.unpack("<Q", value)[0] for one in stub.take() for value in one.parameters}


def graphs(stub: Stub) -> None:
    """The same as CUDA graphs: what the driver is given is what a plain launch would be."""
    install_launcher(stub, graph_after=1, least=1)
    steps(stub)
    process(stub)
    latent(stub)
    writes(stub)
    stub.take_graph_calls()
    install_launcher(stub)


SCENARIOS = (
    steps,
    speculation,
    operands,
    caches,
    metadata,
    process,
    errors,
    wrong,
    threads,
    leaks,
    loading,
    latent,
    writes,
    graphs,
)


def main(names: list[str]) -> None:
    from tests.compat.test_vllm_plugin import FILES

    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder, "vllm", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(folder).parents:
                if parent.name:
                    Path(folder, parent, "__init__.py").touch()
            path.write_text(text)
        sys.path.insert(0, folder)
        perform(SCENARIOS, names)


if __name__ == "__main__":
    main(sys.argv[1:])
