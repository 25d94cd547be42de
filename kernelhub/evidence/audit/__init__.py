"""Audit of a running engine: a share of its calls is recomputed and compared (`KERNELHUB_AUDIT`).

Verification uses generated calls. It cannot detect a kernel that is wrong for other calls: above a number of tokens,
from some batch size on, at every hundredth call. Without a share, nothing of this package is imported.
"""

from __future__ import annotations
