"""The quantised norm of a sum by two ops: its contract, and that its parts are selected, shown, compared and kept."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import NoKernel
from kernelhub.ops.case import bytes_of
from kernelhub.ops.comm.inputs import alone
from tests.contract.comm import AllReduceRmsNormContract

PAIR = "comm_pairs.sum_then_quant"
FORMS: dict[str, dict[str, Any]] = {
    "fp8_tensor": {"scale": torch.full((1,), 0.02)},
    "fp8_token": {"ue8m0": True},
    "fp8_group": {"scale_layout": "column"},
    "mxfp8": {},
    "nvfp4": {"global_scale": torch.full((1,), 0.004)},
}
OPTIONS = ("ue8m0", "scale_layout")  # which a plan keeps


class TestSumThenQuant(AllReduceRmsNormContract):
    kernel = PAIR


@pytest.fixture
def again() -> Iterator[None]:
    """Selections are made anew, before and after."""
    kernelhub.reload()
    yield
    kernelhub.reload()


def operands(*lead: int, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """x, the residual, the weight, eps and a group of this process alone."""
    random = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(*lead, width, generator=random).to(dtype) for _ in range(2))
    return [x, residual, torch.randn(width, generator=random).to(dtype), 1e-5, alone(x.device)]


def bits(results: tuple[Tensor, ...]) -> list[list[int]]:
    return [bytes_of(one).tolist() for one in results]


def spread(tensor: Tensor) -> Tensor:
    """The same values, every second element of a row."""
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lead", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize("place", ["none", "x", "residual", "own", "spread", "strided x", "both one"])
def test_results_are_those_of_the_steps_wherever_they_go(form: str, lead: tuple[int, ...], place: str) -> None:
    def found(kernel: str) -> tuple[list[list[int]], list[Any]]:
        x, residual, *others = operands(*lead)
        if place == "strided x":
            x = spread(x)
        if place == "both one":
            residual = x
        places = {"x": x, "residual": residual, "own": torch.empty_like(x), "spread": spread(x), "both one": x}
        given = {"residual_out": places[place]} if place in places else {}
        results = kernelhub.all_reduce_rms_norm(
            x, residual, *others, format=form, **FORMS[form], **given, backend=kernel
        )
        assert results[-1] is given.get("residual_out", results[-1])
        return bits(results), [bytes_of(one).tolist() for one in (x, residual)]

    assert found(PAIR) == found("torch.distributed")


def test_an_odd_width_and_other_dtypes() -> None:
    for width, dtype in ((1023, torch.bfloat16), (1, torch.float16), (129, torch.float32)):
        given = operands(3, width=width, dtype=dtype)
        pair, steps = (
            kernelhub.all_reduce_rms_norm(*given, format="fp8_group", backend=kernel)
            for kernel in (PAIR, "torch.distributed")
        )
        assert bits(pair) == bits(steps)


def test_explain_shows_what_was_selected_for_each_part_and_why() -> None:
    selection = kernelhub.explain(
        "all_reduce_rms_norm", device="H200", world_size=4, link="nvlink", message="256KB", format="fp8_group"
    )
    assert selection.selected == PAIR
    total, norm = selection.parts
    assert (total.op, norm.op) == ("all_reduce", "rms_norm_quant")
    assert total == kernelhub.explain("all_reduce", device="H200", world_size=4, link="nvlink", message="256KB")
    assert norm.problem.residual
    assert norm.problem.width == selection.problem.hidden_size
    text = str(selection)
    assert f"all_reduce by {total.selected}: {total.because}" in text
    assert f"rms_norm_quant by {norm.selected}: {norm.because}" in text
    assert [part["selected"] for part in selection.to_dict()["parts"]] == [total.selected, norm.selected]
    copy = pickle.loads(pickle.dumps(selection))
    assert [(part.op, part.selected) for part in copy.parts] == [(part.op, part.selected) for part in (total, norm)]


def test_a_kernel_of_its_own_has_no_parts() -> None:
    selection = kernelhub.explain("all_reduce_rms_norm", device="H200", world_size=4)
    assert selection.parts == ()
    assert "parts" not in selection.to_dict()


@pytest.mark.parametrize(
    ("facets", "total"),
    [
        ({"world_size": 2, "link": "nvlink", "message": "8MB", "hidden_size": 8320}, "triton.two_shot"),
        ({"world_size": 4, "link": "nvlink", "message": "256KB"}, "triton.one_shot"),
        ({"world_size": 4, "link": "nvlink", "message": "8MB", "hidden_size": 8320}, "triton.two_shot"),
        ({"world_size": 4, "link": "nvlink", "message": "more", "hidden_size": 8320}, "torch.distributed"),
        ({"world_size": 3, "link": "nvlink", "message": "32KB"}, "torch.distributed"),
        ({"world_size": 8, "link": "pcie", "message": "1MB"}, "torch.distributed"),
        ({"world_size": 16, "link": "network"}, "torch.distributed"),
        ({"world_size": 4}, "torch.distributed"),
    ],
)
def test_on_gpus_it_goes_before_the_steps_of_torch(facets: dict[str, Any], total: str) -> None:
    for form in FORMS:
        selection = kernelhub.explain("all_reduce_rms_norm", device="H200", format=form, **facets)
        assert selection.selected == PAIR
        assert selection.parts[0].selected == total


def test_one_launch_is_first_on_two_ranks_in_one_step_and_in_two_above_8_mb() -> None:
    one, two = "triton.one_shot_quant", "triton.two_shot_quant"
    first = {"32KB": one, "256KB": one, "1MB": one, "8MB": one, "32MB": two, "more": two}
    for message, kernel in first.items():
        for form in FORMS:
            facets = {"world_size": 2, "link": "nvlink", "message": message, "format": form}
            assert kernelhub.explain("all_reduce_rms_norm", device="H200", **facets).selected == kernel
            with kernelhub.use(batch_invariant=True):  # two steps round the sum once more
                assert kernelhub.explain("all_reduce_rms_norm", device="H200", **facets).selected == one


@pytest.mark.usefixtures("again")
def test_a_disabled_part_is_replaced_and_without_any_the_pair_is_refused() -> None:
    facets: dict[str, Any] = {"world_size": 4, "link": "nvlink", "message": "256KB", "format": "fp8_group"}
    with kernelhub.use(disable={"all_reduce": "triton", "rms_norm_quant": "triton"}):
        selection = kernelhub.explain("all_reduce_rms_norm", device="H200", **facets)
        assert selection.selected == PAIR
        assert not any(part.selected.startswith("triton") for part in selection.parts)
    with kernelhub.use(disable=("triton.rows", "cuda.rows", "torch.steps")):
        selection = kernelhub.explain("all_reduce_rms_norm", device="H200", **facets)
        assert selection.selected == "torch.distributed"
        (rejection,) = selection.against(PAIR)
    assert rejection.code == "part"
    assert rejection.reason.startswith("rms_norm_quant has no kernel: ")
    assert "triton.rows disabled by use(" in rejection.reason
    assert "remove it from use(" in rejection.remedy


def test_a_call_runs_what_replaces_a_disabled_part() -> None:
    want = kernelhub.all_reduce_rms_norm(*operands(3), format="fp8_group", backend="torch.distributed")
    with kernelhub.use(disable="torch.steps"):  # Triton, interpreted, is left
        plan = kernelhub.all_reduce_rms_norm.prepare(*operands(3), format="fp8_group", backend=PAIR)
        assert plan.parts["any"][1].selected == "triton.rows"
        assert bits(plan.run(*operands(3)[:4]))[-1] == bits(want)[-1]
        assert bits(kernelhub.all_reduce_rms_norm(*operands(3), format="fp8_group", backend=PAIR))[-1] == bits(want)[-1]
    assert bits(plan.run(*operands(3)[:4]))[-1] == bits(want)[-1]  # a plan keeps its parts


@pytest.mark.usefixtures("again")
def test_a_request_for_the_pair_names_the_part_that_lacks_a_kernel() -> None:
    disabled = kernelhub.use(disable=("torch.steps", "triton.rows"))
    with disabled, pytest.raises(NoKernel, match="rms_norm_quant has no kernel"):
        kernelhub.all_reduce_rms_norm(*operands(3), format="fp8_group", backend=PAIR)


@pytest.mark.usefixtures("again")
def test_the_variable_that_disables_a_kernel_disables_it_as_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_DISABLE", "torch.steps,triton.rows")
    kernelhub.reload()
    selection = kernelhub.all_reduce_rms_norm.explain(*operands(3), format="fp8_group")
    assert [rejection.code for rejection in selection.against(PAIR)] == ["part"]
    assert "disabled by KERNELHUB_DISABLE" in selection.against(PAIR)[0].reason


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_has_its_parts_and_runs_them(form: str) -> None:
    x, residual, weight, eps, group = operands(3)
    given = {name: value for name, value in FORMS[form].items() if name not in OPTIONS}
    plan = kernelhub.all_reduce_rms_norm.prepare(
        x, residual, weight, eps, group, format=form, **FORMS[form], backend=PAIR
    )
    assert plan.kernels == {"any": PAIR}
    parts = plan.parts["any"]
    assert [(part.op, part.selected) for part in parts] == [
        ("all_reduce", "torch.distributed"),
        ("rms_norm_quant", "torch.steps"),
    ]
    assert plan.selection.parts == parts
    want = kernelhub.all_reduce_rms_norm(
        x, residual, weight, eps, group, format=form, **FORMS[form], backend="torch.distributed"
    )
    with kernelhub.seal():  # whatever it needs is there
        assert bits(plan.run(x, residual, weight, eps, **given)) == bits(want)
        assert bits(plan.run(x[:1], residual[:1], weight, eps, **given))[-1] == bits(want)[-1][: 2 * 64]


@pytest.mark.usefixtures("again")
def test_the_report_counts_the_parts_too() -> None:
    plan = kernelhub.all_reduce_rms_norm.prepare(*operands(3), format="fp8_group", backend=PAIR)
    before = {(row.op, row.kernel): row.calls for row in kernelhub.report().rows}
    plan.run(*operands(3)[:4])
    after = {(row.op, row.kernel): row.calls for row in kernelhub.report().rows}
    counted = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    assert counted == {
        ("all_reduce_rms_norm", PAIR): 1,
        ("all_reduce", "torch.distributed"): 1,
        ("rms_norm_quant", "torch.steps"): 1,
    }


def test_the_fingerprint_depends_on_the_parts() -> None:
    facets = {"world_size": 4, "link": "nvlink", "message": "256KB", "format": "fp8_group"}
    first = kernelhub.explain("all_reduce_rms_norm", device="H200", **facets)
    with kernelhub.use(prefer={"rms_norm_quant": "torch"}):
        other = kernelhub.explain("all_reduce_rms_norm", device="H200", **facets)
    assert first.selected == other.selected == PAIR
    assert HUB.fingerprint_of(first) != HUB.fingerprint_of(other)
    assert str(HUB.fingerprint_of(first)) != str(HUB.fingerprint_of(other))


@pytest.mark.usefixtures("again")
def test_an_agreement_has_the_parts() -> None:
    plan = kernelhub.all_reduce_rms_norm.prepare(*operands(3), format="fp8_group", backend=PAIR)
    agreement = kernelhub.agree(what=plan)
    assert {(choice.op, choice.kernel) for choice in agreement.choices} == {
        ("all_reduce_rms_norm", PAIR),
        ("all_reduce", "torch.distributed"),
        ("rms_norm_quant", "torch.steps"),
    }
    assert agreement.stale == ()
