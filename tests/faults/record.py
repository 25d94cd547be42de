"""What a fault is, and the twelve kinds of them."""

from __future__ import annotations

from dataclasses import dataclass

# The kinds, and how what happens is seen.
FIXTURES = {
    "FX1": (
        "packages",
        "`explain` and `backends` show the code for each kernel of the library, `doctor` for the library",
    ),
    "FX2": ("devices", "`explain` shows the code for each kernel that does not support the device"),
    "FX3": ("toolchains", "`doctor` shows the code, and `explain` shows it for each kernel that must be compiled"),
    "FX4": ("file systems and locks", "a log line of `kernelhub.caches`, `cache_notices()`, `doctor`, `cache list`"),
    "FX5": ("network", "kernelhub makes no connection; an operation that requires one raises an error"),
    "FX6": ("tensors", "an error before any launch names the parameter"),
    "FX7": ("ranks", "`RanksDisagree` with the code and the rank, on every rank, within the time-out"),
    "FX8": ("work after `seal()`", "`NotWarmed` names the kind of work and the line that warms it"),
    "FX9": ("records and their properties", "`explain` shows the code for the kernel; an invalid record is an error"),
    "FX10": ("environment and arguments", "an error at the first selection suggests the correct name"),
    "FX11": ("processes and threads", "calls return"),
    "FX12": ("wrong kernels", "`verify` reports the code; `explain` shows `quarantined` with the size of the error"),
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
