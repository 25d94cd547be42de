"""Collectives between real processes over gloo: exact sums, and ranks that differ, fail, are missing or dead."""

from __future__ import annotations

from typing import Any

import pytest

import kernelhub
from tests.runtime import comm_scenes
from tests.runtime.comm_scenes import PAIR
from tests.runtime.world import run_world

SIZE = 3
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank answered in each scene."""
    answers = run_world(SIZE, comm_scenes.act, tmp_path_factory.mktemp("comm"), limit_s=240)
    assert None not in answers, "a rank ended before its scenes did"
    return answers


@pytest.fixture
def scene(world: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[Any]:
    """What each rank answered in the scene that the test is named after."""
    return [answers[request.node.name.removeprefix("test_")] for answers in world]


def failure(scene: list[dict[str, Any]], code: str, ranks: list[int]) -> str:
    """The message of a failure that all ranks report in the same words."""
    assert {answer["code"] for answer in scene} == {code}
    assert all(answer["ranks"] == ranks for answer in scene)
    assert len({answer["message"] for answer in scene}) == 1
    return str(scene[0]["message"])


def test_sums(scene):
    assert scene == [[]] * SIZE


def test_norms(scene):
    assert scene == [[]] * SIZE


def test_quantised_norms(scene):
    assert scene == [[]] * SIZE


def test_quantised_pairs(scene):
    assert scene == [[]] * SIZE


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_in_groups_of_other_sizes(size, tmp_path):
    answers = run_world(size, comm_scenes.pairs_alone, tmp_path, limit_s=120)
    for answer in answers:
        assert answer["wrong"] == []
        assert answer["again"]["value"] == 1.0 + size
        for what, words in (("eps", "eps 1e-05"), ("format", "format fp8_token")):
            assert answer[what]["code"] == "arguments_differ"
            assert words in answer[what]["message"]


def test_other_parts(scene):
    message = failure(scene, "arguments_differ", [1])
    assert "comm_pairs.sum_then_quant (all_reduce by torch.distributed, rms_norm_quant by torch.steps) on r" in message
    assert "comm_pairs.sum_then_quant (all_reduce by torch.distributed, rms_norm_quant by triton.rows) on r" in message


def test_lacking_part(scene):
    assert "rms_norm_quant has no kernel" in scene[1]["lacks"]
    assert "rms_norm_quant has no kernel" in failure([scene[0], scene[2]], "rank_failed", [1])


def test_agreed_parts(scene):
    assert [answer["had"][1] for answer in scene] == ["torch.steps", "triton.rows", "torch.steps"]
    kernels = {"all_reduce_rms_norm": PAIR, "all_reduce": "torch.distributed", "rms_norm_quant": "torch.steps"}
    assert [answer["agreed"] for answer in scene] == [kernels] * SIZE
    assert [answer["stale"] for answer in scene] == [0, 1, 0]
    assert [answer["run"].get("code") for answer in scene] == [None, "agreement_broken", None]


def test_gathers(scene):
    assert scene == [[]] * SIZE


def test_scatters(scene):
    assert scene == [[]] * SIZE


def test_other_rows(scene):
    message = failure(scene, "arguments_differ", [1])
    assert "[1, 1, 1] on rank 0" in message
    assert "[1, 1, 2] on rank 1" in message


def test_same_bits(scene):
    assert len(set(scene)) == 1


def test_selected(scene):
    for answer in scene:
        assert answer["explained"] == answer["plan"] == "torch.distributed"
        assert answer["agreed"] == ["torch.distributed"]
        assert answer["world_size"] == answer["ranks"]


def test_compiled(scene):
    assert scene == [True] * SIZE


def test_part_of_the_world(scene):
    assert scene[0] == scene[1] == {"sum": 2.0}
    assert scene[2]["parameter"] == "group"
    assert "excludes this process" in scene[2]["message"]


def test_part_with_other_shapes(scene):
    message = failure(scene[1:], "arguments_differ", [1])
    assert "; rank 0 of the group is rank 1 of the world; rank 1 of the group is rank 2 of the world" in message


def test_other_shapes(scene):
    message = failure(scene, "arguments_differ", [1])
    assert "[2, 3] on rank 0" in message
    assert "[2, 4] on rank 1" in message


def test_other_dtypes(scene):
    message = failure(scene, "arguments_differ", [2])
    assert "float32" in message
    assert "float16" in message


def test_other_formats(scene):
    message = failure(scene, "arguments_differ", [1])
    assert "fp8_group on rank 0" in message
    assert "fp8_token on rank 1" in message


def test_other_versions(scene):
    message = failure(scene, "arguments_differ", [2])
    assert f"libraries is kernelhub {kernelhub.__version__}, torch" in message
    assert "and kernelhub 0.0.9, torch" in message


def test_bad_argument(scene):
    assert scene[1] == {"parameter": "x"}
    assert "int32" in failure([scene[0], scene[2]], "rank_failed", [1])


def test_absent_rank(scene):
    assert "rank 1 of 3 did not call it within 4 s" in failure([scene[0], scene[2]], "rank_missing", [1])
    assert max(scene[0]["elapsed_s"], scene[2]["elapsed_s"]) < comm_scenes.TIMEOUT_S + 10


def test_a_late_rank_is_told_so_and_joins_when_all_call_again(tmp_path):
    first, late, third = run_world(SIZE, comm_scenes.late_rank, tmp_path, limit_s=120)
    for answers in (first, late, third):
        *failed, last, total = answers
        assert "value" in last
        assert total == {"total": [3.0, 3.0]}
        assert {one["code"] for one in failed} == {"rank_missing"}
        assert all(1 in one["ranks"] for one in failed)
    assert "rank 0 gave up after it waited 2 s for rank 1" in late[0]["message"]
    assert late[0]["elapsed_s"] < 1


def test_a_stopped_or_killed_rank_ends_the_call_of_the_others(tmp_path):
    answers = run_world(SIZE, comm_scenes.lost, tmp_path, limit_s=120)
    assert answers[1:] == [None, None]
    assert "all_reduce: rank 2 of 3 is dead or did not join, after rank 0 waited up to 4 s" in answers[0]["stopped"]
    assert "all_reduce: rank 1 of 2 is dead or did not join" in answers[0]["killed"]
    assert all("KERNELHUB_COMM_TIMEOUT_S" in answers[0][name] for name in ("stopped", "killed"))
