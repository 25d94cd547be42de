"""Expert parallelism between real processes over gloo: exact exchanges, and ranks that differ, fail or are missing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime import expert_scenes
from tests.runtime.test_comm_ranks import failure
from tests.runtime.world import run_world

SIZE = 3
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank answered: None of the one that is killed last."""
    answers = run_world(SIZE, expert_scenes.act, tmp_path_factory.mktemp("experts"), limit_s=240)
    assert answers[0] is not None, "a rank ended before its scenes did"
    return answers


@pytest.fixture
def scene(world: list[Any], request: pytest.FixtureRequest) -> list[Any]:
    """What each rank answered in the scene that the test is named after."""
    return [answers[request.node.name.removeprefix("test_")] for answers in world[0]["scenes"]]


def test_exchanges(scene):
    assert scene == [[]] * SIZE


def test_top_ks(scene):
    assert scene == [[]] * SIZE


def test_layers(scene):
    for ratios in scene:
        assert len(ratios) == 6
        assert max(ratios.values()) <= 1.0


def test_parallel(scene):
    for answer in scene:
        assert len(answer) == 10
        for label, found in answer.items():
            assert found["ratio"] <= 1.0, label
            assert found["again"], label
            fp8, tokens = "fp8" in label, "tokens" in label
            assert found["steps"].count("quantize_fp8") == 2 * fp8
            assert found["steps"].count("grouped_gemm") == (0 if tokens else 2)
            assert found["steps"][-1] == "moe_combine"


def test_selected(scene):
    for answer in scene:
        assert answer["explained"] == answer["kernels"][1]
        assert answer["kernels"] == scene[0]["kernels"]
        assert answer["agreed"] == answer["kernels"][:1]


def test_other_formats(scene):
    message = failure(scene, "arguments_differ", [1])
    assert "format is tokens on rank 0 and contiguous on rank 1" in message


def test_other_room(scene):
    assert "max_tokens is 9 on rank 0 and 10 on rank 2" in failure(scene, "arguments_differ", [2])


def test_other_experts(scene):
    assert "num_experts is 12 on rank 0 and 15 on rank 1" in failure(scene, "arguments_differ", [1])


def test_too_many_tokens(scene):
    assert scene[2]["parameter"] == "x"
    assert "x has 9 tokens; max_tokens is 8" in failure(scene[:2], "rank_failed", [2])


def test_other_results(scene):
    message = failure(scene, "arguments_differ", [2])
    assert "bfloat16" in message
    assert "float16" in message


def test_absent_rank(scene):
    assert "rank 1 of 3 did not call it within 4 s" in failure([scene[0], scene[2]], "rank_missing", [1])


def test_a_killed_rank_is_named_by_the_others(world):
    assert world[1] is None
    for answers in (world[0], world[2]):
        assert "rank 1 of 3 is dead or did not join" in answers["killed"]
        assert "KERNELHUB_COMM_TIMEOUT_S" in answers["killed"]


def test_a_later_group_of_the_same_name_has_ranks_of_its_own(tmp_path):
    first, second, third = run_world(SIZE, expert_scenes.later_group, tmp_path, limit_s=120, store_here=True)
    (name, _), (again, _) = first
    assert name == again, "torch gives the names of destroyed groups again"
    assert [len(second), len(third)] == [1, 1]
    assert all(ratio <= 1.0 for _, ratio in (*first, *second, *third))


def test_a_stopped_rank_ends_the_combine_of_the_others(tmp_path):
    first, second, last = run_world(SIZE, expert_scenes.stopped, tmp_path, limit_s=120)
    assert last is None
    for answer in (first, second):
        assert "rank 2 of 3 is dead or did not join" in answer["message"]
        assert "KERNELHUB_COMM_TIMEOUT_S" in answer["message"]
