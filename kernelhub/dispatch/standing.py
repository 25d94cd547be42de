"""How a kernel stands on each family of devices: whether it ran there, and on whose word it may be chosen.

A record carries one `Standing` for each family that something is known about. Selection reads it under the policy of
trust: see `docs/trust.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

VERIFIED = "verified"
PUBLISHED = "published"
UNTESTED = "untested"
OPT_IN = "opt_in"
KNOWN_BAD = "known_bad"
WORDS = (VERIFIED, PUBLISHED, UNTESTED, OPT_IN, KNOWN_BAD)
NEEDS_EVIDENCE = {
    VERIFIED: "device, date, versions and what ran",
    PUBLISHED: "what is claimed, with a link",
    OPT_IN: "why nobody gets it who does not ask for it",
    KNOWN_BAD: "what goes wrong",
}

HERE, VENDOR, MEASURED = "here", "vendor", "measured"
TRUSTS = (HERE, VENDOR, MEASURED)
ANY = "any"  # not for users: whatever could be verified

UNTRUSTED = "untrusted"  # code of what speaks against a kernel that is not verified on a family of devices

_SECONDS = 20.0  # that verifying a problem class takes, where a record does not say


@dataclass(frozen=True)
class Standing:
    """What is known of a kernel on some families of devices.

    Attributes:
        word: ``"verified"`` (this project ran it there), ``"published"`` (its vendor or a paper claims it),
            ``"untested"``, ``"opt_in"`` (it runs only where a user names it), ``"known_bad"``.
        families: `DeviceFacts.family` of each; ``"*"`` for every family that no other standing of the record names.
        evidence: for ``verified`` the device, date, versions and what ran; for ``published`` the claim, with a link;
            for ``opt_in`` and ``known_bad`` the reason.
        figure: the expected gain in a few words, e.g. ``"2.1x of flashinfer.fa2_decode"``; empty if there is none.
        seconds: what verifying one problem class takes there, about.
    """

    word: str
    families: tuple[str, ...]
    evidence: str = ""
    figure: str = ""
    seconds: float = _SECONDS


NOTHING_KNOWN = Standing(UNTESTED, ("*",))


def verified(*families: str, evidence: str, figure: str = "") -> Standing:
    """The kernel ran on these families, and was right."""
    return Standing(VERIFIED, families, evidence, figure)


def published(*families: str, evidence: str, figure: str = "", seconds: float = _SECONDS) -> Standing:
    """A vendor or a paper claims that the kernel runs on these families."""
    return Standing(PUBLISHED, families, evidence, figure, seconds)


def untested(*families: str, figure: str = "", seconds: float = _SECONDS) -> Standing:
    """Nobody is known to have run the kernel on these families; what is expected of it may be said."""
    return Standing(UNTESTED, families, "", figure, seconds)


def opt_in(*families: str, evidence: str) -> Standing:
    """The kernel runs on these families only where a user names it, for this reason."""
    return Standing(OPT_IN, families, evidence)


def standing_on(standings: tuple[Standing, ...], family: str) -> Standing:
    """The standing on a family: its own, else that of every other family, else nothing is known."""
    for name in (family, "*"):
        for standing in standings:
            if name in standing.families:
                return standing
    return NOTHING_KNOWN
