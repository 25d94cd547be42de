"""Records of the Triton backend."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import (
    AnyOf,
    Between,
    OnDevice,
    OneOf,
    Package,
    Rejection,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.ops.attention.problem import ANY, FEW, FLOATS, FP8, MANY, ONE
from kernelhub.probes import cache

BACKEND = Backend("triton", "our portable kernels in Triton", package="triton", homepage="https://triton-lang.org")


@dataclass(frozen=True)
class Interpreter:
    """A CPU, if Triton's interpreter is on: slow, exact, for tests and debugging."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu":
            return Rejection("vendor", f"interpreted on a CPU only; {problem.device.name} is not one")
        if machine.variable("TRITON_INTERPRET") not in ("1", "true", "on", "yes", "y", "t"):
            return Rejection(
                "interpreter_off",
                "a CPU runs Triton only under its interpreter",
                "to debug the kernel on this CPU, start Python with TRITON_INTERPRET=1",
            )
        return None


@dataclass(frozen=True)
class WritableCache:
    """Triton must be able to keep what it compiles."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type == "cpu":
            return None
        finding = machine.ask("triton cache", lambda: cache.writable(cache.triton_cache_folder(), "TRITON_CACHE_DIR"))
        return None if finding.ok else Rejection(finding.code, finding.reason, finding.remedy)


# What Triton 3.6 to 3.9 all compile for; a newer GPU is added once the ahead-of-time tests build for it.
_ARCHITECTURES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
_GPU = AnyOf((OnDevice("nvidia", only=_ARCHITECTURES), Interpreter()))
_MACHINE = (_GPU, Package("triton", ">=3.6,<3.10"), WritableCache())
_WIDTH = "wider heads leave no tile that fits shared memory"
_SHAPES = (
    dtype_in("q_dtype", *FLOATS),
    dtype_in("kv_dtype", *FLOATS, FP8),
    Between("head_dim_qk", 16, 256, why=_WIDTH),
    Between("head_dim_vo", 16, 256, why=_WIDTH),
    anything("num_q_heads", "num_kv_heads"),
)
_PAGES = Between("page_size", 1, 1 << 16)
_FEATURES = frozenset(
    {
        "ragged",
        "causal",
        "window_left",
        "window_right",
        "softcap",
        "sinks",
        "lse",
        "kv_scale=value",
        "kv_scale=tensor",
        "kv_scale=head",
    }
)
_DECODE = OneOf("q_len", (ONE, FEW), why="its programs hold all rows of a sequence")
_ANY_LENGTH = OneOf("q_len", (ONE, FEW, MANY, ANY))
_HERE = "kernelhub.backends.triton.adapters"
_SOURCE = "FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023)"

KERNELS = (
    Kernel(
        op="attention",
        name="triton.prefill",
        target=f"{_HERE}:Prefill",
        summary="a tile of query rows per program, one pass over its keys",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _ANY_LENGTH),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
    ),
    Kernel(
        op="attention",
        name="triton.split_kv",
        target=f"{_HERE}:SplitKV",
        summary="few queries: keys split among programs, parts merged",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _DECODE),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
    ),
    Kernel(
        op="paged_attention",
        name="triton.split_kv",
        target=f"{_HERE}:SplitKV",
        summary="decode: keys split among programs as the device needs, parts merged",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _PAGES, _DECODE),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
    ),
    Kernel(
        op="paged_attention",
        name="triton.split_kv_fixed",
        target=f"{_HERE}:SplitKVFixed",
        summary="decode: keys split by a sequence's own length only, whatever the batch",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _PAGES, _DECODE),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
    ),
    Kernel(
        op="paged_attention",
        name="triton.mixed",
        target=f"{_HERE}:Mixed",
        summary="ragged batches: decode rows by split KV, the rest by prefill, told apart on the device",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _PAGES, _ANY_LENGTH, OneOf("ragged", (True,), why="needs cu_seqlens_q")),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
    ),
    Kernel(
        op="paged_attention",
        name="triton.prefill",
        target=f"{_HERE}:Prefill",
        summary="a tile of query rows per program, one pass over its pages",
        band=Band.PORTABLE,
        constraints=(*_MACHINE, *_SHAPES, _PAGES, _ANY_LENGTH),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
    ),
    Kernel(
        op="merge_attention_states",
        name="triton.merge",
        target="kernelhub.backends.triton.merge_adapter:Merge",
        summary="all parts in one pass",
        band=Band.PORTABLE,
        constraints=(
            *_MACHINE,
            dtype_in("dtype", *FLOATS),
            Between("head_dim", 1, 1024, why="a program holds a whole head"),
            anything("num_heads", "parts"),
        ),
        features=frozenset({"batched", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashAttention-2 (Dao 2023), section 3.1",
    ),
    Kernel(
        op="concat_mla_k",
        name="triton.concat",
        target="kernelhub.backends.triton.concat_adapter:Concat",
        summary="both parts in one launch",
        band=Band.PORTABLE,
        constraints=(
            *_MACHINE,
            dtype_in("dtype", *FLOATS, FP8),
            Between("nope_dim", 1, 2048, why="a program holds a whole head"),
            Between("rope_dim", 1, 2048, why="a program holds a whole head"),
            anything("num_heads"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
    ),
)
