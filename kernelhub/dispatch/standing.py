"""Standings: the evidence for a kernel on each family of devices, which the policy of trust reads.

A record has one `Standing` for each family with evidence; see `docs/trust.md`.
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
    OPT_IN: "why it must be requested by name",
    KNOWN_BAD: "what goes wrong",
}

HERE, VENDOR, MEASURED = "here", "vendor", "measured"
TRUSTS = (HERE, VENDOR, MEASURED)
ANY = "any"  # internal: no evidence is required, to list what can be verified

UNTRUSTED = "untrusted"  # code of the rejection of a kernel that is not verified on a family of devices

_SECONDS = 20.0  # default time to verify a problem class


@dataclass(frozen=True)
class Standing:
    """The evidence for a kernel on some families of devices.

    Attributes:
        word: ``"verified"`` (this project ran it there), ``"published"`` (its vendor or a paper claims it),
            ``"untested"``, ``"opt_in"`` (it runs only if a user names it), ``"known_bad"``.
        families: `DeviceFacts.family` of each; ``"*"`` for every family that no other standing of the record names.
        evidence: for ``verified`` the device, date, versions and what ran; for ``published`` the claim, with a link;
            for ``opt_in`` and ``known_bad`` the reason.
        figure: the expected gain in a few words, e.g. ``"2.1x of flashinfer.fa2_decode"``; empty if there is none.
        seconds: approximate time to verify one problem class there.
    """

    word: str
    families: tuple[str, ...]
    evidence: str = ""
    figure: str = ""
    seconds: float = _SECONDS


NOTHING_KNOWN = Standing(UNTESTED, ("*",))


def verified(*families: str, evidence: str, figure: str = "") -> Standing:
    """A standing: this project ran the kernel on these families, with correct results."""
    return Standing(VERIFIED, families, evidence, figure)


def published(*families: str, evidence: str, figure: str = "", seconds: float = _SECONDS) -> Standing:
    """A standing: a vendor or a paper claims that the kernel runs on these families."""
    return Standing(PUBLISHED, families, evidence, figure, seconds)


def untested(*families: str, figure: str = "", seconds: float = _SECONDS) -> Standing:
    """A standing: no run of the kernel on these families is known; `figure` may state the expected gain."""
    return Standing(UNTESTED, families, "", figure, seconds)


def opt_in(*families: str, evidence: str) -> Standing:
    """A standing: the kernel runs on these families only if a user names it; `evidence` is the reason."""
    return Standing(OPT_IN, families, evidence)


def standing_on(standings: tuple[Standing, ...], family: str) -> Standing:
    """The standing on a family: the one that names it, else that of ``"*"``, else untested."""
    for name in (family, "*"):
        for standing in standings:
            if name in standing.families:
                return standing
    return NOTHING_KNOWN
