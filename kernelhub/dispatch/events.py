"""The logs of selections and of fallbacks, and their output to stderr (`KERNELHUB_LOG`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

selection_log = logging.getLogger("kernelhub.selection")
fallback_log = logging.getLogger("kernelhub.fallback")


def print_events(events: Iterable[str]) -> None:
    """Print the named events, ``"selection"`` or ``"fallback"``, to stderr."""
    for event in events:
        log = logging.getLogger(f"kernelhub.{event}")
        log.setLevel(logging.INFO)
        if not log.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            log.addHandler(handler)
            log.propagate = False
