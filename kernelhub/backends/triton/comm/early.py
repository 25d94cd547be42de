# mypy: ignore-errors
"""A launch that begins while the kernel before it ends: where its kernel waits, and where the next may begin.

    after_last: griddepcontrol.wait, before anything of global memory is read or written
    have_come:  griddepcontrol.launch_dependents, there or only once all values of other ranks have come

Programs of the next launch are resident, and wait, while programs of this one run. Three things hold:

1. All memory is as if launches followed each other: nothing is read or written before the wait, which ends when the
   kernel before has ended and its stores are visible. So slots and counters pass from call to call as `slots.py` and
   `turns.py` say. What is done before it concerns registers and shared memory only.
2. The next launch never runs beside the kernel before this one: this one lets it begin after its own wait.
3. No rank waits for itself. The next launch begins once all programs of this one have let it, so all of them
   have begun: what waits takes no place from what is waited for. Call k of a rank waits for call k of the others,
   which waits on its GPU for call k-1; that has begun whole, and waits for call k-1 of this rank, which has ended or
   has begun whole, too. Calls of one group on one stream hence end as they do without.

Programs that wait do take the place of kernels on other streams. Two groups on two streams need a GPU that holds the
calls of both and those that wait. With COME the next launch begins when no program of this one waits for another rank
any more, so that nothing is held while a rank is waited for; with BEGUN more of the launch is hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BEGUN, COME = 1, 2  # what has happened in a kernel when the next launch may begin; 0: it has ended


@triton.jit
def after_last(EARLY: tl.constexpr):
    """Wait until the kernel before has ended. The first thing that a kernel does with global memory."""
    if EARLY > 0:
        gdc_wait()
    if EARLY == 1:
        gdc_launch_dependents()


@triton.jit
def have_come(EARLY: tl.constexpr):
    """All values of other ranks have come, of all threads of this program."""
    if EARLY == 2:
        gdc_launch_dependents()
