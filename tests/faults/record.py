"""What a fault is, and the twelve kinds of them."""

from __future__ import annotations

from dataclasses import dataclass

# The kinds, and how what happens is seen.
FIXTURES = {
    "FX1": (
        "packages",
        "`explain` and `backends` show the code against each kernel of the library; `doctor` the library",
    ),
    "FX2": ("devices", "`explain` shows the code against each kernel that is not for the device"),
    "FX3": ("toolchains", "`doctor` shows the code; `explain`, against each kernel that would be compiled"),
    "FX4": ("file systems and locks", "a log line of `kernelhub.caches`, `cache_notices()`, `doctor`, `cache list`"),
    "FX5": ("network", "nothing is asked of it; what would be, is refused"),
    "FX6": ("tensors", "the error names the parameter, before anything is launched"),
    "FX7": ("ranks", "`RanksDisagree` with the code and the rank, on every rank, within the time-out"),
    "FX8": ("work after `seal()`", "`NotWarmed` with the kind of work, and the line that warms it"),
    "FX9": ("records and what they promise", "`explain` shows the code against the kernel; a wrong record is an error"),
    "FX10": ("environment and arguments", "an error at the first decision, with the name that was meant"),
    "FX11": ("processes and threads", "calls answer"),
    "FX12": ("kernels that are wrong", "`verify` gives the code; `explain` says `quarantined`, with the figures"),
}
NOTHING = "none"  # the code of a fault that must make no difference


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        key: its name in marks.
        fixture: of which kind, a key of `FIXTURES`.
        injected: what is done, as a phrase.
        code: the reason code that must come of it, the class of the error where that is the code, or `NOTHING`.
        remedy: what helps; faults of one code have one.
    """

    key: str
    fixture: str
    injected: str
    code: str
    remedy: str
