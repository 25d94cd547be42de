"""What cuDNN's kernels ask of the machine.

The frontend makes its functions at run time or in C++, so their parameters cannot be read from source: versions are
those whose results were seen, and the adapter builds a graph before it is used for the first time.
"""

from __future__ import annotations

from kernelhub.dispatch.constraint import OnDevice, Package

INSTALL = 'pip install "kernelhub[cudnn]"'
LOWEST_BACKEND = 91900  # cuDNN 9.19, which torch 2.11 brings

MACHINE = (
    OnDevice("nvidia", only=((9, 0),)),
    Package("cudnn", ">=1.32,<1.33", distribution="nvidia-cudnn-frontend", install=INSTALL),
    Package("triton", ">=3.6,<3.10"),  # for `blank`
)
