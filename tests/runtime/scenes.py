"""What ranks do in the tests of `agree`: one function a scene, run on every rank of one group after another."""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kernelhub
from kernelhub.dispatch.constraint import Package, Rule, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.ops.attention.problem import PagedAttentionProblem
from kernelhub.ops.models.problems import Need
from tests.dispatch.backends import EVERYWHERE
from tests.runtime.world import attempt, variables

NEED = Need(
    "paged_attention", (("causal", False), ("num_kv_heads", 2), ("num_q_heads", 4)), ("decode",), ("attention",)
)
OTHER = Need(
    "paged_attention", (("causal", False), ("num_kv_heads", 1), ("num_q_heads", 4)), ("decode",), ("attention",)
)
PACKED = "kernelhub.backends.torch.attention.packed:PackedPaged"  # of the kernel that a CPU takes by itself


def act(rank: int, size: int) -> dict[str, Any]:
    """All scenes."""
    answers = {}
    for scene in SCENES:
        dist.barrier()
        HUB.restore()
        answers[scene.__name__] = scene(rank)
    return answers


def plugin(
    *checks: Any,
    name: str = "extra",
    target: str = "tests.runtime.scenes:Never",
    summary: str = "",
    standings: Any = EVERYWHERE,
) -> Any:
    """A backend with one kernel of `paged_attention` that ranks above all others, registered here."""
    record = Kernel(
        op="paged_attention",
        name=f"{name}.kernel",
        target=target,
        summary=summary,
        band=Band.PLUGIN,
        standings=standings,
        constraints=(*checks, anything(*PagedAttentionProblem.__dataclass_fields__)),
    )
    return kernelhub.register_backend(
        types.SimpleNamespace(BACKEND=Backend(name, "of a test"), KERNELS=(record,), __name__=name)
    )


def call(**more: Any) -> str:
    """A call of the problem that ranks agree on, and the kernel that ran."""
    HUB.forget_report()
    q = torch.randn(1, 4, 128, dtype=torch.bfloat16)
    cache = torch.randn(2, 16, 2, 128, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    kernelhub.paged_attention(q, cache, cache, table, lengths, **more)
    return kernelhub.report().rows[-1].kernel


def prepared(**more: Any) -> tuple[Any, Callable[[], Any]]:
    """A plan for that problem, and a step of it."""
    q = torch.randn(1, 4, 128, dtype=torch.bfloat16)
    cache = torch.randn(2, 16, 2, 128, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    plan = kernelhub.paged_attention.prepare(q, cache, cache, table, lengths, **more)
    return plan, lambda: plan.begin(table, lengths).run(q, cache, cache).shape


def agreed(**more: Any) -> dict[str, Any]:
    """Agree on the problem; the kernel, and everything else that a test looks at."""

    def work() -> dict[str, Any]:
        result = kernelhub.agree(what=NEED, timeout_s=20, device="cpu", **more)
        selection = NEED.problem("cpu") and kernelhub.explain("paged_attention", device="cpu", **dict(NEED.facets))
        return {
            "kernel": result.choices[0].kernel,
            "digest": result.digest,
            "fingerprint": result.choices[0].fingerprint,
            "tuned": dict(result.tuned),
            "source": selection.source,
            "selected": selection.selected,
            "codes": {item.kernel: [item.code, item.reason, item.remedy] for item in selection.decisions},
            "text": str(result),
            "called": call(),
        }

    return attempt(work)


def all_alike(rank: int) -> Any:
    return agreed(tuned={"paged_attention": {"tile": rank}})


def a_large_table(rank: int) -> Any:
    numbers = random.Random(rank)
    table = {str(place): numbers.random() for place in range(300_000)}
    first = random.Random(0)
    want = {str(place): first.random() for place in range(300_000)}
    answer = attempt(lambda: kernelhub.agree(what=NEED, device="cpu", tuned=table).tuned == want)
    return {**answer, "own": table == want}


def one_rank_refuses(rank: int) -> Any:
    plugin(Rule((), lambda problem: "out of order here" if rank == 1 else None, "broken_here", "mend it"))
    return agreed()


def the_lead_refuses(rank: int) -> Any:
    plugin(Rule((), lambda problem: "out of order here" if rank == 0 else None, "broken_here", "mend it"))
    return agreed()


def _verified_on(this: int, rank: int) -> Any:
    """Agree where one rank alone has evidence that the kernel is right."""
    plugin(standings=(), target=PACKED)
    if rank == this:
        evidence = {("paged_attention", "extra.kernel"): {unpacked_facets(NEED.problem("cpu"))}}
        HUB.machine._read_earned = lambda device: evidence  # type: ignore[method-assign]
    return agreed()


def the_lead_alone_verified_it(rank: int) -> Any:
    return _verified_on(0, rank)


def one_rank_alone_verified_it(rank: int) -> Any:
    return _verified_on(1, rank)


def one_rank_lacks_the_package(rank: int) -> Any:
    with library("kernelhub_test_library", "" if rank == 1 else "1.0"):
        plugin(Package("kernelhub_test_library"))
        return agreed()


def one_rank_has_another_version_of_the_package(rank: int) -> Any:
    with library("kernelhub_test_library", "2.0" if rank == 1 else "1.0"):
        plugin(Package("kernelhub_test_library"), target=PACKED)
        return agreed()


def one_rank_cannot_load(rank: int) -> Any:
    module, _, name = PACKED.partition(":")
    broken = "raise OSError('libextra.so: cannot open shared object file')"
    with library("kernelhub_test_adapter", "1.0", broken if rank == 2 else f"from {module} import {name}"):
        plugin(target=f"kernelhub_test_adapter:{name}")
        return agreed()


def one_rank_refuses_in_strict(rank: int) -> Any:
    plugin(Rule((), lambda problem: "out of order here" if rank == 1 else None, "broken_here"))
    with kernelhub.strict():
        return agreed()


def one_rank_can_run_nothing_of_what_is_forced(rank: int) -> Any:
    plugin(Rule((), lambda problem: "out of order here" if rank == 1 else None, "broken_here"))
    with kernelhub.use(backend="extra"):
        return agreed()


def another_variable(rank: int) -> Any:
    with variables(**({"KERNELHUB_DISABLE": "torch.blocked"} if rank == 2 else {})):
        kernelhub.reload()
        return agreed()


def another_configuration(rank: int) -> Any:
    kernelhub.configure(prefer="torch.blocked" if rank == 1 else ())
    return agreed()


def a_wrong_variable(rank: int) -> Any:
    with variables(**({"KERNELHUB_DISABEL": "torch"} if rank == 1 else {})):
        if rank == 1:
            HUB.restore()
        return attempt(lambda: kernelhub.agree(what=NEED, timeout_s=20, device="cpu").size)


def another_version_of_kernelhub(rank: int) -> Any:
    own = kernelhub.__version__
    kernelhub.__version__ = "0.0.9" if rank == 2 else own
    try:
        return agreed()
    finally:
        kernelhub.__version__ = own


def another_record(rank: int) -> Any:
    plugin(summary="changed" if rank == 1 else "", target=PACKED)
    return agreed()


def other_problems(rank: int) -> Any:
    return attempt(lambda: kernelhub.agree(what=OTHER if rank == 1 else NEED, timeout_s=20, device="cpu").size)


def later_disagreement(rank: int) -> Any:
    first = agreed()
    later = attempt(lambda: call(backend="torch.blocked"))
    kernelhub.reload()
    return {"first": first, "later": later, "after": attempt(lambda: call(backend="torch.blocked"))}


def a_plan_of_another_kernel(rank: int) -> Any:
    plan, step = prepared(backend="torch.blocked" if rank == 0 else None)  # rank 0 may run that one alone
    ran = list(step())
    result = kernelhub.agree(what=plan, timeout_s=20)
    again = attempt(lambda: list(step()))
    fresh, fresh_step = prepared()
    return {
        "had": plan.selection.selected,
        "ran": ran,
        "stale": [item is plan for item in result.stale],
        "again": again,
        "fresh": fresh.kernel,
        "fresh_ran": list(fresh_step()),
    }


def a_part_of_the_ranks(rank: int) -> Any:
    group = dist.new_group([1, 2])  # every rank calls this
    try:
        result = kernelhub.agree(group, NEED, timeout_s=20, device="cpu")
    except kernelhub.errors.ConfigurationError as error:
        return str(error)
    return [result.rank, result.size, result.choices[0].kernel]


LATE_S = 3.0
PATIENT_S = 60.0  # where a rank is named long before the time is over


def one_rank_comes_too_late_and_then_in_time(rank: int) -> Any:
    punctual = dist.new_group([0, 1])  # every rank calls this
    if rank == 2:
        dist.barrier()  # until the others have given up, however slow this machine is
    else:
        dist.barrier(punctual)  # so that these two call at once
    timeout_s = PATIENT_S if rank == 2 else LATE_S
    first = attempt(lambda: kernelhub.agree(what=NEED, timeout_s=timeout_s, device="cpu").size)
    if rank != 2:
        dist.barrier()
    return {"first": first, "second": attempt(lambda: kernelhub.agree(what=NEED, timeout_s=20, device="cpu").size)}


def one_rank_takes_too_long_to_choose(rank: int) -> Any:
    handle = plugin(Rule((), lambda problem: time.sleep(12) if rank == 1 else None))
    answer = attempt(lambda: kernelhub.agree(what=NEED, timeout_s=5, device="cpu").size)
    if rank == 1:
        time.sleep(2)  # until the thread that chooses is done
    handle.remove()
    return answer


class Never:
    """An adapter that is no adapter."""


@contextlib.contextmanager
def library(name: str, version: str, code: str = "") -> Any:
    """An installed package of some version, or none."""
    with tempfile.TemporaryDirectory() as folder:
        if version:
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "__init__.py").write_text(code)
            info = Path(folder) / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            sys.path_importer_cache.clear()


SCENES = (
    all_alike, a_large_table, one_rank_refuses, the_lead_refuses, one_rank_lacks_the_package,
    the_lead_alone_verified_it, one_rank_alone_verified_it,
    one_rank_has_another_version_of_the_package, one_rank_cannot_load, one_rank_refuses_in_strict,
    one_rank_can_run_nothing_of_what_is_forced, another_variable, another_configuration, a_wrong_variable,
    another_version_of_kernelhub, another_record, other_problems, later_disagreement, a_plan_of_another_kernel,
    a_part_of_the_ranks, one_rank_comes_too_late_and_then_in_time, one_rank_takes_too_long_to_choose,
)  # fmt: skip
