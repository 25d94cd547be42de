"""Where our Gluon kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import untested

# Compiled ahead and emulated; no run on a GPU is recorded yet.
NOT_RUN = (untested("hopper"),)
