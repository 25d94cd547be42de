"""What the kernels need on the machine."""

from __future__ import annotations

from kernelhub.dispatch.constraint import Constraint, OnDevice, Package, Takes
from kernelhub.probes.signature import Call

INSTALL = "build https://github.com/deepseek-ai/DeepEP/releases/tag/v1.2.1 for this torch"
_BUFFER = "deep_ep.buffer:Buffer"
CREATE = Call(f"{_BUFFER}.__init__", ("group",), ("num_nvl_bytes", "explicitly_destroy"))
LAYOUT = Call(f"{_BUFFER}.get_dispatch_layout", ("topk_idx", "num_experts"))
DISPATCH = Call(
    f"{_BUFFER}.dispatch",
    ("x",),
    (
        "num_tokens_per_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "num_worst_tokens",
        "config",
    ),
)
COMBINE = Call(f"{_BUFFER}.combine", ("x", "handle"), ("config",))
_CONFIGS = tuple(Call(f"{_BUFFER}.get_{step}_config", ("num_ranks",)) for step in ("dispatch", "combine"))

# DeepEP 2 has another buffer. The distribution's name is that of who built it, and its version is not always stated,
# so that the calls themselves are looked for.
_SHARED: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0),)),
    Package("deep_ep", install=INSTALL),
    Package("deep_ep_cpp", install=INSTALL),
    *(Takes(call, INSTALL) for call in (CREATE, *_CONFIGS)),
)
DISPATCH_MACHINE: tuple[Constraint, ...] = (*_SHARED, Takes(LAYOUT, INSTALL), Takes(DISPATCH, INSTALL))
COMBINE_MACHINE: tuple[Constraint, ...] = (*_SHARED, Takes(COMBINE, INSTALL))
