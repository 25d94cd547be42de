"""Tests, with one thread per worker: numpy reads this when it is imported, and its threads spin while they wait.

TESTS_GPUS=N gives each worker of a parallel run one of the first N GPUs, in turn; CUDA reads it when it starts.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if _worker and "TESTS_GPUS" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(_worker) % int(os.environ["TESTS_GPUS"]))
