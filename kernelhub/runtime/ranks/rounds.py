"""The rounds of an agreement: the lead proposes kernels, all ranks load them, and kernels that fail are left out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kernelhub.dispatch.fingerprint import digest
from kernelhub.runtime.ranks.agreed import fingerprints, try_all
from kernelhub.runtime.ranks.meeting import Ended, Meeting, this_process
from kernelhub.runtime.ranks.settle import LEAD, Failure, Outcome, Refusal, Settled, settle
from kernelhub.runtime.ranks.statement import Stated, statement_of, table_digest


def alone(stated: Stated, table: dict[str, Any]) -> tuple[Stated, Outcome, Mapping[str, Any]]:
    """A group of one."""
    failed: dict[str, dict[str, Refusal]] = {}
    while True:
        outcome = settle([statement_of(stated, LEAD, str(this_process()), "")], failed)
        if isinstance(outcome, Failure):
            raise Ended(outcome)
        lacking = try_all(stated, outcome)
        if not lacking:
            return stated, outcome, table
        _add(failed, LEAD, lacking)


def lead(
    meeting: Meeting, stated: Stated, mine: Mapping[str, Any], table: Mapping[str, Any]
) -> tuple[Outcome, Mapping[str, Any]]:
    """Receive all statements, settle, and let all ranks load; repeat without failed kernels until all are ready."""
    meeting.say("tuned", table)
    meeting.say("said", mine)
    statements = meeting.hear_all("said")
    failed: dict[str, dict[str, Refusal]] = {}
    for attempt in itertools.count():
        outcome = settle(statements, failed)
        if isinstance(outcome, Failure):
            meeting.give_up(outcome)
        plain = {key: asdict(settled) for key, settled in outcome.items()}
        meeting.say(f"outcome{attempt}", {"settled": plain, "tuned": table_digest(table)})
        meeting.say(f"ready{attempt}", _ready(stated, outcome, table))
        answers = meeting.hear_all(f"ready{attempt}")
        lacking = [(rank, answer["lacking"]) for rank, answer in enumerate(answers) if answer["lacking"]]
        for rank, of_rank in lacking:
            _add(failed, rank, of_rank)
        if not lacking:
            unlike = tuple(rank for rank, answer in enumerate(answers) if answer["digest"] != answers[LEAD]["digest"])
            if unlike:
                message = f"the settled kernels have another fingerprint on rank {unlike[0]} than on rank {LEAD}"
                meeting.give_up(Failure("fingerprint_differs", f"{message}; install the same on both", unlike))
            meeting.conclude()
            return outcome, table
    raise AssertionError("unreachable")


def follow(
    meeting: Meeting, stated: Stated, mine: Mapping[str, Any], table: Mapping[str, Any]
) -> tuple[Outcome, Mapping[str, Any]]:
    """Send the statement, then load what the lead settles, until it announces that all agree."""
    meeting.say("said", mine)
    tuned = meeting.hear_lead("tuned") or {}
    outcome: dict[str, Settled] = {}
    for attempt in itertools.count():
        message = meeting.hear_lead(f"outcome{attempt}", after=f"ready{attempt - 1}" if attempt else "said")
        if message is None:
            break
        if message["tuned"] != table_digest(tuned):
            reason = f"the table of tuning results did not reach rank {meeting.rank} as rank {LEAD} sent it"
            meeting.give_up(Failure("table_differs", f"{reason}; agree again", (meeting.rank,)))
        outcome = {key: _settled(plain) for key, plain in message["settled"].items()}
        meeting.say(f"ready{attempt}", _ready(stated, outcome, tuned))
    return outcome, tuned


def _ready(stated: Stated, outcome: Outcome, table: Mapping[str, Any]) -> dict[str, Any]:
    """Load the settled kernels; send those that failed, or the digest of all fingerprints."""
    lacking = try_all(stated, outcome)
    if lacking:
        return {"lacking": lacking, "digest": ""}
    return {"lacking": {}, "digest": digest([str(mark) for mark in fingerprints(stated, outcome, table_digest(table))])}


def _add(failed: dict[str, dict[str, Refusal]], rank: int, lacking: Mapping[str, Any]) -> None:
    for key, (kernel, *why) in lacking.items():
        failed.setdefault(key, {})[kernel] = Refusal(rank, *why)


def _settled(plain: Mapping[str, Any]) -> Settled:
    refused = {name: Refusal(**why) for name, why in plain["refused"].items()}
    return Settled(plain["kernel"], plain["because"], refused)
