"""Two layers of Llama on several ranks: column- and row-parallel products, sums fused with residual and RMSNorm.

    python examples/tensor_parallel_llama.py            # 2 ranks: on as many GPUs, else on the CPU
    python examples/tensor_parallel_llama.py --ranks 4

On GPUs the ranks use NCCL, and run the layers in a CUDA graph, too; on the CPU they use gloo. Each rank has an equal
part of the heads and of the hidden units. The result is compared with that of one process that has all of them.
"""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # kernels of kernelhub use no NVLink multicast, and this NCCL neither

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, silu

import kernelhub
from kernelhub.ops.comm.inputs import alone

LAYERS, TOKENS = 2, 24
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS = 512, 8, 4, 64, 1024, 1e-5


@dataclass
class Layer:
    """One rank's part of a layer: rows of the column-parallel weights, columns of the row-parallel ones."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor


def layer(seed: int, rank: int, ranks: int, like: dict[str, Any]) -> Layer:
    """The weights of a layer, of which each rank keeps its part."""
    random = torch.Generator(device="cpu").manual_seed(seed)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random, device="cpu") * columns**-0.5

    def columns(whole: Tensor) -> Tensor:
        return whole.tensor_split(ranks)[rank]

    q, k, v = (weight(heads * HEAD_DIM, HIDDEN) for heads in (HEADS, KV_HEADS, KV_HEADS))
    o, gate, up = weight(HIDDEN, HEADS * HEAD_DIM), weight(INTERMEDIATE, HIDDEN), weight(INTERMEDIATE, HIDDEN)
    down, norms = weight(HIDDEN, INTERMEDIATE), 1 + weight(2, HIDDEN)
    parts = (
        torch.cat([columns(q), columns(k), columns(v)]),
        o.tensor_split(ranks, dim=1)[rank],
        torch.cat([columns(gate), columns(up)]),
        down.tensor_split(ranks, dim=1)[rank],
        norms[0],
        norms[1],
    )
    return Layer(*(part.to(**like).contiguous() for part in parts))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions, for ``x`` ``[1, tokens, heads, HEAD_DIM]``."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block:
    """The layers of one rank, with a plan for the sum at the end of each row-parallel product."""

    def __init__(self, rank: int, ranks: int, group: Any, like: dict[str, Any]) -> None:
        self.layers = [layer(seed, rank, ranks, like) for seed in range(LAYERS)]
        self.ranks, self.last_norm = ranks, torch.ones(HIDDEN, **like)
        x = torch.zeros(TOKENS, HIDDEN, **like)
        # Every rank prepares the same plans in the same order.
        self.sum_and_norm = kernelhub.all_reduce_rms_norm.prepare(x, x, self.last_norm, EPS, group)
        places = torch.arange(TOKENS, device=x.device).unsqueeze(1)
        rates = 10_000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2 + 1, device=x.device)[:-1]
        self.angles = (places * rates).view(1, TOKENS, 1, HEAD_DIM // 2)

    def __call__(self, residual: Tensor) -> Tensor:
        norms = [part for layer in self.layers for part in (layer.attention_norm, layer.mlp_norm)]
        following = iter([*norms[1:], self.last_norm])
        x = residual * (residual.float().square().mean(-1, keepdim=True) + EPS).rsqrt().to(residual.dtype) * norms[0]
        for layer in self.layers:
            for partial in (self.attention, self.mlp):
                x, residual = self.sum_and_norm.run(partial(layer, x), residual, next(following), EPS)
        return x

    def attention(self, layer: Layer, x: Tensor) -> Tensor:
        heads, kv_heads = HEADS // self.ranks, KV_HEADS // self.ranks
        made = linear(x, layer.qkv).view(1, TOKENS, heads + 2 * kv_heads, HEAD_DIM)
        q, k, v = made.split([heads, kv_heads, kv_heads], dim=2)
        out = kernelhub.attention(rotated(q, self.angles), rotated(k, self.angles), v, causal=True)
        return linear(out.reshape(TOKENS, heads * HEAD_DIM), layer.o)

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down)


def run(rank: int, ranks: int, port: int, on_gpus: bool) -> None:
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    like = {"dtype": torch.bfloat16 if on_gpus else torch.float32, "device": device}
    if on_gpus:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    block = Block(rank, ranks, dist.group.WORLD, like)
    random = torch.Generator(device="cpu").manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=random, device="cpu").to(**like)
    with torch.no_grad():
        found = block(x)
        want = Block(0, 1, alone(device), like)(x)
        # Each product is rounded to the dtype once more in two parts than in one: some units of the last place.
        bound = 0.1 if on_gpus else 1e-4
        off = float((found.float() - want.float()).abs().max())
        assert off <= bound, f"off by {off}"
        lines = [
            f"{block.sum_and_norm.kernel}, {ranks} ranks over {block.sum_and_norm.connection.link}: off by {off:.1g}"
        ]
        if on_gpus:
            lines.append(replayed(block, x, found))
    if rank == 0:
        print(*lines, sep="\n")
    dist.barrier()
    dist.destroy_process_group()


def replayed(block: Block, x: Tensor, want: Tensor) -> str:
    """The layers in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = block(x)
    graph.replay()
    assert torch.equal(found, want), "a replay gives other bits"
    return "a CUDA graph gives the same bits"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))  # each has one key-value head at least
    ranks = parser.parse_args().ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    torch.multiprocessing.spawn(run, (ranks, port, enough), nprocs=ranks)
