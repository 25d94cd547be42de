"""kernelhub as an attention implementation of Hugging Face transformers, 4.57 or newer.

After `register()`, ``attn_implementation="kernelhub"`` makes a model call `attend` in every layer. Once per forward
pass and kind of layer it also calls `key_mask`, which returns a compact and exact mask.

Supported: softcap, sliding windows, sinks, grouped and unequal heads, padding on either side, packed sequences, every
cache of transformers, and non-causal attention. Anything else raises an error that names it: gradients and dropout,
attention weights, biases, custom masks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from kernelhub.compat.transformers_mask import ELSEWHERE, Layout, Sees, key_mask, layout, refuse
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.attention import attention

OLDEST = Version("4.57")

# Arguments that models pass to attention and that do not change it: they are already applied to the queries, keys,
# values and mask, or concern what the model returns. Any other argument with a value is refused.
HARMLESS = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)

_NOT_PASSED = -1  # the sliding_window of a layer that does not pass it, unlike one that passes None
_LAYOUT = "_kernelhub_layout"


def register(name: str = "kernelhub") -> None:
    """Register kernelhub as an ``attn_implementation`` of transformers; a second call changes nothing.

    Args:
        name: the name of the implementation. It must be new to transformers, and without "flash", "/" and "|", which
            have a meaning there.

    Raises:
        ConfigurationError: transformers is missing or older than 4.57, or the name is not available.

    Example:
        >>> import kernelhub.compat.transformers
        >>> kernelhub.compat.transformers.register()
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="kernelhub")
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        message = f"transformers cannot be imported: {error}; pip install 'kernelhub[transformers]'"
        raise ConfigurationError(message) from error
    if Version(transformers.__version__) < OLDEST:
        message = f"transformers {transformers.__version__} is older than {OLDEST}; pip install -U transformers"
        raise ConfigurationError(message)
    known = transformers.AttentionInterface().get(name, attend) is not attend
    if known or name in ("", "eager") or any(part in name for part in ("flash", "/", "|")):
        message = f"{name!r} is taken or has a meaning in transformers; register another name, such as 'kernelhub'"
        raise ConfigurationError(message)
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, key_mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the signature of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its ``is_causal`` applies if the argument is None.
        query: ``[B, H, S, D]``.
        key: ``[B, KH, SK, D]``.
        value: ``[B, KH, SK, DV]``.
        attention_mask: the result of `key_mask`. It defines the keys of each query; if it is None, `is_causal` and
            `sliding_window` do.
        dropout: must be 0.
        scaling: factor of q k^T; by default ``1 / sqrt(D)``.
        sliding_window: number of keys that a causal query attends to, its own included; to each side if the layer is
            not causal.
        softcap: bound of the scores.
        s_aux: ``[H]``, one more score per head in the softmax denominator.
        is_causal: queries attend to no later keys.
        cu_seq_lens_q: ``[num_seqs + 1]``, offsets of the sequences packed into the flattened batch.
        cu_seq_lens_k: the same for the keys.
        max_length_q: upper bound on the queries of a packed sequence.
        max_length_k: upper bound on the keys of a packed sequence.
        others: those in `HARMLESS`, or None, or False.

    Returns:
        ``[B, S, H, DV]``, zero for queries that are padding, and None for the weights.

    Raises:
        InvalidArgument: an argument has no kernel that supports it; nothing is silently ignored.
    """
    _check_nothing_is_lost(query, key, value, s_aux, dropout, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    run = partial(_run, softcap=softcap, sinks=s_aux, scale=scaling)
    if attention_mask is not None:
        return _masked(q, k, v, attention_mask, run, cu_seq_lens_q, cu_seq_lens_k), None
    if sliding_window == _NOT_PASSED:
        _check_no_window(module, k.shape[1])
        sliding_window = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = (sliding_window or 0) - 1
    sees = (left, 0 if causal else left)
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return run(q, k, v, sees), None
    return _packed(q, k, v, sees, run, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), None


def _check_nothing_is_lost(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    dropout: float,
    others: dict[str, object],
) -> None:
    """Refuse arguments that would otherwise be ignored."""
    if dropout:
        refuse("dropout", f"is {dropout}", "call model.eval(): kernels are for inference")
    if torch.is_grad_enabled():
        for parameter, tensor in (("query", query), ("key", key), ("value", value), ("s_aux", s_aux)):
            if tensor is not None and tensor.requires_grad:
                fix = 'call the model under torch.inference_mode(), or train with attn_implementation="sdpa"'
                refuse(parameter, "requires grad", fix)
    for parameter, argument in others.items():
        if parameter not in HARMLESS and argument is not None and argument is not False:
            refuse(parameter, f"is given, a {type(argument).__name__} that kernels do not support", ELSEWHERE)


def _check_no_window(module: torch.nn.Module, num_keys: int) -> None:
    """Refuse a layer that does not pass the window of its configuration, although its mask contains the window."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if layer_types is not None and layer is not None and layer_types[layer] != "sliding_attention":
        return
    if window and num_keys > window:
        problem = f"is {window} in the configuration, but {type(module).__name__} does not pass it on"
        refuse("sliding_window", problem, ELSEWHERE)


def _run(q: Tensor, k: Tensor, v: Tensor, sees: Sees, **features: Any) -> Tensor:
    """`attention` of q [B, S, H, D] or [T, H, D]; `sees` gives the range of keys of a query."""
    left, right = sees
    window = None if left < 0 and right <= 0 else (left, right if right else -1)
    out: Tensor = attention(q, k, v, causal=right == 0, window=window, **features)
    return out


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Sees,
    run: Callable[..., Tensor],
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
) -> Tensor:
    """Sequences that the caller packed into the flattened batch; tokens outside of them give zeros."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        refuse("cu_seq_lens_q", "and cu_seq_lens_k go together", "give both, or neither")
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    run(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        sees,
        cu_seqlens_q=cu_seq_lens_q.to(torch.int32),
        cu_seqlens_k=cu_seq_lens_k.to(torch.int32),
        max_seqlen_q=None if max_length_q is None else int(max_length_q),
        max_seqlen_k=None if max_length_k is None else int(max_length_k),
        out=out.flatten(0, 1),
    )
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the shape without padding is not static
def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    run: Callable[..., Tensor],
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Tensor:
    """Attention of each sequence without its padding; padding queries give zeros."""
    shared: tuple[int, Layout] | None = getattr(mask, _LAYOUT, None)  # shared by the layers of a forward pass
    if shared is None or shared[0] != q.shape[1]:
        shared = (q.shape[1], layout(mask, *q.shape[:2]))
        setattr(mask, _LAYOUT, shared)
    where = shared[1]
    _check_same_offsets("cu_seq_lens_q", cu_seq_lens_q, where.cu_seqlens_q)
    _check_same_offsets("cu_seq_lens_k", cu_seq_lens_k, where.cu_seqlens_k)
    if k.shape[1] < where.num_keys:
        refuse("attention_mask", f"is for {where.num_keys} keys", f"the layer has {k.shape[1]}")
    if where.queries is None:
        return run(q, k[:, : where.num_keys], v[:, : where.num_keys], where.sees)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    out[where.queries] = run(
        q[where.queries],
        k[where.keys],
        v[where.keys],
        where.sees,
        cu_seqlens_q=where.cu_seqlens_q,
        cu_seqlens_k=where.cu_seqlens_k,
        max_seqlen_q=where.max_seqlen_q,
        max_seqlen_k=where.max_seqlen_k,
    )
    return out


def _check_same_offsets(parameter: str, given: Tensor | None, masked: Tensor | None) -> None:
    """Check that offsets given with a mask agree with it."""
    if given is not None and (masked is None or given.tolist() != masked.tolist()):
        refuse(parameter, "contradicts attention_mask or position_ids", "give only one of them")
