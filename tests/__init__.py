"""Tests, with one thread per worker: numpy reads this when it is imported, and its threads spin while they wait."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
