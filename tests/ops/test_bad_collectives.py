"""Arguments of collectives that break the contract: one error that names the parameter, on a first and a warm call."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.comm import topology
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.comm.problem import bucket_of
from kernelhub.probes.peers import Pair, PeerFacts, probe_peers

z = torch.zeros


class Group:
    """A group of two ranks."""

    group_name = "two"

    def size(self) -> int:
        return 2


class OnGpu:
    """What a call asks of a tensor's place."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def get_device(self) -> int:
        return self.device.index


CPU = torch.device("cpu")


def given(**changes: Any) -> dict[str, Any]:
    return {"x": z(4, 2), "group": alone(CPU)} | changes


BAD = [
    ("x", given(x=3), "is int"),
    ("x", given(x=z(4, 2).int()), "int32"),
    ("x", given(x=z(4, 2, device="meta")), "meta"),
    ("x", given(x=z(4, 2, requires_grad=True)), "requires grad"),
    ("x", given(x=z(4, 2).to_sparse()), "layout"),
    ("group", given(group=None), "is NoneType"),
    ("group", given(group="nobody"), "is 'nobody', which is not registered"),
    ("group", given(group=dist.GroupMember.NON_GROUP_MEMBER), "excludes this process"),
    ("out", given(out=z(4, 3)), r"\[4, 3\]"),
    ("out", given(out=z(4, 2).half()), "float16"),
    ("out", given(out=z(4, 2, device="meta")), "meta"),
    ("out", given(out=z(1, 2).expand(4, 2)), "out"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.all_reduce(**given())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.all_reduce(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)


def test_a_destination_may_be_the_operand_and_not_overlap_it() -> None:
    x = torch.arange(12.0)
    assert kernelhub.all_reduce(x[:8], alone(CPU), out=x[:8]).data_ptr() == x.data_ptr()
    with pytest.raises(InvalidArgument, match="overlaps x"):
        kernelhub.all_reduce(x[:8], alone(CPU), out=x[4:])
    assert torch.equal(x, torch.arange(12.0))


def test_a_plan_refuses_what_it_was_not_prepared_for() -> None:
    plan = kernelhub.all_reduce.prepare(**given())
    assert torch.equal(plan.run(torch.ones(7)), torch.ones(7))
    with pytest.raises(InvalidArgument, match="the plan is for float32"):
        plan.run(z(4, 2).half())


def test_a_backend_other_than_the_usual_is_rejected() -> None:
    selection = kernelhub.explain("all_reduce", device="CPU", group_backend="other")
    assert selection.selected is None
    with pytest.raises(NoKernel, match="neither NCCL for a GPU nor gloo for a CPU"):
        raise kernelhub.all_reduce.op.no_kernel(selection, None)


def given_norm(**changes: Any) -> dict[str, Any]:
    operands = {"x": z(4, 2), "residual": z(4, 2), "weight": z(2), "eps": 1e-5, "group": alone(CPU)}
    return operands | changes


BAD_NORM = [
    ("x", given_norm(x=3), "is int"),
    ("x", given_norm(x=z(())), r"has shape \[\]"),
    ("x", given_norm(x=z(4, 0)), r"has shape \[4, 0\]"),
    ("residual", given_norm(residual=z(4, 3)), r"\[4, 3\]"),
    ("residual", given_norm(residual=z(4, 2).half()), "float16"),
    ("residual", given_norm(residual=None), "is NoneType"),
    ("weight", given_norm(weight=z(3)), r"\[3\]"),
    ("weight", given_norm(weight=z(2).half()), "float16"),
    ("weight", given_norm(weight=z(2, requires_grad=True)), "requires grad"),
    ("eps", given_norm(eps=-1.0), "-1.0"),
    ("eps", given_norm(eps=float("nan")), "nan"),
    ("eps", given_norm(eps=True), "True"),
    ("group", given_norm(group="nobody"), "is 'nobody', which is not registered"),
    ("out", given_norm(out=z(4, 3)), r"\[4, 3\]"),
    ("residual_out", given_norm(residual_out=z(4, 2).half()), "float16"),
    ("out", given_norm(out=(both := z(4, 2)), residual_out=both), "overlaps residual_out"),
    ("format", given_norm(format="fp8"), "is 'fp8'"),
    ("format", given_norm(format=["fp8_token"]), r"is \['fp8_token'\]"),
    ("scale", given_norm(scale=z(1)), "is given for format None"),
    ("out_scale", given_norm(out_scale=z(4, 1)), "is given for format None"),
    ("ue8m0", given_norm(ue8m0=True), "is True for format None"),
    ("ue8m0", given_norm(format="fp8_token", ue8m0=2), "is 2"),
    ("scale_dtype", given_norm(format="fp8_token", scale_dtype=torch.float16), "float16"),
    ("scale_layout", given_norm(format="fp8_token", scale_layout="rows"), "'rows'"),
    ("scale", given_norm(format="fp8_tensor"), "is missing"),
    ("scale", given_norm(format="fp8_tensor", scale=z(2)), r"\[2\]"),
    ("scale", given_norm(format="fp8_token", scale=z(1)), "belongs to fp8_tensor"),
    ("global_scale", given_norm(format="nvfp4"), "is missing"),
    ("x", given_norm(format="nvfp4", global_scale=torch.ones(1)), "rows of 2"),
    ("weight", given_norm(format="fp8_token", weight=z(3)), r"\[3\]"),
    ("eps", given_norm(format="fp8_token", eps=-1.0), "-1.0"),
    ("out", given_norm(format="fp8_token", out=z(4, 2)), "float32"),
    ("out", given_norm(format="fp8_token", out=z(4, 3).to(torch.float8_e4m3fn)), r"\[4, 3\]"),
    ("out_scale", given_norm(format="fp8_token", out_scale=z(4, 2)), r"\[4, 2\]"),
    ("out_scale", given_norm(format="fp8_tensor", scale=torch.ones(1), out_scale=z(1)), "the scale that is given"),
    ("residual_out", given_norm(format="fp8_token", residual_out=z(4, 2).half()), "float16"),
    (
        "residual_out",
        given_norm(format="fp8_token", weight=(room := z(10))[:2], residual_out=room[:8].view(4, 2)),
        "overlaps weight",
    ),
    (
        "residual_out",
        given_norm(format="fp8_token", out_scale=(room := z(9))[:4].view(4, 1), residual_out=room[1:].view(4, 2)),
        "overlaps out_scale",
    ),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD_NORM)
def test_the_parameter_of_a_norm_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.all_reduce_rms_norm(**given_norm())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.all_reduce_rms_norm(**arguments)
    assert caught.value.parameter == parameter


BAD_MOVES = [
    ("reduce_scatter", "x", {"x": z(())}, r"has shape \[\]"),
    ("reduce_scatter", "x", {"x": z(4).int()}, "int32"),
    ("reduce_scatter", "out", {"x": z(4), "out": z(3)}, r"\[3\]"),
    ("reduce_scatter", "out", {"x": (both := z(4)), "out": both}, "overlaps x"),
    ("all_gather", "x", {"x": z(4).bool()}, "bool"),
    ("all_gather", "rows", {"x": z(4), "rows": 4}, "is int"),
    ("all_gather", "rows", {"x": z(4), "rows": [4, 4]}, "has 2 counts"),
    ("all_gather", "rows", {"x": z(4), "rows": [3]}, "has 3 for this rank"),
    ("all_gather", "rows[0]", {"x": z(4), "rows": [4.0]}, "4.0"),
    ("all_gather", "out", {"x": z(4), "out": z(5)}, r"\[5\]"),
]


@pytest.mark.parametrize(("op", "parameter", "arguments", "words"), BAD_MOVES)
def test_the_parameter_of_a_move_is_named(op: str, parameter: str, arguments: dict[str, Any], words: str) -> None:
    function = getattr(kernelhub, op)
    with pytest.raises(InvalidArgument, match=words) as caught:
        function(group=alone(CPU), **arguments)
    assert caught.value.parameter == parameter


class TestConnections:
    """Facts of a group, from what its ranks state and what the probe of its GPUs found."""

    HERE: ClassVar[dict[str, Any]] = {
        "machine": ["host", "1", "2", "3"], "gpu": "GPU-0", "mig": False, "vendor": "nvidia", "vetoes": [],
        "handles": {"folder": "/tmp", "failure": ""},
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "link", "words"),
        [
            ({"machine": ["other", "1", "2", "3"]}, "network", "rank 1 is in another machine or container"),
            ({"vetoes": ["NCCL_P2P_DISABLE=1"]}, "none", "rank 1 has NCCL_P2P_DISABLE=1"),
            ({"mig": True}, "none", "the GPU of rank 1 is a MIG instance"),
            ({"vendor": "amd"}, "unknown", "the GPU of rank 1 has no probe"),
            ({"gpu": "GPU-0"}, "none", "two ranks share a GPU"),
            ({"handles": {"folder": "/tmp", "failure": "no; do"}}, "none", "rank 1 cannot pass handles of memory"),
            ({"handles": {"folder": "/own", "failure": ""}}, "none", "is /tmp on rank 0 and /own on rank 1"),
        ],
    )
    def test_statements(self, change: dict[str, Any], link: str, words: str) -> None:
        facts = topology._from_statements([self.HERE, self.HERE | {"gpu": "GPU-1"} | change])
        assert facts is not None
        assert (facts.link, words in facts.why) == (link, True)
        assert topology._from_statements([self.HERE, self.HERE | {"gpu": "GPU-1"}]) is None

    @pytest.mark.parametrize(
        ("change", "link", "peers"),
        [
            ({}, "nvlink", "atomics"),
            ({"nvlink": False}, "pcie", "atomics"),
            ({"atomics": False, "why": "no"}, "nvlink", "access"),
            ({"works": False, "why": "written values did not arrive"}, "none", "none"),
        ],
    )
    def test_the_weakest_pair_counts(self, change: dict[str, Any], link: str, peers: str) -> None:
        good = Pair(0, 1, nvlink=True, works=True, atomics=True)
        facts = topology.facts_from(PeerFacts((good, dataclasses.replace(good, source=1, target=0, **change))))
        assert (facts.link, facts.peers) == (link, peers)
        assert change.get("why", "") in facts.why

    def test_a_group_says_its_backend_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls take it from what the group's ranks found out; those of another group or device do not."""
        monkeypatch.setattr(topology, "_known", {})
        monkeypatch.setattr(topology, "_found", lambda *given: topology.GroupFacts("nvlink", "atomics", "said"))
        monkeypatch.setattr(topology, "backend_kind", lambda op, group, device: asked.append(device) or "usual")
        asked: list[Any] = []
        group, other = Group(), Group()
        on_0, on_1 = OnGpu(0), OnGpu(1)
        topology.learn("an op", group, on_0.device, 1.0)
        assert asked == [on_0.device]
        for _ in range(3):
            assert topology.linked("an op", group, on_0) == ("usual", "nvlink", "atomics")
            assert topology.connection("an op", group, on_0, 9) == ("usual", "nvlink", "atomics", "32KB")
        assert asked == [on_0.device]
        for of, x in ((group, on_1), (other, on_0)):
            assert topology.linked("an op", of, x) == ("usual", "unknown", "unknown")
            assert asked.pop() == x.device

    def test_a_probe_that_cannot_run_proves_nothing(self) -> None:
        found = probe_peers(["GPU-none", "GPU-nobody"])
        facts = topology.facts_from(PeerFacts.from_plain(found.plain()))
        assert found.failure
        assert (facts.link, facts.peers, facts.why) == ("none", "none", found.failure)

    def test_buckets_include_their_bounds(self) -> None:
        assert [bucket_of(size) for size in (0, 32 << 10, (32 << 10) + 1, 32 << 20, (32 << 20) + 1)] == [
            "32KB", "32KB", "256KB", "32MB", "more",
        ]  # fmt: skip


def one(strides: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((64,), 3.0, dtype=dtype).as_strided((1, 1), strides)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("strides", [(1 << 20, 7), (1, 0), (0, 3)])
def test_one_element_of_any_strides_is_gathered(strides: tuple[int, ...], dtype: torch.dtype, warm: bool) -> None:
    for _ in range(3 * warm):
        kernelhub.all_gather(torch.ones(1, 1, dtype=dtype), alone(CPU))
    assert kernelhub.all_gather(one(strides, dtype), alone(CPU)).tolist() == [[3.0]]
    out = one(strides, dtype).mul_(0)
    kernelhub.all_gather(torch.full((1, 1), 5, dtype=dtype), alone(CPU), out=out)
    assert out.tolist() == [[5]]
    assert kernelhub.all_gather(one(strides, dtype), alone(CPU), rows=[1]).tolist() == [[3.0]]


# One element is contiguous whatever it is a view of, so that only this one can come here with the bit.
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_one_element_with_the_negative_bit_is_refused_after_right_calls_too(op: str) -> None:
    function = getattr(kernelhub, op)
    negated = torch.complex(torch.zeros(1, 1), torch.ones(1, 1)).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous()
    for _ in range(4):
        function(torch.ones(1, 1), alone(CPU))
        function(torch.ones(1, 1), alone(CPU), torch.zeros(1, 1))
        with pytest.raises(InvalidArgument, match=r"x has the negative bit set; give x\.resolve_neg"):
            function(negated, alone(CPU))
        with pytest.raises(InvalidArgument, match="out has the negative bit set"):
            function(torch.ones(1, 1), alone(CPU), torch.complex(z(1, 1), z(1, 1)).conj().imag)


def test_a_destination_of_compressed_rows_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"out has layout torch\.sparse_csr"):
        kernelhub.all_reduce(z(4, 2), alone(CPU), out=z(4, 2).to_sparse_csr())


def test_the_reference_gathers_vectors() -> None:
    x = torch.arange(5.0)
    assert torch.equal(kernelhub.all_gather.reference(x, alone(CPU)), x)
