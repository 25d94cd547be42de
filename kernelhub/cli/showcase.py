"""The calls of `demo`: attention of real models and a DeepSeek-like block, each with a check and torch peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernelhub
from kernelhub.cli import block
from kernelhub.dispatch.op import OpFunction
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import ToleranceCheck, compare_out
from kernelhub.ops.models.shapes import ATTENTION, AttentionModel

_LLAMA, _GPT_OSS = ATTENTION["llama-3.1-8b"], ATTENTION["gpt-oss-120b"]

_SDPA = "scaled_dot_product_attention"

# Queries per block that is checked against the reference, which keeps every score in memory.
_BLOCK = 128


@dataclass(frozen=True)
class Size:
    """Sizes of the demo on a kind of device.

    Attributes:
        prefill_tokens: tokens of the sequence that is prefilled.
        num_seqs: sequences that are decoded.
        kv_tokens: KV tokens of each of them, on average.
        num_experts: routed experts of the block, which takes as many sequences.
        budget_s: time spent on each measurement.
    """

    prefill_tokens: int
    num_seqs: int
    kv_tokens: int
    num_experts: int
    budget_s: float


FULL = {"cpu": Size(1024, 8, 2048, 32, 3.0), "cuda": Size(8192, 32, 4096, 256, 2.0)}
QUICK = {"cpu": Size(256, 4, 512, 16, 0.5), "cuda": Size(2048, 16, 1024, 64, 0.5)}


@dataclass(frozen=True)
class Case:
    """One call, its check, and its torch peers.

    Attributes:
        what: the call in words.
        function: the op.
        arguments: its arguments.
        tokens: tokens that one call attends for.
        check: compares a result with the reference.
        checked: the part of the result that `check` reads.
        peers: the nearest plain torch calls, by name; the fastest one is compared.
        peer_is: what the peers compute.
    """

    what: str
    function: OpFunction[Any, Any, Any]
    arguments: dict[str, Any]
    tokens: int
    check: Callable[[Any], ToleranceCheck | block.ToleranceCheck]
    checked: str
    peers: dict[str, Callable[[], Tensor]]
    peer_is: str


def cases(size: Size, device: torch.device) -> dict[str, Callable[[], Case]]:
    """The demo's calls by title, each built on request, so that only one is in memory at a time."""
    made = block.Block(size.num_seqs, size.kv_tokens, size.num_experts, device)
    return {
        "prefill": partial(_prefill, _LLAMA, size.prefill_tokens, device),
        "paged decode": partial(_decode, _LLAMA, size, device),
        "prefill with a window and sinks": partial(_prefill, _GPT_OSS, size.prefill_tokens, device),
        "block of DeepSeek V3's shape: latent attention": partial(_latent_attention, made),
        "block of DeepSeek V3's shape: routing": partial(_routing, made),
        "block of DeepSeek V3's shape: experts": partial(_experts, made),
    }


def _prefill(model: AttentionModel, tokens: int, device: torch.device) -> Case:
    arguments = attention_inputs(model, q_tokens=tokens, device=device)
    q, k, v = (arguments[name].transpose(1, 2) for name in ("q", "k", "v"))
    group = model.num_q_heads // model.num_kv_heads
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    lacking = " and ".join(name for name in ("window", "sinks") if name in arguments)
    starts = sorted({0, max(0, (tokens - _BLOCK) // 2), max(0, tokens - _BLOCK)})
    return Case(
        what=f"{model.name}, 1 sequence of {tokens} tokens, bfloat16, causal{_features(arguments)}",
        function=kernelhub.attention,
        arguments=arguments,
        tokens=tokens,
        check=partial(_check_prefill, arguments, starts),
        checked=_checked(starts, tokens),
        peers={
            f"{_SDPA} with enable_gqa": partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True),
            f"{_SDPA}, KV expanded beforehand": partial(
                scaled_dot_product_attention, q, wide_k, wide_v, is_causal=True
            ),
        },
        peer_is="the same tensors, causal" + (f", without {lacking}, which it does not support" if lacking else ""),
    )


def _decode(model: AttentionModel, size: Size, device: torch.device) -> Case:
    lengths = _spread(size.num_seqs, size.kv_tokens)
    arguments = paged_attention_inputs(model, seq_lens=lengths, device=device)
    q = arguments["q"].unsqueeze(2)
    shape = (size.num_seqs, model.num_kv_heads, size.kv_tokens)
    k = torch.randn(*shape, model.head_dim_qk, device=device, dtype=torch.float32).to(q.dtype)
    v = torch.randn(*shape, model.head_dim_vo, device=device, dtype=torch.float32).to(q.dtype)
    packed = q.reshape(size.num_seqs, model.num_kv_heads, -1, model.head_dim_qk)  # a group's heads as rows of one
    what = f"{size.num_seqs} sequences of {min(lengths)} to {max(lengths)} tokens, pages of 16, bfloat16"
    return Case(
        what=f"{model.name}, {what}{_features(arguments)}",
        function=kernelhub.paged_attention,
        arguments=arguments,
        tokens=size.num_seqs,
        check=partial(_check_decode, arguments),
        checked="all sequences",
        peers={
            f"{_SDPA} with enable_gqa": partial(scaled_dot_product_attention, q, k, v, enable_gqa=True),
            f"{_SDPA}, heads packed by hand": partial(scaled_dot_product_attention, packed, k, v),
        },
        peer_is=f"as many KV tokens without pages, {size.num_seqs} sequences of {size.kv_tokens} in one dense tensor",
    )


def _latent_attention(made: block.Block) -> Case:
    return Case(
        what=f"{made.num_seqs} sequences of {made.kv_tokens} tokens, 16 heads, latents of 512 + 64, bfloat16",
        function=kernelhub.mla_attention,
        arguments=made.attention,
        tokens=made.num_seqs,
        check=made.check_attention,
        checked="all sequences",
        peers={_SDPA: made.attention_in_torch()},
        peer_is="as many latents without pages, the heads packed as rows",
    )


def _routing(made: block.Block) -> Case:
    model = made.model
    return Case(
        what=f"{made.num_seqs} tokens to {model.top_k} of {model.num_experts} experts, sigmoid with a correction bias",
        function=kernelhub.route_experts,
        arguments=made.routing,
        tokens=made.num_seqs,
        check=made.check_routing,
        checked="all tokens",
        peers={"grouped top-k, op by op": made.routing_in_torch()},
        peer_is="as the model's own code has it",
    )


def _experts(made: block.Block) -> Case:
    model = made.model
    return Case(
        what=f"{made.num_seqs} tokens, {model.num_experts} experts of 7168 x 256, fp8 in blocks of 128 x 128",
        function=kernelhub.fused_moe,
        arguments=made.experts,
        tokens=made.num_seqs,
        check=made.check_experts,
        checked="the first 8 tokens",
        peers={"a matrix product per expert": made.experts_in_torch()},
        peer_is="weights made bfloat16 beforehand, which takes twice the memory",
    )


def _spread(count: int, mean: int) -> list[int]:
    """Different lengths around a mean, as in a serving engine, with the sum of equal lengths."""
    step = max(1, mean // (8 * count))
    return [mean + step * (2 * index - count + 1) for index in range(count)]


def _features(arguments: dict[str, Any]) -> str:
    said = {"window": f", window of {arguments.get('window', 0) + 1} tokens", "sinks": ", sinks"}
    return "".join(text for name, text in said.items() if name in arguments)


def _check_prefill(arguments: dict[str, Any], starts: list[int], out: Tensor) -> ToleranceCheck:
    """Compare blocks of queries with the reference; a block's last query attends to the keys up to itself."""
    features = {name: value for name, value in arguments.items() if name not in ("q", "k", "v")}
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    results, expected = [], []
    for start in starts:
        end = min(start + _BLOCK, q.shape[1])
        results.append(out[:, start:end])
        expected.append(kernelhub.attention.reference(q[:, start:end], k[:, :end], v[:, :end], **features))
    return compare_out(torch.cat(results, 1), torch.cat(expected, 1), float(v.abs().max()))


def _checked(starts: list[int], tokens: int) -> str:
    """The queries that blocks from `starts` cover, in words."""
    covered = len(set().union(*(range(start, min(start + _BLOCK, tokens)) for start in starts)))
    return "all queries" if covered == tokens else f"{covered} of {tokens} queries: the first, middle and last ones"


def _check_decode(arguments: dict[str, Any], out: Tensor) -> ToleranceCheck:
    expected = kernelhub.paged_attention.reference(**arguments)
    # Pages that no sequence uses hold NaN.
    return compare_out(out, expected, float(arguments["v_cache"].abs().nan_to_num().max()))
