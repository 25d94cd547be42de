"""What a quantiser must reject even if forced: none of them runs without `unsafe=True`, which bypasses the constraints.

Their bits are then those of the library, but still of what was asked.
"""

from __future__ import annotations

from kernelhub.errors import InvalidArgument
from kernelhub.ops.quant.problem import GROUP, QuantizeFp8Problem, QuantizeMxProblem, QuantizeProblem

_BLACKWELL = (10, 0)


def check_device(op: str, problem: QuantizeProblem) -> None:
    """Check that the library has compiled its kernels for the device.

    Raises:
        InvalidArgument: it is older; the results would be memory that nobody wrote.
    """
    device = problem.device
    if device.vendor == "nvidia" and device.capability < _BLACKWELL:
        what = f"is on {device.name}, for which FlashInfer compiles a kernel without a body"
        raise InvalidArgument(op, "x", what, "do not force a kernel, or run on sm_100 or newer")


def check_rounding(op: str, problem: QuantizeMxProblem) -> None:
    """Scales are rounded up.

    Raises:
        InvalidArgument: other options are requested.
    """
    if not problem.round_up:
        raise InvalidArgument(op, "scale_rounding", "is 'floor', which FlashInfer does not support", "give 'up'")


def check_groups(problem: QuantizeFp8Problem) -> None:
    """Groups of a row share a scale, which is made.

    Raises:
        InvalidArgument: others do.
    """
    if problem.granularity != GROUP:
        what = f"is {problem.granularity!r}, for which FlashInfer has no kernel"
        raise InvalidArgument("quantize_fp8", "granularity", what, f"give {GROUP!r}")
