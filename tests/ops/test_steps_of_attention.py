"""What a step's `run` and a plan's `run` hold of their operands: nothing is read or written beyond them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention import operands
from tests.dispatch.backends import Ones, record, register

i32 = torch.int32
z = torch.zeros


@pytest.fixture(autouse=True)
def watched_kernel():
    """A kernel that takes everything and counts its launches: after an error there may have been none."""
    register("watch", record("watch.k", "Ones"), record("watch.k", "Ones", op="paged_attention"))
    Ones.launches = 0


TABLE, LENGTHS = torch.tensor([[0, 1], [4, 2]], dtype=i32), torch.tensor([5, 8], dtype=i32)
Q, CACHE = z(2, 4, 32), z(5, 4, 2, 32)


def paged_step(lse: bool = False) -> Any:
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE.clone(), TABLE, LENGTHS, return_lse=lse)
    return plan.begin(TABLE, LENGTHS)


def ragged_step() -> Any:
    offsets = torch.tensor([0, 2, 6], dtype=i32)
    plan = kernelhub.attention.prepare(z(6, 4, 32), z(6, 2, 32), z(6, 2, 32), offsets, offsets)
    return plan.begin(offsets, offsets)


BAD_OF_STEP = [
    ("q", {"q": z(1, 4, 32)}, "2 sequences"),
    ("q", {"q": z(3, 4, 32)}, "2 sequences"),
    ("q", {"q": z(2, 3, 4, 32)}, "for one"),
    ("q", {"q": z(2, 4, 16)}, "shape"),
    ("q", {"q": z(2, 4, 32).half()}, "dtype float16"),
    ("q", {"q": [1.0]}, "list"),
    ("q", {"q": z(2, 4, 32, device="meta")}, "meta"),
    ("q", {"q": z(2, 4, 32).to_sparse()}, "layout"),
    ("q", {"q": torch.nested.nested_tensor([z(4, 32), z(4, 32)])}, "nested"),
    ("q", {"q": torch.nested.nested_tensor([z(4, 32), z(4, 32)], layout=torch.jagged)}, "nested"),
    ("k_cache", {"k": torch.nested.nested_tensor([z(4, 2, 32)] * 5)}, "nested"),
    ("k_cache", {"k": torch.nested.nested_tensor([z(4, 2, 32)] * 5, layout=torch.jagged)}, "nested"),
    ("v_cache", {"v": torch.nested.nested_tensor([z(4, 2, 32)] * 5)}, "nested"),
    ("q", {"q": torch._neg_view(z(2, 4, 32))}, "negative bit"),
    ("q", {"q": z(2, 4, 32).requires_grad_()}, "requires grad"),
    ("k_cache", {"k": z(3, 4, 2, 32), "v": z(3, 4, 2, 32)}, "3 pages"),
    ("v_cache", {"v": z(4, 4, 2, 32)}, "shape"),
    ("v_cache", {"v": z(5, 4, 2, 32).half()}, "dtype float16"),
    ("out", {"out": z(1, 4, 32)}, "shape"),
    ("out", {"out": z(3, 4, 32)}, "shape"),
    ("out", {"out": z(2, 4, 32).half()}, "dtype float16"),
    ("out", {"out": z(1, 4, 32).expand(2, 4, 32)}, "overlaps itself"),
    ("out", {"out": z(2, 4, 32).requires_grad_()}, "requires grad"),
    ("out", {"out": 3}, "int"),
    ("out", {"out": torch.nested.nested_tensor([z(4, 32), z(4, 32)])}, "nested"),
    ("out", {"out": torch.nested.nested_tensor([z(4, 32), z(4, 32)], layout=torch.jagged)}, "nested"),
    ("out", {"out": Q}, "overlaps q"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a right one"])
def test_a_step_refuses_what_does_not_fit_it(warm: bool, lse: bool) -> None:
    step = paged_step(lse)
    right = {"q": Q, "k": CACHE, "v": CACHE.clone(), "out": None}
    if warm:
        step.run(*right.values())
        step.run(*(right | {"out": torch.empty_like(Q)}).values())
    Ones.launches = 0
    for parameter, changes, words in BAD_OF_STEP:
        with pytest.raises(InvalidArgument, match=words) as caught:
            step.run(*(right | changes).values())
        assert caught.value.parameter == parameter
        assert Ones.launches == 0


def test_out_may_not_be_the_memory_of_q_or_of_the_cache() -> None:
    step, out = paged_step(), torch.empty_like(Q)
    with pytest.raises(InvalidArgument, match="overlaps q"):
        step.run(out, CACHE, CACHE.clone(), out=out)
    inside = z(5, 4, 2, 32)
    with pytest.raises(InvalidArgument, match="overlaps k_cache"):
        step.run(Q, inside, CACHE, out=inside.flatten()[: Q.numel()].view_as(Q))


def test_a_view_of_an_operand_is_no_out_on_any_run_where_runs_are_checked_whole(monkeypatch) -> None:
    """Without KERNELHUB_CHECK its memory is looked at where its form is new."""
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    step = paged_step()
    step.run(Q, CACHE, CACHE.clone(), out=torch.empty_like(Q))
    with pytest.raises(InvalidArgument, match="overlaps q"):
        step.run(Q, CACHE, CACHE.clone(), out=Q.view_as(Q))


def test_a_ragged_step_has_rows_for_all_its_sequences() -> None:
    step = ragged_step()
    step.run(z(6, 4, 32), z(6, 2, 32), z(6, 2, 32))
    for q, k, parameter in ((z(5, 4, 32), z(6, 2, 32), "q"), (z(6, 4, 32), z(5, 2, 32), "k")):
        with pytest.raises(InvalidArgument, match="has 5 tokens") as caught:
            step.run(q, k, k)
        assert caught.value.parameter == parameter


@pytest.mark.parametrize("out", [None, torch.empty_like(Q)], ids=["made", "given"])
def test_one_cache_may_be_keys_and_values(out: Any, monkeypatch) -> None:
    """And is checked once, as two caches are."""
    step = paged_step()
    step.run(Q, CACHE, CACHE, out=out)
    checks = []
    monkeypatch.setattr(operands, "check_run", lambda *given: checks.append(given))
    step.run(Q.clone(), CACHE, CACHE, out=out)
    assert not checks
    step.run(Q, CACHE, CACHE.clone(), out=out)
    assert len(checks) == 1


def test_a_result_is_contiguous_whatever_q_is() -> None:
    across = z(4, 2, 32).transpose(0, 1)
    assert paged_step().run(across, CACHE, CACHE).is_contiguous()


def test_steps_of_one_plan_do_not_take_over_what_another_was_shown() -> None:
    """A plan knows the form of its last runs; a step of more sequences still asks for its own."""
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS)
    plan.begin(TABLE, LENGTHS).run(Q, CACHE, CACHE)
    one = plan.begin(TABLE[:1], LENGTHS[:1])
    with pytest.raises(InvalidArgument, match="1 sequences"):
        one.run(Q, CACHE, CACHE)
    assert one.run(Q[:1], CACHE, CACHE).shape == (1, 4, 32)


def test_a_step_without_sequences_launches_nothing() -> None:
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS)
    assert plan.begin(TABLE[:0], LENGTHS[:0]).run(Q[:0], CACHE, CACHE).shape == (0, 4, 32)
    none = torch.zeros(1, dtype=i32)
    plan = kernelhub.attention.prepare(z(6, 4, 32), z(6, 2, 32), z(6, 2, 32), none, none)
    assert plan.begin(none, none).run(z(6, 4, 32), z(6, 2, 32), z(6, 2, 32)).shape == (6, 4, 32)
    assert Ones.launches == 0


def test_lengths_on_the_host_that_contradict_the_tensor_are_refused() -> None:
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS)
    assert plan.begin(TABLE, LENGTHS, seq_lens_cpu=[5, 8]).metadata.lengths() == [5, 8]
    for wrong, words in (([5, 7], "is 7 at 1"), ([5], "1 values"), (["5", 8], "ints"), ([[5], [8]], "ints")):
        with pytest.raises(InvalidArgument, match=words) as caught:
            plan.begin(TABLE, LENGTHS, seq_lens_cpu=wrong)
        assert caught.value.parameter == "seq_lens_cpu"


@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_a_step_keeps_no_copy_of_metadata(name: str) -> None:
    """It would not follow what an engine writes to its own tensors."""
    given = {"block_table": TABLE, "seq_lens": LENGTHS}
    wide = torch.zeros(*given[name].shape, 2, dtype=i32)[..., 0]
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS)
    with pytest.raises(InvalidArgument, match=rf"{name}\.contiguous"):
        plan.begin(**(given | {name: wide}))


def test_a_plan_keeps_no_copy_of_sinks() -> None:
    with pytest.raises(InvalidArgument, match=r"sinks\.contiguous"):
        kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS, sinks=z(8)[::2])


def test_a_plan_refuses_by_name_what_is_no_tensor() -> None:
    plan = kernelhub.paged_attention.prepare(Q, CACHE, CACHE, TABLE, LENGTHS)
    for arguments, parameter in (
        (([1.0], CACHE, CACHE), "q"),
        ((Q, CACHE, None), "v_cache"),
        ((z(2, 3, 4, 32), CACHE, CACHE), "q"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            plan.run(*arguments, TABLE, LENGTHS)
        assert caught.value.parameter == parameter


def test_a_report_counts_the_launches_of_steps() -> None:
    paged = (torch.zeros(2, 4, 16), *torch.zeros(2, 4, 16, 2, 16), torch.zeros(2, 4, dtype=torch.int32))
    lengths = torch.full((2,), 9, dtype=torch.int32)
    HUB.forget_report()
    step = kernelhub.paged_attention.prepare(*paged, lengths).begin(paged[3], lengths)
    for _ in range(3):
        step.run(*paged[:3])
        step.run(*paged[:3], out=torch.empty(2, 4, 16))
    (row,) = kernelhub.report().rows
    assert row.calls == 6
