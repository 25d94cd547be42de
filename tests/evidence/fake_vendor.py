"""A library of a vendor as a plugin: its kernels compute `attention` rightly, but for what their names say.

Nothing of it has been verified on any family of devices; its vendor publishes that all of it is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import kernelhub

# By name, in the order in which they would be tried, what a launch does before it computes (as Python).
ACTS = {
    "a_dies": "import os; os.abort()",
    "b_hangs": "import time; time.sleep(3600)",
    "c_loses_the_device": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "d_wrong": "spoil = True",
    "e_wrong_beyond_20_tokens": "spoil = q.shape[-3] > 20",
    "f_wrong_after_other_calls": "calls = globals().setdefault('calls', []); calls.append(1); spoil = len(calls) > 6",
    "f_wrong_beyond_140_tokens": "spoil = q.shape[-3] > 140",  # which are more than those of the op's own cases
    "g_right": "",
    "h_right_too": "",
    "i_slow": "import time; time.sleep(0.1)",
}
FAMILY = "cpu"

_KERNELS = """
from kernelhub.backends.torch.kernels import KERNELS as OURS
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import opt_in, published
from kernelhub.ops.attention.problem import AttentionProblem

BACKEND = Backend("vendor", "a library that nobody has verified here")
_BLOCKED = next(kernel for kernel in OURS if (kernel.op, kernel.name) == ("attention", "torch.blocked"))
KERNELS = tuple(
    Kernel(
        op="attention", name=f"vendor.{{name}}", target=f"vendor_launches:{{name}}", summary=name, band=Band.PLUGIN,
        constraints=(anything(*AttentionProblem.__dataclass_fields__),), features=_BLOCKED.features,
        standings=(published("{family}", evidence="https://example.com/fast", figure="2.1x of torch.sdpa", seconds=9),),
    )
    for name in {names!r}
)
"""
_LAUNCHES = """
from kernelhub.backends.torch.attention.blocked import Blocked

def _made(name, act):
    code = compile(act, name, "exec")
    class Vendors(Blocked):
        def launch(self, q, k, v, step, values, out, lse):
            known = {{"q": q}}
            if q.numel():
                exec(code, globals(), known)
            super().launch(q, k, v, step, values, out, lse)
            if known.get("spoil"):
                out.mul_(1.5)
    return Vendors

for _name, _act in {acts!r}.items():
    globals()[_name] = _made(_name, _act)
"""


def install(site: Path, names: Iterable[str] = tuple(ACTS), family: str = FAMILY) -> None:
    """The library, as pip would leave it in a folder of sys.path."""
    names = tuple(names)
    site.mkdir(exist_ok=True)
    (site / "vendor_plugin.py").write_text(_KERNELS.format(names=names, family=family))
    (site / "vendor_launches.py").write_text(_LAUNCHES.format(acts={name: ACTS[name] for name in names}))
    info = site / "vendor_plugin-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelhub.backends]\nvendor = vendor_plugin\n")


def uninstall(site: Path) -> None:
    """Forget it, also what was imported of it."""
    if str(site) in sys.path:
        sys.path.remove(str(site))
    for name in ("vendor_plugin", "vendor_launches"):
        sys.modules.pop(name, None)
    kernelhub.reload()
