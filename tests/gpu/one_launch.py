"""Calls of `cuda.paged_decode` merge parts in the launch that makes them: pytest -p tests.gpu.one_launch.

As a module it runs another one so: python -m tests.gpu.one_launch tests.gluon.soak --here ...
"""

from __future__ import annotations

import runpy
import sys


def pytest_sessionstart() -> None:
    from kernelhub.backends.cuda.attention.decode import Decode

    Decode.merges = True


if __name__ == "__main__":
    pytest_sessionstart()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
