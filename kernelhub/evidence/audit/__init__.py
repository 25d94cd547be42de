"""Calls of a running engine, a share of which is computed again by other means and compared: `KERNELHUB_AUDIT`.

Verification asks a kernel calls of its own making. What it cannot see is a kernel that is wrong for others: beyond a
number of tokens, from some batch on, at every hundredth call. While no share is set nothing here is imported.
"""

from __future__ import annotations
