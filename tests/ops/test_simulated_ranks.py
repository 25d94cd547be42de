"""What ranks of machines that are not here select: 2, 4 and 8 GPUs, with NVLink, PCIe, MIG or no P2P, and racks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore

import kernelhub
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import RanksDisagree
from kernelhub.ops.comm import group as meeting
from kernelhub.ops.comm.problem import BUCKETS

LIBRARIES = {"triton": "3.6.0", "flashinfer": "0.6.18", "deep_ep": "1.2.1", "deep_ep_cpp": "1.2.1", "cuda": "13.0.0"}
MACHINE = SimulatedMachine(LIBRARIES)
GPUS = ("H100", "H200", "B200", "GB200")
NCCL = "torch.distributed"
# Layouts in which no GPU stores in another's memory. Of a rack of GB200 NVL72 with 4 GPUs in each of 18 machines, all
# are connected by NVLink, but memory of other machines needs fabric handles.
WITHOUT_PEERS: dict[str, dict[str, Any]] = {
    "2 without P2P": {"world_size": 2, "link": "none"},
    "2 MIG instances": {"world_size": 2, "link": "none", "peers": "none"},
    "8 of PCIe without proof": {"world_size": 8, "link": "pcie", "peers": "none"},
    "16 of 2 machines": {"world_size": 16, "link": "network"},
    "72 of GB200 NVL72": {"world_size": 72, "link": "network"},
    "before the first prepare": {"world_size": 4, "link": "unknown"},
}


def explained(op: str, device: str, **facets: Any) -> Any:
    if op in ("moe_dispatch", "moe_combine"):
        facets.pop("message", None)
        facets["num_experts"] = 288  # that 72 ranks can share
    return kernelhub.explain(op, device=device, machine=MACHINE, **facets)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("layout", WITHOUT_PEERS)
def test_without_peers_nothing_but_the_groups_backend_runs(layout: str, device: str) -> None:
    for op in ("all_reduce", "all_reduce_rms_norm", "moe_dispatch", "moe_combine"):
        told = explained(op, device, **WITHOUT_PEERS[layout])
        assert told.selected.startswith("torch.")
        assert "symm_mem" not in told.selected
        for decision in told.decisions:
            if not decision.kernel.startswith("torch.") or "symm_mem" in decision.kernel:
                assert decision.rejections, f"{op}: {decision.kernel} would store in memory that is not proved"


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_over_nvlink_small_sums_need_no_nccl(size: int, device: str) -> None:
    for message in ("32KB", "256KB"):
        told = explained("all_reduce", device, world_size=size, link="nvlink", peers="atomics", message=message)
        # What has not run on as many ranks is not first.
        if size in (2, 4) and device in ("H100", "H200"):
            assert told.selected == "cuda.one_shot"
        elif size == 8:
            assert told.selected in ("torch.symm_mem_one_shot", "torch.symm_mem_two_shot")
        else:
            assert told.selected == "triton.one_shot"


@pytest.mark.parametrize(
    ("device", "facets", "kernel"),
    [
        ("H200", {"message": "1MB"}, "cuda.one_shot"),
        ("H200", {"message": "1MB", "dtype": "float32"}, "cuda.one_shot"),
        ("H200", {"message": "8MB"}, "triton.two_shot"),
        ("H200", {"message": "32KB", "world_size": 4}, "cuda.one_shot"),
        ("H200", {"message": "256KB", "world_size": 4, "dtype": "float16"}, "cuda.one_shot"),
        ("H200", {"message": "1MB", "world_size": 4}, "triton.two_shot"),
        ("H200", {"message": "32KB", "world_size": 3}, NCCL),
        ("B200", {"message": "32KB"}, "triton.one_shot"),
    ],
)
def test_cuda_sums_where_that_has_run(device: str, facets: dict[str, Any], kernel: str) -> None:
    told = explained("all_reduce", device, **{"world_size": 2, "link": "nvlink", **facets})
    assert told.selected == kernel


def test_the_sum_of_a_pair_is_cudas_and_said_so() -> None:
    facets = {"world_size": 2, "link": "nvlink", "message": "256KB", "hidden_size": 8320, "format": "fp8_group"}
    told = explained("all_reduce_rms_norm", "H200", **facets)
    assert told.selected == "comm_pairs.sum_then_quant"
    assert told.parts[0].selected == "cuda.one_shot"
    assert "all_reduce by cuda.one_shot: " in str(told)


class OneOfTwo:
    """A group of two, as its rank sees it."""

    group_name = "two"

    def __init__(self, rank: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: 2)


def test_a_rank_that_lacks_cuda_bindings_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would run another kernel: each rank raises what both say, and `agree` lets all run the same."""
    facets = {"world_size": 2, "link": "nvlink", "message": "32KB"}
    lacks = SimulatedMachine({name: version for name, version in LIBRARIES.items() if name != "cuda"})
    told = [kernelhub.explain("all_reduce", device="H200", machine=machine, **facets) for machine in (MACHINE, lacks)]
    assert [one.selected for one in told] == ["cuda.one_shot", "triton.one_shot"]
    (rejection,) = told[1].against("cuda.one_shot")
    assert (rejection.code, "cuda-bindings" in str(rejection.remedy)) == ("package_missing", True)

    said = [{"op": "all_reduce", "kernel": one.selected} for one in told]
    for message in unlike(said, monkeypatch):
        assert "kernel is cuda.one_shot on rank 0 and triton.one_shot on rank 1" in message


def test_ranks_that_call_other_ops_are_told_the_ops_and_not_what_else_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = [
        {"op": "all_reduce", "kernel": "cuda.one_shot", "x": "bfloat16 [4, 1024]"},
        {"op": "all_gather", "kernel": "triton.one_shot", "dtype": "bfloat16"},
    ]
    differ = "op is all_reduce on rank 0 and all_gather on rank 1; give all ranks the same"
    assert unlike(said, monkeypatch) == [f"{one['op']}.prepare: {differ}" for one in said]


def unlike(said: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The message that each of two ranks raises, which are unlike."""
    store = HashStore()
    monkeypatch.setattr(meeting, "_store_of", lambda op, group: store)

    def prepare(rank: int) -> str:
        with pytest.raises(RanksDisagree) as raised:
            meeting.meet(said[rank]["op"], cast(Any, OneOfTwo(rank)), said[rank], 20)
        assert (raised.value.code, raised.value.ranks) == ("arguments_differ", (1,))
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(prepare, range(2)))


@pytest.mark.parametrize(
    ("message", "facets", "kernel"),
    [
        ("256KB", {"hidden_size": 7168}, "triton.one_shot"),
        ("1MB", {"hidden_size": 4096}, "triton.one_shot_polled"),
        ("1MB", {"hidden_size": 4608, "dtype": "float16"}, "triton.one_shot_polled"),
        ("1MB", {"hidden_size": 2880}, "triton.one_shot"),
        ("1MB", {"hidden_size": 7168, "dtype": "float32"}, "triton.one_shot"),
        ("1MB", {"hidden_size": 7169}, "triton.one_shot"),
        ("1MB", {"hidden_size": 7168, "format": "fp8_group"}, "triton.one_shot_quant"),
        ("8MB", {"hidden_size": 7168}, "triton.one_shot"),
    ],
)
def test_threads_wait_for_their_elements_of_a_norm_where_that_was_faster(
    message: str, facets: dict[str, Any], kernel: str
) -> None:
    told = explained("all_reduce_rms_norm", "H200", world_size=2, link="nvlink", message=message, **facets)
    assert told.selected == kernel


@pytest.mark.parametrize(
    ("message", "facets", "kernel"),
    [
        ("32KB", {"hidden_size": 7168}, "triton.one_shot_clustered"),
        ("32KB", {"hidden_size": 8192, "dtype": "float16"}, "triton.one_shot_clustered"),
        ("32KB", {"hidden_size": 5120}, "triton.one_shot"),
        ("32KB", {"hidden_size": 7168, "dtype": "float32"}, "triton.one_shot"),
        ("32KB", {"hidden_size": 7169}, "triton.one_shot"),
        ("32KB", {"hidden_size": 7168, "format": "fp8_group"}, "triton.one_shot_quant"),
        ("32KB", {"hidden_size": 7168, "world_size": 4}, "triton.one_shot"),
        ("256KB", {"hidden_size": 8192}, "triton.one_shot"),
        ("1MB", {"hidden_size": 5120}, "triton.one_shot_clustered"),
        ("1MB", {"hidden_size": 7168, "dtype": "float16"}, "triton.one_shot_clustered"),
        ("1MB", {"hidden_size": 7168, "weight_dtype": "float32"}, "triton.one_shot_polled"),
        ("1MB", {"hidden_size": 8192, "dtype": "float32"}, "triton.one_shot"),
        ("1MB", {"hidden_size": 5119}, "triton.one_shot"),
    ],
)
def test_a_row_of_a_norm_is_a_clusters_where_that_was_faster(message: str, facets: dict[str, Any], kernel: str) -> None:
    given = {"world_size": 2, "link": "nvlink", "message": message, **facets}
    assert explained("all_reduce_rms_norm", "H200", **given).selected == kernel


@pytest.mark.parametrize(
    ("message", "facets", "kernel"),
    [
        ("32KB", {"format": "nvfp4"}, "triton.one_shot_quant"),
        ("256KB", {"format": "nvfp4"}, "comm_pairs.sum_then_quant"),
        ("32KB", {"format": "fp8_group"}, "comm_pairs.sum_then_quant"),
        ("1MB", {"format": "mxfp8"}, "comm_pairs.sum_then_quant"),
        ("8MB", {"format": "fp8_token"}, "triton.two_shot_quant"),
        ("32MB", {"format": "fp8_tensor"}, "triton.two_shot_quant"),
        ("more", {"format": "nvfp4"}, "triton.two_shot_quant"),
        ("32MB", {"format": "fp8_group", "world_size": 8}, "comm_pairs.sum_then_quant"),
        ("32MB", {"format": "fp8_group", "hidden_size": 8320}, "comm_pairs.sum_then_quant"),
        ("more", {}, "triton.two_shot"),
    ],
)
def test_quantised_norms_of_four_ranks(message: str, facets: dict[str, Any], kernel: str) -> None:
    given = {"world_size": 4, "link": "nvlink", "message": message, "hidden_size": 4096, **facets}
    assert explained("all_reduce_rms_norm", "H200", **given).selected == kernel


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("size", [3, 8])
def test_norms_over_peer_memory_are_requested_where_they_have_not_run(size: int, device: str) -> None:
    for message in ("32KB", "1MB", "32MB"):
        told = explained("all_reduce_rms_norm", device, world_size=size, link="nvlink", message=message)
        assert told.selected == NCCL
        assert not told.against("triton.one_shot"), "a request selects it"


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(("message", "kernel"), [("256KB", "triton.one_shot"), ("1MB", "triton.two_shot")])
def test_norms_of_four_ranks_take_two_steps_for_large_messages(device: str, message: str, kernel: str) -> None:
    told = explained("all_reduce_rms_norm", device, world_size=4, link="nvlink", message=message)
    assert told.selected == kernel


@pytest.mark.parametrize(("message", "kernel"), [("32KB", "triton.one_shot"), ("1MB", "triton.one_shot_polled")])
def test_no_row_is_a_clusters_where_its_bits_must_not_depend_on_the_batch(message: str, kernel: str) -> None:
    with kernelhub.use(batch_invariant=True):
        told = explained("all_reduce_rms_norm", "H200", world_size=2, link="nvlink", message=message, hidden_size=7168)
    assert told.selected == kernel
    assert "batch_variant" in {
        rejection.code
        for decision in told.decisions
        if decision.kernel == "triton.one_shot_clustered"
        for rejection in decision.rejections
    }


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_over_nvlink_tokens_are_pushed_where_that_has_run(size: int, device: str) -> None:
    ran = size in (2, 4) and device in ("H100", "H200")
    for op in ("moe_dispatch", "moe_combine"):
        told = explained(op, device, world_size=size, link="nvlink", peers="atomics", capacity="few")
        assert (told.selected == "triton.push") == ran
        decision = next(one for one in told.decisions if one.kernel == "triton.push")
        assert not decision.rejections, "a request selects it elsewhere"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_over_pcie_nccl_sums_even_with_atomics(size: int) -> None:
    told = explained("all_reduce", "L40S", world_size=size, link="pcie", peers="atomics", message="32KB")
    assert told.selected == NCCL


def rows_of_the_page() -> list[tuple[str, int, list[str]]]:
    """Op with its facets, number of ranks and kernels of the table of docs/communication.md."""
    page = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    table = page.partition("## What is selected\n")[2].partition("\n- ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return [
        (row[0].strip(), int(ranks), [cell.strip(" `") for cell in row[2 : 2 + len(BUCKETS)]])
        for row in rows
        for ranks in row[1].split(",")
    ]


@pytest.mark.parametrize(("op", "ranks", "kernels"), rows_of_the_page())
def test_the_table_of_the_page_is_what_is_selected(op: str, ranks: int, kernels: list[str]) -> None:
    name, *more = re.findall(r"`(\w+)`", op)
    facets: dict[str, Any] = {"world_size": ranks, "link": "nvlink", **({"format": more[0]} if more else {})}
    if width := re.search(r"rows of (\d+)", op):
        facets["hidden_size"] = int(width[1])
    for message, kernel in zip(BUCKETS, kernels, strict=True):
        assert explained(name, "H200", message=message, **facets).selected == kernel, message
