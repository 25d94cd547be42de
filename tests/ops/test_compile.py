"""The ops under torch.compile, torch.export and fake tensors: one opaque operator, never a frozen choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops import functions
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import AttentionModel
from tests.conftest import DEVICE
from tests.dispatch.backends import record, register

SMALL = AttentionModel("small", 4, 2, 32, 32)
SINKS = AttentionModel("small with sinks", 4, 2, 32, 32, window=7, sinks=True)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


class TestCompile:
    @pytest.mark.parametrize("model", [SMALL, SINKS], ids=str)
    def test_attention_compiles_at_most_two_graphs_over_batch_sizes(self, model: AttentionModel) -> None:
        run, counter = compiled(lambda arguments: kernelhub.attention(**arguments) * 2)
        for batch in (1, 3, 4, 5, 9, 17):
            arguments = attention_inputs(model, batch=batch, q_tokens=20, dtype=torch.float32, device=DEVICE)
            assert torch.equal(run(arguments), kernelhub.attention(**arguments) * 2)
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("model", [SMALL, SINKS], ids=str)
    def test_paged_attention_compiles_at_most_two_graphs_over_batch_sizes(self, model: AttentionModel) -> None:
        run, counter = compiled(lambda arguments: kernelhub.paged_attention(**arguments) + 1)
        for batch in (1, 2, 3, 5, 8):
            arguments = paged_attention_inputs(model, seq_lens=(30,) * batch, dtype=torch.float32, device=DEVICE)
            assert torch.equal(run(arguments), kernelhub.paged_attention(**arguments) + 1)
        assert counter.frame_count <= 2

    def test_merge_compiles_at_most_two_graphs_over_sizes(self) -> None:
        run, counter = compiled(lambda a: kernelhub.merge_attention_states(**a, return_lse=True)[0] * 2)
        for tokens in (1, 3, 4, 9, 17):
            arguments = merge_inputs(tokens=tokens, num_heads=3, head_dim=16, device=DEVICE)
            assert torch.equal(run(arguments), kernelhub.merge_attention_states(**arguments) * 2)
        assert counter.frame_count <= 2

    def test_merge_in_place_goes_through(self) -> None:
        run, counter = compiled(lambda outs, lses: kernelhub.merge_attention_states(outs, lses, outs[0], lses[1]))
        arguments = merge_inputs(tokens=5, num_heads=3, head_dim=16, device=DEVICE)
        want, want_lse = kernelhub.merge_attention_states(**arguments, return_lse=True)
        got, lse = run(arguments["outs"], arguments["lses"])
        for tensor, wanted in (
            (got, want),
            (arguments["outs"][0], want),
            (lse, want_lse),
            (arguments["lses"][1], want_lse),
        ):
            assert torch.equal(tensor, wanted)
        assert counter.frame_count == 1

    def test_concat_compiles_at_most_two_graphs_and_writes_in_place(self) -> None:
        run, counter = compiled(lambda a, out: kernelhub.concat_mla_k(**a, out=out) * 2)
        made, _ = compiled(lambda a: kernelhub.concat_mla_k(**a) * 2)
        for tokens in (2, 3, 9, 17):
            arguments = concat_inputs(tokens=tokens, num_heads=3, nope_dim=16, rope_dim=8, device=DEVICE)
            want = kernelhub.concat_mla_k(**arguments)
            out = torch.full_like(want, torch.nan)
            assert torch.equal(run(arguments, out), want * 2)
            assert torch.equal(out, want)
            assert torch.equal(made(arguments), want * 2)
        assert counter.frame_count <= 2

    def test_lse_and_out_and_a_named_backend_go_through(self) -> None:
        arguments = attention_inputs(SMALL, batch=2, q_tokens=9, dtype=torch.float32, device=DEVICE)
        want, want_lse = kernelhub.attention(**arguments, return_lse=True, backend="torch.blocked")
        run, counter = compiled(
            lambda a, out: kernelhub.attention(**a, return_lse=True, out=out, backend="torch.blocked")
        )
        out = torch.full_like(want, torch.nan)
        got, lse = run(arguments, out)
        assert got is out
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        assert counter.frame_count == 1

    def test_a_selection_made_after_compiling_is_honoured(self) -> None:
        register("ones", record("ones.k", "Ones"))
        arguments = attention_inputs(SMALL, batch=2, q_tokens=9, dtype=torch.float32, device=DEVICE)
        run, counter = compiled(lambda a: kernelhub.attention(**a) * 1.0)
        assert float(run(arguments).mean()) == 1.0
        with kernelhub.use(disable="ones"):
            assert torch.equal(run(arguments), kernelhub.attention(**arguments))
        kernelhub.configure(disable="ones")
        assert float(run(arguments).mean()) != 1.0
        assert counter.frame_count == 1

    def test_a_context_inside_the_compiled_region_is_refused_with_what_to_do(self) -> None:
        def inside(q: torch.Tensor) -> torch.Tensor:
            with kernelhub.use(attention="torch"):
                return kernelhub.attention(q, q, q)

        # dynamo before 2.10 names the class of an exception raised while tracing, not its words
        with pytest.raises(Exception, match=r"enter it around the compiled call|\(ConfigurationError\)"):
            torch.compile(inside, fullgraph=True, backend="eager")(torch.zeros(1, 4, 2, 16))

    def test_plans_run_inside_a_compiled_region(self) -> None:
        arguments = attention_inputs(SMALL, batch=2, q_tokens=9, dtype=torch.float32, device=DEVICE)
        q, k, v = (arguments[name] for name in "qkv")
        plan = kernelhub.attention.prepare(q, k, v, causal=True, window=4)
        step = plan.begin()
        want = kernelhub.attention(q, k, v, causal=True, window=4) * 2
        for call in (lambda q: plan.run(q, k, v) * 2, lambda q: step.run(q, k, v) * 2):
            run, counter = compiled(call)
            assert torch.equal(run(q), want)
            assert counter.frame_count == 1
            assert "kernelhub.attention" in counter.graphs[0].code

    def test_paged_plans_do_too(self) -> None:
        arguments = paged_attention_inputs(SINKS, seq_lens=(30, 12), q_lens=3, dtype=torch.float32, device=DEVICE)
        operands = [arguments[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
        features = {"window": arguments["window"], "sinks": arguments["sinks"]}
        plan = kernelhub.paged_attention.prepare(*operands, **features)
        step = plan.begin(*operands[3:])
        want = kernelhub.paged_attention(*operands, **features) * 2
        for call in (lambda q: plan.run(q, *operands[1:]) * 2, lambda q: step.run(q, *operands[1:3]) * 2):
            run, counter = compiled(call)
            assert torch.equal(run(operands[0]), want)
            assert "kernelhub.paged_attention" in counter.graphs[0].code


class TestFakeTensors:
    def test_they_give_the_shapes_dtypes_and_device_of_the_real_call(self) -> None:
        with FakeTensorMode():
            q = torch.empty(7, 8, 64, dtype=torch.bfloat16, device="cuda")
            k_cache = torch.empty(30, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
            v_cache = torch.empty(30, 16, 2, 32, dtype=torch.bfloat16, device="cuda")
            table = torch.empty(7, 4, dtype=torch.int32, device="cuda")
            lengths = torch.empty(7, dtype=torch.int32, device="cuda")
            out, lse = kernelhub.paged_attention(q, k_cache, v_cache, table, lengths, return_lse=True)
            assert (tuple(out.shape), out.dtype, out.device.type) == ((7, 8, 32), torch.bfloat16, "cuda")
            assert (tuple(lse.shape), lse.dtype) == ((8, 7), torch.float32)
            dense = torch.empty(2, 5, 8, 64, device="cuda")
            assert tuple(kernelhub.attention(dense, dense, dense).shape) == (2, 5, 8, 64)

    def test_explain_takes_them_for_a_device_that_is_not_here(self) -> None:
        with FakeTensorMode():
            q = torch.empty(2, 100, 8, 64, dtype=torch.bfloat16)
            selection = kernelhub.explain(kernelhub.attention, q, q, q, device="H200", causal=True)
        assert selection.problem.device.family == "hopper"
        assert selection.problem.causal

    def test_the_operators_pass_torch_s_own_check(self) -> None:
        arguments = attention_inputs(SMALL, batch=1, q_tokens=5, dtype=torch.float32)
        q, k, v = (arguments[name] for name in "qkv")
        features = (True, None, None, None, None, None, None, None, None, True, None)
        operands = (q, k, v, None, None, None, None, *features)
        torch.library.opcheck(torch.ops.kernelhub.attention.default, operands)
        torch.library.opcheck(torch.ops.kernelhub.attention_out.default, (*operands, torch.empty_like(q)))

    def test_a_module_that_calls_an_op_can_be_exported(self) -> None:
        class Layer(torch.nn.Module):
            def forward(self, q: torch.Tensor) -> torch.Tensor:
                return kernelhub.attention(q, q, q, causal=True, window=3) + 1

        q = torch.randn(2, 9, 4, 16)
        batch = torch.export.Dim("batch", min=2, max=64)
        program = torch.export.export(Layer(), (q,), dynamic_shapes=({0: batch},))
        assert any("kernelhub.attention" in str(node.target) for node in program.graph.nodes)
        larger = torch.randn(5, 9, 4, 16)
        assert torch.equal(program.module()(larger), Layer()(larger))


@pytest.mark.parametrize("op", functions(), ids=lambda op: op.__name__)
def test_what_is_traced_has_the_parameters_of_the_op(op) -> None:
    assert inspect.signature(op._torchdynamo_inline) == inspect.signature(op)


@pytest.mark.parametrize(
    ("args", "named", "words"),
    [
        ((2, "softmax"), {}, "positional"),
        ((2,), {"top_k": 2}, "multiple values"),
        ((2,), {"scroing": "softmax"}, "unexpected keyword"),
        ((), {}, "top_k"),
    ],
)
def test_arguments_that_the_op_does_not_take_are_refused_where_it_is_traced(args, named, words) -> None:
    """As Python refuses them where the op is called."""
    logits = torch.randn(3, 8)
    for call in (kernelhub.route_experts, kernelhub.route_experts._torchdynamo_inline):
        with pytest.raises(TypeError, match=words):
            call(logits, *args, **named)
