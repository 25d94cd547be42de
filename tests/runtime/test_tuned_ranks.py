"""Ranks with different tuned tables take that of rank 0, until a reload."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError, InvalidArgument
from kernelhub.evidence.tuning.tables import FORMAT
from kernelhub.ops.models.problems import Need
from tests.evidence import sized
from tests.evidence.tuned_entries import entry, keep
from tests.runtime.scenes import NEED, OTHER, call, prepared
from tests.runtime.world import attempt, run_world, variables

SIZE = 3
FORM = {"dtype": "float32", "hidden_size": 64, "top_k": 2, "num_experts": 6, "capacity": "exact", "format": "tokens"}
FORM |= {"link": "none", "peers": "none"}  # as the ranks of a CPU are connected
FAST, SLOW = "cpp.split_kv", "torch.blocked"  # as they are ranked without measurements

pytestmark = pytest.mark.xdist_group("ranks")


def selection(need: Any) -> list[Any]:
    found = kernelhub.explain(need.op, device="cpu", **dict(need.facets))
    return [found.selected, found.source]


def measured_here(rank: int) -> None:
    """On rank 0 the slow kernel was measured as the faster one, on the others the other way round."""
    us = {SLOW: 10.0, FAST: 30.0} if rank == 0 else {SLOW: 30.0, FAST: 10.0}
    keep(*(entry(need.op, dict(need.facets), us) for need in (NEED, OTHER)))


def agree_on_one(rank: int, size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder, variables(KERNELHUB_CACHE_DIR=folder):
        HUB.restore()
        measured_here(rank)
        before = [selection(NEED), selection(OTHER)]
        own = kernelhub.explain(NEED.op, device="cpu", **dict(NEED.facets)).because
        plan, _ = prepared()
        had = plan.kernel
        result = attempt(lambda: kernelhub.agree(what=plan, timeout_s=60, device="cpu"))
        agreement = result.pop("value", None)
        after = [selection(NEED), selection(OTHER)]
        answer = {
            **result,
            "before": before,
            "own": own,
            "had": had,
            "after": after,
            "called": call(),
            "digest": agreement and agreement.digest,
            "entries": agreement and len(agreement.tuned["entries"]),
            "stale": agreement and [item is plan for item in agreement.stale],
        }
        HUB.forget_evidence()
        answer["forgotten"] = [selection(NEED), selection(OTHER)]
        kernelhub.reload()
        answer["reloaded"] = [selection(NEED), selection(OTHER)]
        return answer


def rank_0_measured_nothing(rank: int, size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder, variables(KERNELHUB_CACHE_DIR=folder):
        HUB.restore()
        if rank:
            measured_here(0)
        before = selection(OTHER)
        result = attempt(lambda: kernelhub.agree(what=NEED, timeout_s=60, device="cpu").size)
        return {**result, "before": before, "after": [selection(NEED), selection(OTHER)]}


def one_rank_heeds_no_evidence(rank: int, size: int) -> Any:
    off = {"KERNELHUB_EVIDENCE": "0"} if rank == 1 else {}
    with tempfile.TemporaryDirectory() as folder, variables(KERNELHUB_CACHE_DIR=folder, **off):
        HUB.restore()
        return attempt(lambda: kernelhub.agree(what=NEED, timeout_s=60, device="cpu").size)


def plans_of_other_sizes(rank: int, size: int) -> Any:
    """All ranks run one kernel; rank 2 measured other sizes of it than the others."""
    with tempfile.TemporaryDirectory() as folder, variables(KERNELHUB_CACHE_DIR=folder):
        HUB.restore()
        sized.paged_attention()
        tile = {"tile": 128 if rank == 2 else 64}
        us = {"sized.k": 10.0, FAST: 30.0}
        keep(entry(NEED.op, dict(NEED.facets), us, 1, **{"sized.k": {"configuration": tile, "own_us": 12.0}}))
        plan, step = prepared()
        took = dict(plan.adapter.measured)
        agreement = kernelhub.agree(what=plan, timeout_s=60, device="cpu")
        fresh, _ = prepared()
        return {
            "had": [plan.selection.selected, took[1]["tile"]],
            "stale": [item is plan for item in agreement.stale],
            "again": attempt(lambda: list(step())),
            "fresh": [fresh.kernel, fresh.adapter.measured[1]["tile"]],
            "digest": agreement.digest,
        }


def tables_of_a_collective(rank: int, size: int) -> Any:
    """Each rank has times of an exchange of this group, as a table from elsewhere may: no rank alone can tune it."""
    with tempfile.TemporaryDirectory() as folder, variables(KERNELHUB_CACHE_DIR=folder):
        HUB.restore()
        us = {"torch.gather": 10.0, "torch.all_to_all": 30.0}
        if rank:
            us = dict(zip(us, reversed(us.values()), strict=True))
        need = Need("moe_dispatch", tuple(sorted((FORM | {"world_size": size}).items())), ("decode",), ("experts",))
        with pytest.raises(InvalidArgument) as tuned:
            kernelhub.tune(need, device="cpu", budget_s=5.0)
        keep(entry(need.op, dict(need.facets), us))
        ids = torch.arange(4, dtype=torch.int32)[:, None].expand(4, FORM["top_k"]).contiguous()
        given = (torch.ones(4, FORM["hidden_size"]), ids, torch.ones(ids.shape), dist.group.WORLD, FORM["num_experts"])

        def prepared_kernel() -> str:
            plan = kernelhub.moe_dispatch.prepare(*given)
            assert plan.run(*given[:3]).x.shape[1] == FORM["hidden_size"]
            return str(plan.kernel)

        before = attempt(prepared_kernel)
        kernelhub.agree(what=need, timeout_s=60, device="cpu")
        return {"tune": str(tuned.value), "before": before, "after": attempt(prepared_kernel)}


def test_every_rank_ranks_by_the_table_of_rank_0(tmp_path) -> None:
    answers = run_world(SIZE, agree_on_one, tmp_path)
    assert None not in answers
    for rank, answer in enumerate(answers):
        own = SLOW if rank == 0 else FAST
        assert answer["before"] == [[own, "tuned"]] * 2, "each rank had measured for itself"
        assert f"{own} 10 us" in answer["own"]
        assert answer["had"] == own
        assert answer["after"] == [[SLOW, "ranks"], [SLOW, "tuned"]], "also what was not agreed on goes by rank 0"
        assert answer["called"] == SLOW
        assert answer["entries"] == 2
        assert answer["stale"] == ([] if rank == 0 else [True])
        assert answer["forgotten"] == answer["after"], "what is measured later changes nothing"
        assert answer["reloaded"] == answer["before"], "a reload ends it"
    assert len({answer["digest"] for answer in answers}) == 1


def test_a_plan_of_other_sizes_than_those_of_rank_0_runs_no_more(tmp_path) -> None:
    answers = run_world(SIZE, plans_of_other_sizes, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["had"] == ["sized.k", 128 if rank == 2 else 64]
        assert answer["fresh"] == ["sized.k", 64]
        assert answer["stale"] == ([True] if rank == 2 else [])
        if rank == 2:
            assert answer["again"]["code"] == "agreement_broken"
            assert "runs sized.k in other sizes than 3 ranks now agree on" in answer["again"]["message"]
        else:
            assert answer["again"]["value"] == [1, 4, 128]
    assert len({answer["digest"] for answer in answers}) == 1


def test_an_empty_table_of_rank_0_is_taken_too(tmp_path) -> None:
    answers = run_world(SIZE, rank_0_measured_nothing, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["value"] == SIZE
        assert answer["before"][0] == (SLOW if rank else FAST)
        assert answer["after"][0] == [FAST, "ranks"]
        assert answer["after"][1] == answers[0]["before"], "measured times of other ranks count no more"


def test_a_rank_that_heeds_no_evidence_is_named(tmp_path) -> None:
    answers = run_world(SIZE, one_rank_heeds_no_evidence, tmp_path)
    assert {answer["code"] for answer in answers} == {"policy_differs"}
    assert "KERNELHUB_EVIDENCE is False on rank 1" in answers[0]["message"]


def test_ranks_with_other_times_of_a_collective_run_none_before_they_agree(tmp_path) -> None:
    answers = run_world(SIZE, tables_of_a_collective, tmp_path)
    for answer in answers:
        assert "one process makes calls of world_size 1 only" in answer["tune"]
        assert answer["before"]["code"] == "arguments_differ"
        assert "kernel is torch.gather on rank 0 and torch.all_to_all on rank 1" in answer["before"]["message"]
        assert answer["after"]["value"] == "torch.gather", "that of rank 0"


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a valid table"):
        kernelhub.agree(what=NEED, device="cpu", tuned={"format": FORMAT, "entries": [{"op": "attention"}]})


def test_alone_a_rank_keeps_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
    kernelhub.reload()
    measured_here(0)
    agreement = kernelhub.agree(what=NEED, device="cpu")
    assert len(agreement.tuned["entries"]) == 2
    assert agreement.choices[0].kernel == SLOW
    assert selection(OTHER) == [SLOW, "tuned"]
