"""`problems_of`: the problems of a model on one rank, per phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelhub.dispatch.explain import DeviceLike, device_facts, dtype_named, problem_from
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import FLOATS, QUANTISED
from kernelhub.ops.models.description import LatentAttention
from kernelhub.ops.models.layers import DECODE, PREFILL, LayerCall, Setting, layer_calls
from kernelhub.ops.models.published import Model, describe

PHASES = (PREFILL, DECODE)
GRAPH_SIZES: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # batches that engines capture CUDA graphs of


@dataclass(frozen=True)
class Need:
    """One problem class that serving needs.

    Attributes:
        op: name of the op.
        facets: of its problem, by name, without the device.
        phases: phases that need it: ``"prefill"``, ``"decode"`` or both.
        layers: parts of the model that need it, e.g. ``"qkv"``, ``"windowed attention"``.
        sizes: figures of calls that no facet holds, by name, once for each kind of call: the widths that are
            quantised, say.
    """

    op: str
    facets: tuple[tuple[str, Any], ...]
    phases: tuple[str, ...]
    layers: tuple[str, ...]
    sizes: tuple[tuple[tuple[str, int], ...], ...] = ()

    def problem(self, device: DeviceLike = None) -> Any:
        """The op's problem on a device: as `explain` takes it, by default the first GPU here, else the CPU."""
        return problem_from(HUB.record(self.op), device_facts(device), dict(self.facets))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: what calls are made from, for another process."""
        return {"op": self.op, "facets": list(self.facets), "sizes": list(self.sizes)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Need:
        """The need that `to_dict` describes, without phases and layers."""
        return Need(plain["op"], _pairs(plain["facets"]), (), (), tuple(map(_pairs, plain["sizes"])))


def _pairs(plain: Sequence[Sequence[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in plain)


def problems_of(
    model: Model,
    *,
    tp: int = 1,
    ep: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_size: int | None = None,
    quantization: str | None = None,
    phases: Sequence[str] = PHASES,
) -> tuple[Need, ...]:
    """The problems of one rank that serves a model: each problem class once.

    torch multiplies weights in bfloat16, so these products are not listed. Experts run in `fused_moe`, with the
    routing before it. Prefill attends to packed sequences (`attention`) and to pages (`paged_attention`, for chunks and
    cached prefixes).

    Args:
        model: as of `describe`: a name such as ``"deepseek-v3.2"``, or a config.json.
        tp: ranks that share every layer; heads and widths are those of one of them.
        ep: ranks that share the experts, each with whole ones; then `tp` does not divide them.
        dtype: of activations: float32, float16 or bfloat16, by name or as torch's object.
        kv_dtype: of the KV cache: `dtype`, the default, or a float8.
        page_size: tokens per page; 16, or 64 for latent attention, unless given.
        quantization: format of the weights, in place of that of config.json.
        phases: ``"prefill"``, ``"decode"`` or both.

    Returns:
        In the order of ops, then of layers.

    Raises:
        ConfigurationError: an unknown model, one that cannot be shared out so, or a wrong value.

    Example:
        >>> from kernelhub.ops.models.problems import problems_of
        >>> [need.op for need in problems_of("llama-3.1-8b", phases=["decode"])]
        ['paged_attention']
    """
    phases = (phases,) if isinstance(phases, str) else phases
    for phase in phases:
        if phase not in PHASES:
            meant = did_you_mean(phase, PHASES)
            raise ConfigurationError(f"phases: {phase!r} is not one of {', '.join(PHASES)}{meant}")
    for name, ranks in (("tp", tp), ("ep", ep)):
        if type(ranks) is not int or ranks < 1:
            raise ConfigurationError(f"{name} is {ranks!r}; it is a number of ranks, 1 or more")
    if page_size is not None and (type(page_size) is not int or page_size < 1):
        raise ConfigurationError(f"page_size is {page_size!r}; it is a number of tokens, 1 or more")
    dtype = _dtype("dtype", dtype, FLOATS)
    kv_dtype = dtype if kv_dtype is None else _dtype("kv_dtype", kv_dtype, (dtype, *QUANTISED))
    described = describe(model, quantization)
    latent = isinstance(described.attention, LatentAttention)
    setting = Setting(tp, ep, dtype, kv_dtype, page_size or (64 if latent else 16))
    return tuple(_merged(layer_calls(described, setting), tuple(phases)))


def _dtype(name: str, given: Any, known: tuple[str, ...]) -> str:
    """The name of a dtype, given as a name or as torch's object."""
    word = dtype_named(str(given).removeprefix("torch."))
    if word not in known:
        raise ConfigurationError(f"{name} is {given!r}{did_you_mean(word, known)}; it takes {', '.join(known)}")
    return word


def _merged(asked: Iterator[LayerCall], phases: tuple[str, ...]) -> Iterator[Need]:
    """One need for each problem class, with all phases and layers that need it."""
    found: dict[tuple[str, tuple[tuple[str, Any], ...]], Need] = {}
    for item in asked:
        when = tuple(phase for phase in PHASES if phase in item.phases and phase in phases)
        if not when:
            continue
        key = item.op, tuple(sorted(item.facets.items()))
        known = found.get(key) or Need(*key, (), ())
        both = tuple(phase for phase in PHASES if phase in (*known.phases, *when))
        layers = tuple(dict.fromkeys((*known.layers, item.layer)))
        sizes = tuple(dict.fromkeys((*known.sizes, tuple(item.sizes.items())))) if item.sizes else known.sizes
        found[key] = replace(known, phases=both, layers=layers, sizes=sizes)
    ops = list(dict.fromkeys(op for op, _ in found))
    yield from sorted(found.values(), key=lambda need: ops.index(need.op))
