"""Latent attention, the indexer and linear attention: what operands may be, and what is refused by name.

Every vector and table may have any strides, what a contract calls unused may hold anything, destinations lie apart from
what is read, and metadata that contradicts itself is named where its values can be looked at.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import IndexerModel, LinearModel, MlaModel
from tests.conftest import DEVICE

pytestmark = pytest.mark.device
FP8 = torch.float8_e4m3fn
SMALL = MlaModel("small", 3, 16, 8)


def mla(**changes: Any) -> dict[str, Any]:
    given = {"seq_lens": (40, 0, 9), "page_size": 16, "dtype": torch.float32, "device": DEVICE} | changes
    return mla_attention_inputs(SMALL, **given)


def listed(**changes: Any) -> dict[str, Any]:
    return mla(topk=7, q_lens=2, **changes)


def listed_ragged() -> dict[str, Any]:
    return mla(topk=7, q_lens=(2, 0, 3))


def with_sinks(**changes: Any) -> dict[str, Any]:
    return mla(**changes) | {"sinks": torch.linspace(-1, 3, 3, device=DEVICE)}


def paged(**changes: Any) -> dict[str, Any]:
    given = {"seq_lens": (70, 0, 33), "page_size": 16, "dtype": torch.float32, "device": DEVICE} | changes
    return paged_logits_inputs(IndexerModel("small", 3, 32, 8), **given)


def scores() -> dict[str, Any]:
    return logits_inputs(IndexerModel("small", 3, 32, 8), tokens=5, keys=40, dtype=torch.float32, device=DEVICE)


def linear(**changes: Any) -> dict[str, Any]:
    given = {"batch": 2, "tokens": 5, "dtype": torch.float32, "device": DEVICE} | changes
    return linear_inputs(LinearModel("small", 3, 16, 16), **given)


def pool() -> dict[str, Any]:
    return linear(slots=(3, 1), num_slots=5)


def ragged_pool() -> dict[str, Any]:
    return linear(lengths=(3, 0, 6), slots=(3, 0, 1), num_slots=5)


def rows() -> dict[str, Any]:
    return topk_inputs(tokens=3, keys=100, k=10, device=DEVICE)


def cache() -> dict[str, Any]:
    sizes = {"tokens": 5, "latent_dim": 16, "rope_dim": 8, "page_size": 4}
    made = write_mla_cache_inputs(**sizes, kv_dtype=FP8, device=DEVICE)
    return made | {"kv_scale": torch.full((1,), made["kv_scale"], device=DEVICE)}


def keys() -> dict[str, Any]:
    return concat_inputs(tokens=4, num_heads=2, nope_dim=16, rope_dim=8, device=DEVICE)


OPS = {
    "mla_attention": (mla, with_sinks, lambda: with_sinks(q_lens=(1, 0, 3)), lambda: mla(topk=7, q_lens=2)),
    "write_mla_cache": (cache,),
    "concat_mla_k": (keys,),
    "mqa_logits": (scores,),
    "paged_mqa_logits": (paged, lambda: paged(next_n=2)),
    "topk_indices": (rows,),
    "linear_attention": (linear, pool, ragged_pool),
}
KERNELS = ("torch", "triton")


def run(op: str, given: dict[str, Any], backend: Any = None, **more: Any) -> Any:
    if op == "write_mla_cache":
        given = given | {"kv_cache": given["kv_cache"].clone()}
        return getattr(kernelhub, op)(**given, backend=backend).view(torch.uint8)
    return getattr(kernelhub, op)(**given, **more, backend=backend)


def every(count: int) -> Any:
    def spread(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((*tensor.shape, count), 99 if not tensor.is_floating_point() else 1e4)
        wide[..., 0] = tensor
        return wide[..., 0]

    return spread


def offset(tensor: Tensor) -> Tensor:
    """One element past an aligned address."""
    memory = tensor.new_zeros(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


LAYOUTS = {"every third": every(3), "one element on": offset}


def tensors(given: dict[str, Any]) -> list[str]:
    return [name for name, value in given.items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("op", "form"), [(op, form) for op, forms in OPS.items() for form in range(len(forms))])
def test_every_operand_may_have_any_strides(op: str, form: int, backend: str) -> None:
    given = OPS[op][form]()
    want = run(op, given, backend)
    for layout in LAYOUTS.values():
        moved = {
            name: layout(given[name].view(torch.uint8)).view(FP8) if given[name].dtype is FP8 else layout(given[name])
            for name in tensors(given)
            if (op, name) != ("write_mla_cache", "kv_cache")  # written: its layouts are those of the contract's tests
        }
        got = run(op, given | moved, backend)
        assert torch.allclose(got, want, rtol=0.0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", KERNELS)
def test_expanded_vectors_are_read_as_what_they_are(backend: str) -> None:
    given = mla(q_lens=2) | {"sinks": torch.full((3,), 0.7, device=DEVICE)}
    expanded = given | {"sinks": torch.full((1,), 0.7, device=DEVICE).expand(3)}
    assert torch.equal(run("mla_attention", expanded, backend), run("mla_attention", given, backend))
    plan = kernelhub.mla_attention.prepare(**expanded, backend=backend)
    step = plan.begin(given["block_table"], given["seq_lens"])
    want = run("mla_attention", given, backend)
    assert torch.equal(step.run(given["q"], given["kv_cache"]), want)
    expanded["sinks"].untyped_storage().fill_(0)  # what changes after `begin` is seen
    zeros = run("mla_attention", given | {"sinks": torch.zeros(3, device=DEVICE)}, backend)
    assert torch.equal(step.run(given["q"], given["kv_cache"]), zeros)


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", KERNELS)
def test_unused_entries_of_tables_and_lists_may_hold_anything(backend: str, garbage: int) -> None:
    for topk, q_lens in itertools.product((None, 7), (None, 2, (1, 0, 3))):
        given = mla(topk=topk, q_lens=q_lens)
        want = kernelhub.mla_attention.reference(**given)
        table = given["block_table"]
        given["block_table"] = torch.cat([torch.where(table < 0, garbage, table), torch.full_like(table, garbage)], 1)
        if topk:
            given["topk_indices"] = torch.where(given["topk_indices"] < 0, garbage, given["topk_indices"])
        got = run("mla_attention", given, backend)
        assert (got - want).abs().max() < 1e-4
    scored = paged()
    want = kernelhub.paged_mqa_logits.reference(**scored)
    scored["block_table"] = torch.where(scored["block_table"] < 0, garbage, scored["block_table"])
    torch.testing.assert_close(run("paged_mqa_logits", scored, backend), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", KERNELS)
def test_bounds_of_rows_may_be_any_int32(backend: str) -> None:
    given = rows()
    least, most = -(2**31), 2**31 - 1
    for starts, ends in itertools.product((least, -1, 0, 5, most), repeat=2):
        given["row_starts"] = torch.full((3,), starts, dtype=torch.int32, device=DEVICE)
        given["row_ends"] = torch.full((3,), ends, dtype=torch.int32, device=DEVICE)
        assert torch.equal(run("topk_indices", given, backend), kernelhub.topk_indices.reference(**given))


@pytest.mark.parametrize("backend", KERNELS)
def test_sinks_of_minus_infinity_beside_no_key_give_zeros(backend: str) -> None:
    for topk, lengths in itertools.product((None, 7), ((40, 0, 9), (900, 0, 9))):
        given = mla(topk=topk, seq_lens=lengths) | {"sinks": torch.full((3,), -torch.inf, device=DEVICE)}
        want, want_lse = kernelhub.mla_attention.reference(**given, return_lse=True)
        got, lse = run("mla_attention", given, backend, return_lse=True)
        assert (got - want).abs().max() < 1e-4
        assert not got[1].any()
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", KERNELS)
def test_weights_down_to_two_to_the_minus_thirty_of_the_largest_count(backend: str, dtype: torch.dtype) -> None:
    """A value that only an unlikely token has is the result, not 0: products in float16 would end at 2^-24."""
    for kv_dtype in (FP8, None):
        if kv_dtype is None and dtype is torch.float16 and backend == "torch":
            continue
        given = mla(seq_lens=(2,), dtype=dtype, kv_dtype=kv_dtype)
        latents = torch.zeros(*given["kv_cache"].shape, device=DEVICE)
        first = int(given["block_table"][0, 0])
        latents[first, 0, 20] = 1.0  # of the rotary part: it decides the score
        latents[first, 1, 0] = 1.0  # a value of the unlikely token alone
        given["kv_cache"] = latents.to(given["kv_cache"].dtype)
        if kv_dtype is not None:
            given["kv_scale"] = 1.0
        q = torch.zeros(1, 3, 24, device=DEVICE)
        q[..., 20] = 20.0  # e^-20 is 2^-28.9
        given |= {"q": q.to(dtype), "scale": 1.0}
        got = run("mla_attention", given, backend)[0, :, 0].float()
        if dtype is torch.float16:  # the result itself is below what float16 holds
            given["kv_scale"] = 256.0 if kv_dtype is not None else None
            if kv_dtype is None:
                continue
            got = run("mla_attention", given | {"scale": 1 / 256.0}, backend)[0, :, 0].float() / 256.0
            assert (got > 0).all()
            continue
        want = torch.tensor(2.061e-9, device=DEVICE)
        assert ((got - want).abs() < 0.01 * want).all(), f"{got.tolist()} for {want}"


def destination(op: str, given: dict[str, Any]) -> Tensor:
    made = run(op, given)
    return torch.empty_like(made)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("op", [op for op in OPS if op != "write_mla_cache"])
def test_a_destination_that_overlaps_is_refused(op: str, warm: bool) -> None:
    given = OPS[op][0]()
    out = destination(op, given)
    if warm:
        run(op, given, out=out)
    with pytest.raises(InvalidArgument, match="overlaps itself"):
        run(op, given, out=out[:1].expand(out.shape[0], *out.shape[1:]))
    for name in tensors(given):
        operand = given[name]
        wide = torch.zeros(out.nbytes + operand.numel() * operand.element_size() + 64, dtype=torch.uint8, device=DEVICE)
        inside = wide[: operand.numel() * operand.element_size()].view(operand.dtype).view(operand.shape)
        inside.view(torch.uint8).copy_(operand.contiguous().view(torch.uint8))
        over = wide[: out.nbytes].view(out.dtype).view(out.shape)
        with pytest.raises(InvalidArgument, match=f"overlaps {name} in memory") as caught:
            run(op, given | {name: inside}, out=over)
        assert caught.value.parameter == "out"


def test_states_are_written_in_place_but_not_over_other_operands() -> None:
    given = pool()
    wide = torch.zeros(6, 3, 16, 16, device=DEVICE)
    for out_state, words in ((wide[1:], "overlaps state"), (wide[:1].expand(5, 3, 16, 16), "overlaps itself")):
        with pytest.raises(InvalidArgument, match=words) as caught:
            run("linear_attention", given | {"state": wide[:5]}, out_state=out_state)
        assert caught.value.parameter == "out_state"
    for _ in range(2):
        run("linear_attention", given, out_state=given["state"].view(5, 3, 16, 16))


def test_a_cache_that_overlaps_is_refused() -> None:
    given = write_mla_cache_inputs(tokens=2, latent_dim=16, rope_dim=8, page_size=4, device=DEVICE)
    page = given["kv_cache"]
    for warm in range(2):
        with pytest.raises(InvalidArgument, match="kv_cache overlaps itself"):
            kernelhub.write_mla_cache(**given | {"kv_cache": page[:1].expand(page.shape)})
        with pytest.raises(InvalidArgument, match="kv_cache overlaps kv_c"):
            kernelhub.write_mla_cache(**given | {"kv_c": page[0, :2, :16]})
        if not warm:
            kernelhub.write_mla_cache(**given)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What a kernel would take for an address, or for a length.
CONTRADICTIONS = [
    ("paged_mqa_logits", paged, "block_table", lambda t: t.masked_fill(t >= 0, 77), "names page 77"),
    ("paged_mqa_logits", paged, "block_table", lambda t: t.masked_fill(t >= 0, -5), "names page -5"),
    ("paged_mqa_logits", paged, "seq_lens", lambda t: ints(70, -1, 33), "is -1 for sequence 1"),
    ("paged_mqa_logits", paged, "seq_lens", lambda t: ints(70, 0, 999), "is 999 for sequence 2"),
    ("paged_mqa_logits", paged, "seq_lens", lambda t: ints(71, 0, 33), "max_seq_len is 70"),
    ("linear_attention", ragged_pool, "cu_seqlens", lambda t: ints(0, 5, 3, 9), "falls from 5 to 3"),
    ("linear_attention", ragged_pool, "cu_seqlens", lambda t: ints(0, -2, 3, 9), "falls from 0 to -2"),
    ("linear_attention", ragged_pool, "cu_seqlens", lambda t: ints(1, 3, 3, 9), "starts at 1"),
    ("linear_attention", ragged_pool, "cu_seqlens", lambda t: ints(0, 3, 3, 10), "ends at 10"),
    ("linear_attention", pool, "state_indices", lambda t: ints(3, 3), "is 3 for sequences 0 and 1"),
    ("linear_attention", pool, "state_indices", lambda t: ints(0, 5), "state has 5 slots"),
    ("linear_attention", linear, "decay", lambda t: t * torch.inf, "is inf for head 0"),
    ("linear_attention", linear, "decay", lambda t: t * torch.nan, "is nan for head 0"),
    ("linear_attention", linear, "decay", lambda t: t * -1, "finite numbers from 0 up"),
    ("mla_attention", listed, "topk_indices", lambda t: t * 0 + 3, "lists position 3 twice for token 0"),
    ("mla_attention", listed_ragged, "topk_indices", lambda t: t * 0 + 3, "lists position 3 twice for token 0"),
    ("write_mla_cache", cache, "slot_mapping", lambda t: t.clamp(max=0) * 0 + 2, "is 2 for tokens 0 and 1"),
    ("write_mla_cache", cache, "slot_mapping", lambda t: t * 0 + 999, "is 999 for token 0"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("op", "base", "parameter", "change", "words"), CONTRADICTIONS)
def test_metadata_that_contradicts_itself_is_named(
    op: str, base: Any, parameter: str, change: Any, words: str, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CPU memory always, on a GPU as KERNELHUB_CHECK=1 says."""
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    given = base()
    if warm:
        run(op, given)
    with pytest.raises(InvalidArgument, match=words) as caught:
        run(op, given | {parameter: change(given[parameter]).to(DEVICE)})
    assert caught.value.parameter == parameter


def test_an_empty_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    given = pool()
    with pytest.raises(InvalidArgument, match="state has 0 slots"):
        run("linear_attention", given | {"state": given["state"][:0], "state_indices": given["state_indices"]})


BAD = [
    ("mla_attention", mla, "causal", "yes", "is 'yes'"),
    ("mla_attention", mla, "causal", 2, "is 2"),
    ("mla_attention", mla, "return_lse", "no", "is 'no'"),
    ("mla_attention", mla, "max_seqlen_q", True, "is True"),
    ("mla_attention", mla, "max_seqlen_q", -1, "is -1"),
    ("mla_attention", mla, "scale", True, "is True"),
    ("linear_attention", linear, "return_state", 1, "is 1"),
    ("paged_mqa_logits", paged, "max_seq_len", True, "is True"),
    ("topk_indices", rows, "k", True, "is True"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("op", "base", "parameter", "value", "words"), BAD)
def test_flags_and_counts_are_what_they_say(
    op: str, base: Any, parameter: str, value: Any, words: str, warm: bool
) -> None:
    if warm:
        run(op, base())
    with pytest.raises(InvalidArgument, match=words) as caught:
        run(op, base() | {parameter: value})
    assert caught.value.parameter == parameter


def negated(tensor: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def nested(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(
    ("op", "base"),
    [(op, bases[-1]) for op, bases in OPS.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_kernels_cannot_read_are_named(op: str, base: Any, warm: bool) -> None:
    given = base()
    if warm:
        run(op, given)
    for name in tensors(given):
        operand = given[name]
        changes = [(lambda t: t.to("meta"), "meta"), (nested, "nested"), (lambda t: t.to_sparse(), "layout")]
        if operand.dtype is torch.float32:
            changes.append((negated, "negative bit"))
        for change, words in changes:
            if operand.dtype is FP8 and words != "meta":
                continue
            if op == "mla_attention" and name in ("block_table", "seq_lens", "cu_seqlens_q"):
                continue  # read by the step that all ops over pages share
            with pytest.raises(InvalidArgument, match=words) as caught:
                getattr(kernelhub, op)(**given | {name: change(operand)})
            assert caught.value.parameter in (name, "k_nope", "kv_c", "q"), (name, words)


@pytest.mark.parametrize("op", ["mla_attention", "linear_attention", "mqa_logits", "paged_mqa_logits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision_change_no_bit(op: str, dtype: torch.dtype) -> None:
    given = OPS[op][0]()
    want, reference = run(op, given, "torch"), getattr(kernelhub, op).reference(**given)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(DEVICE, dtype):
            got, again = run(op, given, "torch"), getattr(kernelhub, op).reference(**given)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(got, want)
    assert torch.equal(again, reference)


class TestStep:
    """`step.run` holds a layer's operands against the step."""

    @pytest.fixture
    def step(self) -> Any:
        given = mla(seq_lens=(40, 9))
        self.q, self.kv_cache = given["q"], given["kv_cache"]
        plan = kernelhub.mla_attention.prepare(**given)
        return plan.begin(given["block_table"], given["seq_lens"])

    @pytest.mark.parametrize("count", [1, 3])
    def test_q_has_a_row_for_each_sequence(self, step: Any, count: int) -> None:
        with pytest.raises(InvalidArgument, match="seq_lens has 2 sequences") as caught:
            step.run(torch.zeros(count, 3, 24, device=DEVICE), self.kv_cache)
        assert caught.value.parameter == "q"

    def test_out_is_what_would_be_returned(self, step: Any) -> None:
        right = step.run(self.q, self.kv_cache)
        buffer = torch.zeros(2, 3, 16, device=DEVICE)
        for out in (buffer[:1], buffer.half(), buffer[..., :15], buffer[None], buffer.to("meta"), [buffer], self.q):
            with pytest.raises(InvalidArgument) as caught:
                step.run(self.q, self.kv_cache, out=out)
            assert caught.value.parameter == "out"
        assert not buffer.any()
        assert torch.equal(step.run(self.q, self.kv_cache, out=buffer), right)

    def test_the_cache_has_the_pages_that_the_table_may_name(self, step: Any) -> None:
        with pytest.raises(InvalidArgument, match="the plan was prepared for") as caught:
            step.run(self.q, self.kv_cache[:-1])
        assert caught.value.parameter == "kv_cache"

    def test_several_tokens_are_another_plan_s(self, step: Any) -> None:
        with pytest.raises(InvalidArgument, match="one query token"):
            step.run(torch.zeros(2, 2, 3, 24, device=DEVICE), self.kv_cache)

    def test_ragged_queries_reach_the_last_offset(self) -> None:
        given = mla(seq_lens=(40, 9), q_lens=(2, 3))
        plan = kernelhub.mla_attention.prepare(**given)
        metadata = [given[name] for name in ("block_table", "seq_lens", "cu_seqlens_q")]
        step = plan.begin(*metadata, seq_lens_cpu=[40, 9], cu_seqlens_q_cpu=[0, 2, 5])
        with pytest.raises(InvalidArgument, match="ends at 5"):
            step.run(given["q"][:4], given["kv_cache"])
        longer = torch.cat([given["q"], given["q"]])
        assert torch.equal(step.run(longer, given["kv_cache"])[:5], step.run(given["q"], given["kv_cache"]))


@pytest.mark.parametrize("op", OPS)
def test_transforms_of_torch_are_refused_after_a_right_call_too(op: str) -> None:
    given = OPS[op][0]()
    run(op, given)
    name = next(name for name in tensors(given) if given[name].dtype in (torch.float32, torch.bfloat16))
    operand = given[name]

    def call(x: Tensor) -> Any:
        return getattr(kernelhub, op)(**given | {name: x})

    for transformed in (
        lambda: torch.func.jvp(call, (operand,), (torch.ones_like(operand),)),
        lambda: torch.func.vmap(call)(torch.stack([operand, operand])),
        lambda: torch.jit.trace(call, (operand,), check_trace=False),
    ):
        with pytest.raises(InvalidArgument) as caught:
            transformed()
        assert caught.value.parameter == name
