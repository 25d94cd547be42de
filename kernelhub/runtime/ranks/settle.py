"""What ranks settle on, from what each of them states: pure functions of plain values.

A statement is what `ranks_statement` makes, as it came over the wire. The first rank leads: among the kernels that
every rank can run, the one that it ranks first is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Statement = Mapping[str, Any]
LEAD = 0


@dataclass(frozen=True)
class Refusal:
    """A kernel that a rank cannot run, with the code, reason and remedy that `explain` shows there."""

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
    """One problem class that is settled.

    Attributes:
        kernel: what every rank runs.
        because: why the lead ranks it first of those.
        refused: kernels that some rank could run and another refuses.
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
        statements: one of each rank, in order.
        failed: kernels whose adapter a rank could not load when it tried, by problem class.
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
    """What ranks must have in common and have not."""
    lead = statements[LEAD]
    for other in statements[1:]:
        ranks, who = (LEAD, other["rank"]), f"rank {other['rank']} ({other['where']})"
        if other["kernelhub"] != lead["kernelhub"]:
            message = f"{who} runs kernelhub {other['kernelhub']}, rank {LEAD} ({lead['where']}) {lead['kernelhub']}"
            return Failure("version_differs", f"{message}; install one version on every rank", ranks)
        words = sorted({*lead["policy"], *other["policy"]})
        unlike = [word for word in words if lead["policy"].get(word, "") != other["policy"].get(word, "")]
        if unlike:
            told = "; ".join(
                f"{word} is {other['policy'].get(word) or 'unset'} on {who} and "
                f"{lead['policy'].get(word) or 'unset'} on rank {LEAD} ({lead['where']})"
                for word in unlike
            )
            return Failure("policy_differs", f"{told}; say the same on every rank", ranks)
        missing = [key for key in lead["selections"] if key not in other["selections"]]
        extra = [key for key in other["selections"] if key not in lead["selections"]]
        if missing or extra:
            has, lacks = (f"rank {LEAD}", who) if missing else (who, f"rank {LEAD}")
            message = f"{has} plans for {(missing or extra)[0]}, {lacks} does not ({len(missing) + len(extra)} differ)"
            return Failure("problems_differ", f"{message}; give agree() the same on every rank", ranks)
    return None


def _settle(key: str, statements: Sequence[Statement], failed: Mapping[str, Refusal]) -> Settled | Failure:
    """One problem class."""
    selections = [statement["selections"][key] for statement in statements]
    lead = selections[LEAD]
    refused: dict[str, Refusal] = {}
    for kernel in dict.fromkeys(name for selection in selections for name in selection["order"]):
        refusal = failed.get(kernel) or _refusal(kernel, selections)
        if refusal is not None:
            refused[kernel] = refusal
    chosen = next((kernel for kernel in lead["order"] if kernel not in refused), None)
    told = "; ".join(f"rank {item.rank} refuses {name}: {item.code}: {item.reason}" for name, item in refused.items())
    ranks = tuple(sorted({item.rank for item in refused.values()}))
    if chosen is None:
        none = [
            statement["rank"]
            for statement, selection in zip(statements, selections, strict=True)
            if not selection["order"]
        ]
        told = told or f"rank {', '.join(map(str, none))} can run none"
        message = f"no kernel can run {key} on every rank: {told}; `kernelhub explain` on those ranks says what to do"
        return Failure("no_common_kernel", message, ranks or tuple(none))
    if chosen != lead["order"][0] and any(statement["strict"] for statement in statements):
        message = f"{key}: rank {LEAD} chose {lead['order'][0]}, and strict is on, so that no other may take its place"
        return Failure("refused_by_rank", f"{message}: {told}", ranks)
    return _same(key, chosen, statements) or Settled(chosen, lead["because"], refused)


def _refusal(kernel: str, selections: Sequence[Mapping[str, Any]]) -> Refusal | None:
    """The first rank's that cannot run a kernel."""
    for rank, selection in enumerate(selections):
        if kernel not in selection["order"]:
            why = selection["refused"].get(kernel, ("kernel_unknown", "no kernel of that name is registered there", ""))
            return Refusal(rank, *why)
    return None


def _same(key: str, kernel: str, statements: Sequence[Statement]) -> Failure | None:
    """The kernel must be one and the same on every rank."""
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
