"""`write_mla_cache`: latents and rotary parts of new tokens into a paged cache."""

from __future__ import annotations

from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.mla.cache.adapter import MlaCacheAdapter
from kernelhub.ops.mla.cache.call import bind, check, problem_of, scale_kind
from kernelhub.ops.mla.cache.problem import WRITE_MLA_CACHE, MlaCacheProblem
from kernelhub.ops.mla.cache.reference import write_mla_cache_reference
from kernelhub.ops.operators import Traced

_op: Op[MlaCacheProblem] = Op(
    Contract.of(
        WRITE_MLA_CACHE,
        problem_of=problem_of,
        adapter=MlaCacheAdapter,
        bind=bind,
        reference=write_mla_cache_reference,
        example="kernelhub.ops.mla.cache.inputs:write_mla_cache_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class MlaCachePlan(CallPlan):
    """A kernel chosen for tokens and a cache like these.

    ``run(kv_c, k_rope, kv_cache, slot_mapping, kv_scale=None)`` is a whole call.
    """

    __slots__ = ()
    call = "kv_c, k_rope, kv_cache, slot_mapping, kv_scale"


@publish(_op, prepares(_op, MlaCachePlan), traced=Traced(dict, ("kv_cache",)))
def write_mla_cache(
    kv_c: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float | Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Write the latents and rotary parts of new tokens into the pages of a latent cache.

    Args:
        kv_c: ``[T, V]``, float32, float16 or bfloat16: the normalised latents.
        k_rope: ``[T, R]`` or ``[T, 1, R]`` in the same dtype: the rotary part of the keys, which all heads share.
        kv_cache: ``[num_pages, page_size, V + R]`` or ``[num_pages, page_size, 1, V + R]`` in the same dtype, or
            float8_e4m3fn with `kv_scale`; it is written to, the latent before the rotary part.
        slot_mapping: int64 ``[T]``, where each token goes: ``page * page_size + place in the page``. Negative for a
            token that is not written. Slots differ from each other; on a GPU that is checked with ``KERNELHUB_CHECK=1``
            only.
        kv_scale: factor of an fp8 cache, a float or float32 of one element: ``value / kv_scale`` is stored, rounded
            to nearest even and saturating at 448, so that stored times kv_scale is the value.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        `kv_cache` itself.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        vLLM's ``concat_and_cache_mla``; FlashInfer's ``append_paged_mla_kv_cache``.

    Example:
        >>> import torch, kernelhub
        >>> kv_cache = torch.zeros(4, 64, 576)
        >>> slots = torch.tensor([0, 130, -1])
        >>> _ = kernelhub.write_mla_cache(torch.ones(3, 512), torch.ones(3, 64), kv_cache, slots)
        >>> kv_cache.sum(2).nonzero().tolist()
        [[0, 0], [2, 2]]
    """
    if type(kv_c) is not Tensor and isinstance(kv_c, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
    try:
        key = (
            kv_c.dtype,
            kv_cache.dtype,
            kv_c.shape[1],
            k_rope.shape[-1],
            kv_cache.shape[1],
            scale_kind(kv_scale),
        )
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        run = _op.decide(key, kv_c.get_device(), backend)
    result: Tensor = run(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
    return result
