"""A call like one before is let through by its form and its addresses; others are checked as if they were the first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.ops.models.shapes import AttentionModel, LinearModel
from kernelhub.runtime import launch

SIZES: dict[str, dict[str, Any]] = {
    "quantize_fp8": {"tokens": 3, "width": 256},
    "quantize_mxfp4": {"tokens": 3, "width": 256},
    "quantize_mxfp8": {"tokens": 3, "width": 256},
    "quantize_nvfp4": {"tokens": 3, "width": 256},
    "rms_norm_quant": {"tokens": 3, "width": 256},
    "silu_and_mul_quant": {"tokens": 3, "width": 256},
    "write_kv_cache": {"tokens": 3},
    "write_kv_cache, rotated": {"tokens": 3, "rope": "neox"},
    "write_mla_cache": {"tokens": 3},
    "concat_mla_k": {"tokens": 3},
    "route_experts": {"tokens": 3},
    "mqa_logits": {"tokens": 3, "keys": 16},
    "topk_indices": {"tokens": 3, "keys": 16, "k": 4},
    "paged_mqa_logits": {"seq_lens": (20, 61)},
    "paged_mqa_logits, scales in pages": {"seq_lens": (20, 61), "fused": True},
    "dequantize_fp8": {"tokens": 3, "width": 256},
    "dequantize_mxfp4": {"tokens": 3, "width": 256},
    "dequantize_mxfp8": {"tokens": 3, "width": 256},
    "dequantize_nvfp4": {"tokens": 3, "width": 256},
    "fp8_gemm": {"tokens": 3, "n": 128, "k": 128},
    "fp4_gemm": {"tokens": 3, "n": 128, "k": 128},
    "grouped_gemm": {"n": 64, "k": 128},
    "mla_attention": {"seq_lens": (5, 9)},
    "linear_attention": {
        "model": LinearModel("small", num_heads=2, head_dim=32, value_dim=32),
        "batch": 2,
        "tokens": 1,
        "slots": (1, 0),
    },
    "all_reduce": {"tokens": 3},
    "all_gather": {"tokens": 3},
    "all_reduce_rms_norm": {"tokens": 3, "hidden_size": 256},
    "all_reduce_rms_norm, quantised": {"tokens": 3, "hidden_size": 256, "format": "nvfp4"},
    "moe_dispatch": {"tokens": 3, "hidden_size": 256, "num_experts": 8, "top_k": 2, "max_tokens": 4},
    "moe_dispatch, into an earlier result": {
        "tokens": 3,
        "hidden_size": 256,
        "num_experts": 8,
        "top_k": 2,
        "max_tokens": 4,
        "format": "contiguous",
    },
    "moe_combine": {"tokens": 3, "hidden_size": 256, "num_experts": 8, "top_k": 2, "max_tokens": 4},
    "fused_moe": {
        "tokens": 3,
        "num_experts": 4,
        "hidden_size": 128,
        "intermediate_size": 128,
        "top_k": 2,
        "weights": "fp8_block",
    },
}
# Calls that are also, or only, recognised where they are launched at once.
LAUNCHED: dict[str, dict[str, Any]] = {
    "bmm_fp8": {"batch": 2, "tokens": 2, "n": 16, "k": 16, "a_scaling": "batch", "b_scaling": "batch"},
    "attention": {"q_tokens": 3, "model": AttentionModel("small", 2, 1, 32, 32)},
}
MORE: dict[str, dict[str, Any]] = {
    "linear_attention": {"return_state": True},
    "quantize_fp8": {"granularity": "group"},
    "rms_norm_quant": {"format": "fp8_group", "residual": torch.randn(3, 256, dtype=torch.bfloat16)},
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls were known, the newest last."""
    told: list[bool] = []
    holds = KnownCalls.holds

    def telling(self: KnownCalls, key: Any, given: Any) -> bool:
        told.append(holds(self, key, given))
        return told[-1]

    monkeypatch.setattr(KnownCalls, "holds", telling)
    return told


def call_of(name: str) -> tuple[Any, dict[str, Any]]:
    """An op and the arguments of a small call with destinations."""
    op = getattr(kernelhub, name.partition(",")[0])
    module, _, make = op.op.contract.example.partition(":")
    made = getattr(importlib.import_module(module), make)(**(SIZES | LAUNCHED)[name], device="cpu")
    if name.startswith("dequantize"):
        results = getattr(kernelhub, name[2:])(**made)
        made = dict(zip(("x", "scale", "global_scale"), results, strict=False))
    given = made | MORE.get(name, {})
    parameters = inspect.signature(op).parameters
    names = [one for one in parameters if one in ("out", "residual_out") or one[:4] == "out_"]
    names.sort(key=lambda one: "residual" in one)  # the last result
    if "format" in parameters and given.get("format") is None:
        names = [one for one in names if one != "out_scale"]
    results = op(**given)
    results = results if type(results) is tuple else (results,)
    names = [one for one in names if one != "out_dtype" and name != "moe_dispatch"]
    return op, given | dict(zip(names, results, strict=False))


def others_than(tensor: Tensor, name: str, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What may be given in place of a tensor: wrong, or right in another form."""
    yield "nothing", None
    yield "text", "x"
    yield "a list", [1.0]
    yield "meta", tensor.to("meta")
    yield "another dtype", tensor.to(torch.float64)
    yield "another rank", tensor.unsqueeze(0)
    yield "fewer", tensor[..., :-1]
    yield "fewer rows", tensor[:-1]
    apart = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
    yield "other strides", apart.copy_(tensor)
    makers: dict[str, Callable[[], Any]] = {
        "sparse": lambda: tensor.to_sparse(),
        "compressed": lambda: tensor.to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(list(tensor)),
        "wants a gradient": lambda: tensor.clone().requires_grad_(),
        "a parameter": lambda: torch.nn.Parameter(tensor.clone(), requires_grad=False),
        "overlaps itself": lambda: tensor[:1].expand_as(tensor),
    }
    for kind, make in makers.items():
        try:
            yield kind, make()
        except (RuntimeError, NotImplementedError, IndexError):
            continue  # torch has none of this dtype
    rotated = name == "q" and "cos_sin_cache" in given
    if rotated or name.startswith("out") or name in ("residual_out", "k_cache", "v_cache"):
        for other, operand in given.items():
            if isinstance(operand, Tensor) and other != name and operand.is_contiguous():
                room = operand.view(torch.uint8).flatten()
                if room.numel() >= tensor.nbytes:
                    yield f"in {other}", room[room.numel() - tensor.nbytes :].view(tensor.dtype).view(tensor.shape)


def outcome(op: Any, given: dict[str, Any]) -> Any:
    """The class of the error, or the form of the results."""
    try:
        results = op(**given)
    except Exception as error:
        return type(error)
    results = results if isinstance(results, tuple) else (results,)
    parts = [part for one in results for part in (one if isinstance(one, list) else [one])]
    return [None if one is None else (one.dtype, one.shape) for one in parts]


@pytest.mark.parametrize("name", SIZES)
def test_a_known_call_does_not_let_another_through(name, known) -> None:
    op, good = call_of(name)
    tried = 0
    for parameter, tensor in good.items():
        if not isinstance(tensor, Tensor):
            continue
        for kind, other in others_than(tensor, parameter, good):
            given = good | {parameter: other}
            op.op._forget()
            kept = {one: value.clone() for one, value in good.items() if isinstance(value, Tensor)}
            first = outcome(op, given)
            for one, value in kept.items():
                good[one].copy_(value)
            for _ in range(3):
                op(**good)
            assert known[-1], "the third call like it is known"
            for one, value in kept.items():
                good[one].copy_(value)
            assert outcome(op, given) == first, (parameter, kind)
            for one, value in kept.items():
                good[one].copy_(value)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("name", SIZES)
def test_what_torch_transforms_is_no_known_call(name, known) -> None:
    op, good = call_of(name)
    for _ in range(3):
        op(**good)
    assert known[-1]
    with forward_ad.dual_level():
        op(**good)
        assert not known[-1]
    op(**good)
    assert known[-1]
    with torch.inference_mode():
        op(**good)
        assert not known[-1]


@pytest.fixture(params=["in Python", "in C"])
def comparing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known calls are compared by Python, or by the launcher's extension."""
    monkeypatch.setattr(HUB, "known_of", None)
    if request.param == "in C":
        module = launch.extension().module
        if module is None:
            pytest.skip(f"3 tests: {launch.extension().reason}")
        # The process keeps its own launcher for all else: this one enters no address.
        monkeypatch.setattr(type(HUB), "recognise", lambda hub, known_of, *more: setattr(hub, "known_of", known_of))
        launch.recognise_in_c(launch.native_of(module, 1, 0))


@pytest.mark.usefixtures("comparing")
def test_a_form_is_learned_when_its_key_comes_again() -> None:
    calls, x, out = KnownCalls(), torch.ones(4), torch.empty(4)
    for known in (False, False, True, True):
        assert calls.holds(4, (x, None, out)) is known
        if not known:
            calls.learn(4, (x, None, out), 1)
    assert calls.holds(4, (torch.ones(4), None, torch.empty(4)))
    assert not calls.holds(5, (x, None, out)), "another value"
    assert not calls.holds(4, (x, x, out))
    assert not calls.holds(4, (x, None, None))
    assert not calls.holds(4, (x, None, x)), "a destination in an operand"
    assert not calls.holds(4, (x, None, torch.empty(8)[::2]))
    room = torch.empty(8)
    assert not calls.holds(4, (room[:4], None, room[3:7]))
    assert calls.holds(4, (room[:4], None, room[4:]))
    assert not calls.holds(None, (x, None, out))
    assert not calls.holds(4, (torch._neg_view(x), None, out))
    nested = torch.nested.nested_tensor([torch.ones(4)])
    for other in (nested, 1.0, "x", x.to_sparse(), x.double(), x.to("meta"), torch.nn.Parameter(x), x.requires_grad_()):
        assert not calls.holds(4, (other, None, out)), type(other)


@pytest.mark.usefixtures("comparing")
def test_calls_of_one_tensor_or_many() -> None:
    calls, many = KnownCalls(), tuple(torch.ones(4) for _ in range(70))
    for given in (many[:1], many[:64], many):  # more than the extension takes
        for _ in range(2):
            calls.learn(len(given), given, 1)
        assert calls.holds(len(given), given)
        assert not calls.holds(len(given), (*given[:-1], torch.ones(5)))
        assert len(given) == 1 or not calls.holds(len(given), (*given[:-1], given[0]))
    x = many[0]
    for _ in range(2):
        calls.learn("twice", (x, x, many[1]), 1)
    assert calls.holds("twice", (many[2], many[2], many[1]))
    assert not calls.holds("twice", (many[2], many[3], many[1]))


@pytest.mark.usefixtures("comparing")
def test_a_destination_stays_in_the_place_of_its_operand() -> None:
    calls, x = KnownCalls(), torch.ones(4)
    for _ in range(2):
        calls.learn(4, (x, x.view(4)), 1)
    assert calls.holds(4, (x, x.view(4)))
    other = torch.ones(8)
    assert calls.holds(4, (other[:4], other[:4]))
    assert not calls.holds(4, (other[:4], other[4:]))
    assert not calls.holds(4, (other[:4], other[1:5]))


@pytest.mark.usefixtures("comparing")
def test_a_destination_stays_as_far_from_an_operand_with_which_it_interleaves() -> None:
    """As queries that are rotated in place do, beside keys of the same rows."""
    calls = KnownCalls()

    def columns(first: int, second: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.view(-1)[first:].as_strided((3, 4), (16, 1)), rows.view(-1)[second:].as_strided((3, 4), (16, 1))

    rows = torch.zeros(5, 16)
    for _ in range(2):
        calls.learn(3, columns(0, 8, rows), 1)
    assert calls.holds(3, columns(0, 8, rows))
    assert calls.holds(3, columns(4, 12, torch.zeros(5, 16)))
    for first, second in ((8, 0), (0, 7), (0, 4), (0, 9), (0, 10), (0, 0), (0, 2), (2, 0), (0, 18)):
        assert not calls.holds(3, columns(first, second, rows)), (first, second)
    assert calls.holds(3, (columns(0, 0, rows)[0], columns(0, 0, torch.zeros(5, 16))[0])), "in memory of its own"
    for _ in range(2):
        calls.learn("may overlap", columns(0, 2, rows), 1)
    assert not calls.holds("may overlap", columns(0, 2, rows))


@pytest.mark.usefixtures("comparing")
def test_results_that_a_call_makes_itself_are_not_compared() -> None:
    calls, x, out = KnownCalls(), torch.ones(4), torch.empty(4)
    for _ in range(2):
        calls.learn(4, (x, None, out, out.clone()), 0, 2)
    made = torch.empty(8)
    assert calls.holds(4, (x, None, made[:4], made[4:]))
    assert calls.holds(4, (torch.zeros(4), None, made[4:], made[:4]))
    assert not calls.holds(4, (x.double(), None, out, out))
    assert not calls.holds(4, (x, x, out, out))
    assert not calls.holds(4, (torch.nested.nested_tensor([torch.ones(4)]), None, out, out))
    for _ in range(2):
        calls.learn(5, (x, x.clone(), out), 2, 1)
    assert calls.holds(5, (x, torch.empty(4), out))
    assert not calls.holds(5, (x, made[:4][:3], out)), "the other destination is"
    assert not calls.holds(5, (x, x[:4].view(4), out)), "and apart from the operand"
    for _ in range(2):
        calls.learn(6, (out,), 1, 1)
    assert not calls.holds(6, (out,)), "a call without operands is not known"


def test_a_result_of_another_class_is_launched_otherwise() -> None:
    """Inside a mode of torch an allocation may be no memory."""
    module = launch.extension().module
    if module is None:
        pytest.skip(f"1 test: {launch.extension().reason}")

    class Mine(Tensor):
        pass

    driver = launch.native_of(module, 1, 0).driver
    known = module.Known(driver, lambda x: True, 2, (0, 1), (), (), fresh=1)
    x, out = torch.ones(4), torch.empty(4)
    assert known.holds((x, out))
    for other in (out.as_subclass(Mine), None, 4):
        assert not known.holds((x, other)), type(other)
    for fresh in (2, -1):
        with pytest.raises(ValueError, match="not fresh"):
            module.Known(driver, lambda x: True, 2, (0, 1), (), (), fresh=fresh)


def test_a_known_batched_product_does_not_let_another_through(known) -> None:
    op = kernelhub.bmm_fp8
    given = importlib.import_module("kernelhub.ops.gemm.fp8.batched.inputs").bmm_fp8_inputs(
        batch=2, tokens=2, n=16, k=16
    )
    given |= {"out": op(**given, backend="torch"), "backend": "torch"}
    for _ in range(3):
        op(**given)
    assert known[-1]
    for name in ("a", "b", "out"):
        tensor = given[name]
        nested, apart = torch.nested.nested_tensor([*tensor.bfloat16()]), tensor.view(torch.uint8).flatten()[-8:]
        for other in (nested, tensor.double(), tensor[:1], tensor.to("meta"), apart):
            with pytest.raises(kernelhub.errors.InvalidArgument):
                op(**given | {name: other})
    room = torch.zeros(600, dtype=torch.uint8)
    a, out = room[:64].view(torch.float8_e4m3fn).view(2, 2, 16), room[32:160].view(torch.bfloat16).view(2, 2, 16)
    with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
        op(**given | {"a": a, "out": out})
    assert not known[-1]


def test_pages_that_begin_between_their_scales_are_refused_in_a_known_call(known) -> None:
    op, good = call_of("paged_mqa_logits, scales in pages")
    for _ in range(3):
        op(**good)
    assert known[-1]
    cache = good["k_cache"]
    for begin in (1, 2, 4):
        moved = (
            torch.empty(cache.numel() + 16, dtype=torch.uint8)[begin:][: cache.numel()].view(cache.shape).copy_(cache)
        )
        begins = moved.data_ptr() % 4
        if begins:
            with pytest.raises(kernelhub.errors.InvalidArgument, match="multiples of 4 bytes"):
                op(**good | {"k_cache": moved})
        else:
            assert torch.equal(op(**good | {"k_cache": moved, "out": None}), op(**good))
            assert known[-1]


@pytest.mark.parametrize("stacked", [True, False])
def test_a_known_merge_does_not_let_another_through(known, stacked) -> None:
    op, shapes = kernelhub.merge_attention_states, ((2, 3, 4, 16), (2, 4, 3))
    outs, lses = ([*part] if not stacked else part for part in map(torch.randn, shapes))
    out, out_lse = op(outs, lses, return_lse=True)
    for given in ((outs, lses), ([*outs], [*lses])):
        for _ in range(3):
            op(*given, out, out_lse)
        assert known[-1]
    a, la = outs[0], lses[0]
    apart = torch.randn(3, 4, 16, 2)[..., 0]
    nested, meta = torch.nested.nested_tensor([*a]), a.to("meta")
    sparse = a.to_sparse(), a.to_sparse_csr()
    for other in (None, "x", a.double(), a[:2], *sparse, nested, meta, a.clone().requires_grad_()):
        for given in (([other, a], [la, la]), ([a, a], [other, la])):
            with pytest.raises(kernelhub.errors.InvalidArgument):
                op(*given, return_lse=True)
        with pytest.raises(kernelhub.errors.InvalidArgument):
            op([a, other], [la, la], out, out_lse)
        with pytest.raises(kernelhub.errors.InvalidArgument):
            op([a, a], [la, other], out, out_lse)
    for wrong in (
        (outs, lses, outs[0].flatten()[:-1], None),
        (outs, [*lses, la], out, out_lse),
        (outs, "x", out, None),
    ):
        with pytest.raises(kernelhub.errors.InvalidArgument):
            op(*wrong)
    room = torch.randn(3 * 4 * 16 + 8)
    with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
        op([room[:192].view_as(a), a], [la, la], room[8:200].view_as(a), out_lse)
    expected = op([apart.contiguous(), a], [la, la])
    assert torch.equal(op([apart, a], [la, la], out, out_lse)[0], expected)
    assert not known[-1], "other strides"
    kept = a.clone()
    assert torch.equal(op([a, apart], [la, la], a, out_lse)[0], op([kept, apart], [la, la])), "in place"


@pytest.mark.parametrize("place", ["x", "residual"])
def test_a_norm_in_place_is_known_by_the_memory_that_it_writes(known, place) -> None:
    op, good = call_of("all_reduce_rms_norm")
    added = "residual" if place == "x" else "x"

    def ours(good: dict[str, Any]) -> dict[str, Any]:
        return good | {"out": good[place], "residual_out": good[added]}

    for _ in range(3):
        op(**ours(good))
    assert known[-1]
    op(**ours(good | {"x": good["x"].clone(), "residual": good["residual"].clone()}))
    assert known[-1]
    known.clear()
    op(**good)
    assert not any(known), "the same tensors, in memory of their own"
    room = torch.zeros(2 * good["x"].numel(), dtype=good["x"].dtype)
    x, residual = (room[start : start + good["x"].numel()].view_as(good["x"]) for start in (0, 256))
    weight = room[: good["weight"].numel()]
    for wrong in ({"x": x, "residual": residual}, {"x": x, "weight": weight}, {"residual": x, "weight": weight}):
        with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
            op(**ours(good | wrong))
    other = good | {"x": good["x"].clone()}
    known.clear()
    op(**other | {"out": other["x"], "residual_out": good["residual_out"]})
    assert not any(known)
    with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
        op(**good | {"out": good["x"], "residual_out": good["x"]})


def test_states_in_place_are_known_by_the_memory_that_they_update(known) -> None:
    op, good = call_of("linear_attention")
    ours = good | {"out_state": good["state"]}
    for _ in range(3):
        op(**ours)
    assert known[-1]
    other = good["state"].clone()
    op(**ours | {"state": other, "out_state": other})
    assert known[-1]
    expected = op(**good | {"out": None, "out_state": None})[1]
    into = torch.zeros_like(good["state"])
    known.clear()
    assert torch.equal(op(**good | {"out_state": into})[1][[1, 0]], expected)
    assert not any(known), "from a state, into memory of their own"
    for _ in range(3):
        op(**good | {"out_state": into})
    assert known[-1]
    room = torch.zeros(2 * other.numel())
    state, apart = room[: other.numel()].view_as(other), room[16 : 16 + other.numel()].view_as(other)
    with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
        op(**good | {"state": state, "out_state": apart})
    with pytest.raises(kernelhub.errors.InvalidArgument, match="without states"):
        op(**good | {"state": None, "out_state": None})
    plan = op.prepare(**{one: value for one, value in ours.items() if one[:4] != "out_"})
    run = {one: value for one, value in ours.items() if one != "return_state"}
    for _ in range(3):
        plan.run(**run)
    assert known[-1]
    with pytest.raises(kernelhub.errors.InvalidArgument, match="without state"):
        plan.run(**run | {"state": None})


def test_rows_of_each_rank_are_always_checked(known) -> None:
    op, good = call_of("all_gather")
    told = len(known)
    for _ in range(3):
        op(good["x"], good["group"], rows=[3])
    assert len(known) == told
    with pytest.raises(kernelhub.errors.InvalidArgument, match="rows"):
        op(good["x"], good["group"], rows=[4])


def test_forms_that_take_turns_are_learned_ever_less_often(monkeypatch) -> None:
    calls, learned = KnownCalls(), []
    monkeypatch.setattr("kernelhub.ops.known_calls.KnownForm.learn", lambda *given: learned.append(given))
    for _ in range(100):
        calls.learn(4, (torch.ones(4),), 0)
    assert len(learned) == 6


@pytest.mark.parametrize(
    ("name", "number"), [("num_experts", 7.0), ("num_experts", True), ("max_tokens", 4.0), ("format", ["tokens"])]
)
def test_a_number_of_another_type_is_no_known_dispatch(name, number, known) -> None:
    op, good = call_of("moe_dispatch")
    good["num_experts"] = 1 if number is True else 8  # True is equal to 1
    for _ in range(3):
        op(**good)
    assert known[-1]
    with pytest.raises(kernelhub.errors.InvalidArgument) as error:
        op(**good | {name: number})
    assert error.value.parameter == name


def test_a_handle_of_another_kind_is_no_known_one(known) -> None:
    op, good = call_of("moe_combine")
    for _ in range(3):
        op(**good)
    assert known[-1]
    header, *rest = good["handle"]
    for wrong in (header.to("meta"), header.int(), header[:-1], header.to_sparse(), header + 1, None, 7):
        with pytest.raises(kernelhub.errors.InvalidArgument) as error:
            op(**good | {"handle": [wrong, *rest]})
        assert error.value.parameter == "handle"
    with pytest.raises(kernelhub.errors.InvalidArgument, match="is no handle"):
        op(**good | {"handle": [header, *(part.double() for part in rest)]})
    other = op(**good | {"handle": tuple(good["handle"]), "out": None})
    assert not known[-1]
    assert torch.equal(other, op(**good))
