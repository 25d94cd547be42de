"""The kernels on which ranks settle, from the statements of all ranks: pure functions of plain values.

A statement is the result of `ranks_statement`, as received. The first rank leads: its first-ranked kernel among those
that every rank can run is selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Statement = Mapping[str, Any]
LEAD = 0


@dataclass(frozen=True)
class Refusal:
    """A kernel that a rank cannot run, with the code, reason and remedy of `explain` there."""

    rank: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Failure:
    """Why ranks do not agree: as of `errors.RanksDisagree`."""

    code: str
    message: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Settled:
    """The result for one problem class.

    Attributes:
        kernel: the kernel that every rank runs.
        because: why the lead ranks it first among those.
        refused: kernels that some rank supports and another rejects.
    """

    kernel: str
    because: str
    refused: Mapping[str, Refusal]


Outcome = Mapping[str, Settled]


def settle(
    statements: Sequence[Statement], failed: Mapping[str, Mapping[str, Refusal]] | None = None
) -> Outcome | Failure:
    """The kernel of each problem class, or why there is none.

    Args:
        statements: one per rank, in order.
        failed: kernels whose adapter a rank could not load, by problem class.
    """
    failure = _unlike(statements)
    if failure is not None:
        return failure
    outcome = {}
    for key in statements[LEAD]["selections"]:
        settled = _settle(key, statements, (failed or {}).get(key, {}))
        if isinstance(settled, Failure):
            return settled
        outcome[key] = settled
    return outcome


def _unlike(statements: Sequence[Statement]) -> Failure | None:
    """The failure if ranks differ in what they must have in common."""
    lead = statements[LEAD]
    for other in statements[1:]:
        ranks, who = (LEAD, other["rank"]), f"rank {other['rank']} ({other['where']})"
        if other["kernelhub"] != lead["kernelhub"]:
            message = f"{who} runs kernelhub {other['kernelhub']}, rank {LEAD} ({lead['where']}) {lead['kernelhub']}"
            return Failure("version_differs", f"{message}; install one version on every rank", ranks)
        words = sorted({*lead["policy"], *other["policy"]})
        unlike = [word for word in words if lead["policy"].get(word, "") != other["policy"].get(word, "")]
        if unlike:
            differences = "; ".join(
                f"{word} is {other['policy'].get(word) or 'unset'} on {who} and "
                f"{lead['policy'].get(word) or 'unset'} on rank {LEAD} ({lead['where']})"
                for word in unlike
            )
            return Failure("policy_differs", f"{differences}; use the same settings on every rank", ranks)
        missing = [key for key in lead["selections"] if key not in other["selections"]]
        extra = [key for key in other["selections"] if key not in lead["selections"]]
        if missing or extra:
            has, lacks = (f"rank {LEAD}", who) if missing else (who, f"rank {LEAD}")
            message = f"{has} plans for {(missing or extra)[0]}, {lacks} does not ({len(missing) + len(extra)} differ)"
            return Failure("problems_differ", f"{message}; give agree() the same on every rank", ranks)
    return None


def _settle(key: str, statements: Sequence[Statement], failed: Mapping[str, Refusal]) -> Settled | Failure:
    """Settle one problem class."""
    selections = [statement["selections"][key] for statement in statements]
    lead = selections[LEAD]
    refused: dict[str, Refusal] = {}
    for kernel in dict.fromkeys(name for selection in selections for name in selection["order"]):
        refusal = failed.get(kernel) or _refusal(kernel, selections)
        if refusal is not None:
            refused[kernel] = refusal
    chosen = next((kernel for kernel in lead["order"] if kernel not in refused), None)
    reasons = "; ".join(f"rank {one.rank} refuses {name}: {one.code}: {one.reason}" for name, one in refused.items())
    ranks = tuple(sorted({item.rank for item in refused.values()}))
    if chosen is None:
        none = [
            statement["rank"]
            for statement, selection in zip(statements, selections, strict=True)
            if not selection["order"]
        ]
        reasons = reasons or f"rank {', '.join(map(str, none))} can run none"
        message = f"no kernel can run {key} on every rank: {reasons}; `kernelhub explain` on those ranks lists remedies"
        return Failure("no_common_kernel", message, ranks or tuple(none))
    if chosen != lead["order"][0] and any(statement["strict"] for statement in statements):
        message = f"{key}: rank {LEAD} selects {lead['order'][0]}, and strict is on, so no other kernel may replace it"
        return Failure("refused_by_rank", f"{message}: {reasons}", ranks)
    return _same(key, chosen, statements) or Settled(chosen, lead["because"], refused)


def _refusal(kernel: str, selections: Sequence[Mapping[str, Any]]) -> Refusal | None:
    """The refusal of the first rank that cannot run a kernel."""
    for rank, selection in enumerate(selections):
        if kernel not in selection["order"]:
            why = selection["refused"].get(kernel, ("kernel_unknown", "no kernel of that name is registered there", ""))
            return Refusal(rank, *why)
    return None


def _same(key: str, kernel: str, statements: Sequence[Statement]) -> Failure | None:
    """Check that the kernel is the same on every rank."""
    lead = statements[LEAD]["kernels"][key.partition(" ")[0]][kernel]
    for other in statements[1:]:
        theirs = other["kernels"][key.partition(" ")[0]][kernel]
        ranks = (LEAD, other["rank"])
        if theirs["versions"] != lead["versions"]:
            message = f"{kernel} is of {_written(theirs)} on rank {other['rank']} ({other['where']}) and of "
            message += f"{_written(lead)} on rank {LEAD}; install one version, or disable {kernel}"
            return Failure("library_differs", message, ranks)
        if theirs["record"] != lead["record"]:
            message = f"the record of {kernel} is {theirs['record']} on rank {other['rank']} ({other['where']}) and "
            message += f"{lead['record']} on rank {LEAD}, of one version of kernelhub; install the same source"
            return Failure("record_differs", message, ranks)
    return None


def _written(kernel: Mapping[str, Any]) -> str:
    return " with ".join(f"{name} {version}" for name, version in sorted(kernel["versions"].items()))
