"""Tests, with one thread per worker: numpy reads this when it is imported, and its threads spin while they wait.

TESTS_GPUS=N gives each worker of a parallel run one of the first N visible GPUs, in turn; CUDA reads it when it starts.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if _worker and "TESTS_GPUS" in os.environ:
    _count = int(os.environ["TESTS_GPUS"])
    _visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = _visible.split(",")[int(_worker) % _count]
