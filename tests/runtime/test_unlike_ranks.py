"""Ranks of CPUs that give unlike arguments to calls which no `prepare` compared: an error on each, and none dies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime import unlike_scenes
from tests.runtime.test_comm_ranks import failure
from tests.runtime.world import run_world

SIZE = 3
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank answered in each scene."""
    answers = run_world(SIZE, unlike_scenes.act, tmp_path_factory.mktemp("unlike"), limit_s=240)
    assert None not in answers, "a rank ended before its scenes did"
    return answers


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank answered with KERNELHUB_CHECK=1."""
    answers = run_world(SIZE, unlike_scenes.act_compared, tmp_path_factory.mktemp("compared"), limit_s=240)
    assert None not in answers, "a rank ended before its scenes did"
    return answers


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("shape", "all_reduce(x float32 [4])", "all_reduce(x float32 [5])"),
        ("large", "all_reduce(x float32 [100000])", "all_reduce(x float32 [100007])"),
        ("none", "all_reduce(x float32 [4])", "all_reduce(x float32 [0])"),
        ("run", "all_reduce(x float32 [4])", "all_reduce(x float32 [5])"),
        ("dtype", "all_reduce(x float32 [4])", "all_reduce(x float16 [4])"),
        ("norm", "x float32 [2, 8], eps 1e-05, format none", "x float32 [3, 8], eps 1e-05, format none"),
        ("eps", "eps 1e-05", "eps 2e-05"),
        ("scatter", "reduce_scatter(x float32 [3, 2])", "reduce_scatter(x float32 [6, 2])"),
        ("gather", "all_gather(x float32 [4, 2])", "all_gather(x float32 [5, 2])"),
        ("empty gather", "all_gather(x float32 [0, 2])", "all_gather(x float32 [1, 2])"),
        ("rows", "rows [1, 2, 3] of [2] float32", "rows [1, 2, 4] of [2] float32"),
        ("many rows", "rows [1, 2, 3] of [300, 1, 1", "rows [1, 2, 3] of [301, 1, 1"),
        ("room", "max_tokens 9,", "max_tokens 10,"),
        ("experts", "of 12 experts", "of 15 experts"),
        ("format", "format tokens", "format masked"),
        ("kernel", "by AllToAllFixed", "by GatherFixed"),
        ("results", "y of 130 bfloat16", "y of 130 float16"),
    ],
)
def test_each_rank_raises_what_two_of_them_call(world, name: str, first: str, second: str) -> None:
    scene = [answers[name] for answers in world]
    of_first, _, of_second = failure(scene, "arguments_differ", [1]).partition(" and rank 1 ")
    assert first in of_first
    assert second in of_second
    assert [answer["after"] for answer in scene] == [[3.0] * 3] * SIZE


def test_ranks_that_call_other_ops_are_told_which(world) -> None:
    called = "rank 0 calls all_reduce(x float32 [4]) and rank 1 all_gather(x float32 [4]); give all ranks the same"
    for rank, op in enumerate(("all_reduce", "all_gather", "all_reduce")):
        answer = world[rank]["op"]
        assert (answer["code"], answer["ranks"], answer["message"]) == ("arguments_differ", [1], f"{op}: {called}")
        assert answer["after"] == [3.0] * 3


def test_ranks_of_a_part_have_their_numbers_in_the_world(tmp_path) -> None:
    scene = run_world(SIZE, unlike_scenes.parts, tmp_path)
    message = failure(scene[1:], "arguments_differ", [1])
    assert "; rank 0 of the group is rank 1 of the world; rank 1 of the group is rank 2 of the world" in message


def test_a_group_of_another_backend_is_an_error_on_every_rank(tmp_path) -> None:
    for answers in run_world(2, unlike_scenes.another_backend, tmp_path):
        assert len(answers) == 9
        for name, said in answers.items():
            assert said.startswith("NoKernel: "), name
            assert "the group has neither NCCL for a GPU nor gloo for a CPU" in said, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shape", "all_reduce: x is float32 [4] on rank 0 and float32 [5] on rank 1; give all ranks the same"),
        ("none", "all_reduce: x is float32 [4] on rank 0 and float32 [0] on rank 1; give all ranks the same"),
        ("run", "all_reduce: x is float32 [4] on rank 0 and float32 [5] on rank 1; give all ranks the same"),
        ("dtype", "all_reduce: x is float32 [4] on rank 0 and float16 [4] on rank 1; give all ranks the same"),
        ("eps", "all_reduce_rms_norm: eps is 1e-05 on rank 0 and 2e-05 on rank 1; give all ranks the same"),
        ("scatter", "reduce_scatter: x is float32 [3, 2] on rank 0 and float32 [6, 2] on rank 1; give all ranks"),
        ("gather", "all_gather: x is float32 [4, 2] on rank 0 and float32 [5, 2] on rank 1; give all ranks the same"),
        ("rows", "all_gather: rows is [1, 2, 3] on rank 0 and [1, 2, 4] on rank 1; give all ranks the same"),
        ("room", "moe_dispatch: max_tokens is 9 on rank 0 and 10 on rank 1; give all ranks the same"),
        ("experts", "moe_dispatch: num_experts is 12 on rank 0 and 15 on rank 1; give all ranks the same"),
        ("format", "moe_dispatch: format is tokens on rank 0 and masked on rank 1; give all ranks the same"),
        ("kernel", "kernel is torch.all_to_all_fixed on rank 0 and torch.gather_fixed on rank 1; give all ranks"),
        ("results", "moe_combine: y is bfloat16 [..., 130] on rank 0 and float16 [..., 130] on rank 1; give all"),
        ("layer", "expert_parallel_moe: max_tokens is 9 on rank 0 and 10 on rank 1; give all ranks the same"),
    ],
)
def test_with_check_each_rank_raises_before_a_launch_on_any_device(compared, name: str, message: str) -> None:
    scene = [answers[name] for answers in compared]
    assert message in failure(scene, "arguments_differ", [1])
    assert [answer["after"] for answer in scene] == [[3.0] * 3] * SIZE


@pytest.mark.parametrize(("name", "called"), [("op", "all_gather"), ("other op", "moe_dispatch")])
def test_with_check_ranks_that_call_other_ops_are_told_which(compared, name: str, called: str) -> None:
    """Also where they would run other kernels."""
    differ = f"op is all_reduce on rank 0 and {called} on rank 1; give all ranks the same"
    for rank, op in enumerate(("all_reduce", called, "all_reduce")):
        answer = compared[rank][name]
        assert (answer["code"], answer["ranks"], answer["message"]) == ("arguments_differ", [1], f"{op}: {differ}")
        assert answer["after"] == [3.0] * 3


REFUSED = (
    "dtype",
    "no tensor",
    "place",
    "backend",
    "run",
    "norm",
    "scatter",
    "gather",
    "tokens",
    "exchange",
    "combine",
)
REFUSED += ("merge", "layer")


@pytest.fixture(scope="module", params=["refused", "refused_compared"])
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank answered where one could not make its call."""
    act = getattr(unlike_scenes, request.param)
    answers = run_world(SIZE, act, tmp_path_factory.mktemp(request.param), limit_s=240)
    assert None not in answers, "a rank ended before its scenes did"
    return answers


@pytest.mark.parametrize("name", REFUSED)
def test_each_rank_raises_where_one_is_refused(refused, name: str) -> None:
    """At once: the rank itself what is wrong, the others which rank it is and why. The group can be used again."""
    first, second, third = (answers[name] for answers in refused)
    assert second["code"] == "refused"
    message = failure([first, third], "rank_failed", [1])
    start = second["message"].splitlines()[0][:100]
    assert f": rank 1 cannot run it: {start}" in message.splitlines()[0]
    assert max(first["elapsed_s"], third["elapsed_s"]) < 20
    assert [answers[name]["after"] for answers in refused] == [[3.0] * 3] * SIZE


def test_what_is_refused_on_every_rank_is_each_ranks_own_error(refused) -> None:
    for answers in refused:
        answer = answers["everywhere"]
        assert (answer["code"], answer["after"]) == ("refused", [3.0] * 3)
        assert answer["message"].startswith("all_reduce: x has dtype int64")


def test_a_rank_that_is_refused_while_no_other_calls_has_its_own_error(tmp_path) -> None:
    _, second, _ = run_world(SIZE, unlike_scenes.refused_alone, tmp_path)
    assert second["message"].startswith("all_reduce: x has dtype int64")
    assert second["elapsed_s"] < 15
