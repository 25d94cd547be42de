"""A decode step of a serving engine: select a kernel once, check metadata once per step, launch per layer.

Run it with ``python examples/engine_step.py``; it uses the GPU if there is one.
"""

from __future__ import annotations

import torch

import kernelhub

LAYERS, SEQUENCES, PAGE_SIZE, PAGES = 4, 3, 16, 64
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main() -> None:
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
    caches = [
        (
            torch.randn(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device).to(dtype),
            torch.randn(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device).to(dtype),
        )
        for _ in range(LAYERS)
    ]
    block_table = torch.randperm(PAGES, dtype=torch.int32, device=device)[: SEQUENCES * 20].view(SEQUENCES, 20)
    q = torch.randn(SEQUENCES, HEADS, HEAD_DIM, device=device).to(dtype)
    out = torch.empty_like(q)
    host_lengths = [37, 160, 301]
    seq_lens = torch.tensor(host_lengths, dtype=torch.int32, device=device)

    # Once per layer configuration, when the engine starts: select the kernel. `plan.graph` is its CUDA-graph support.
    plan = kernelhub.paged_attention.prepare(q, *caches[0], block_table, seq_lens)
    print(f"{plan.kernel}: CUDA graphs {plan.graph.name.lower()}, syncs: {plan.syncs}")

    for _ in range(2):
        # Once per engine step, for all layers. With lengths on the host no kernel waits for the device.
        step = plan.begin(block_table, seq_lens, seq_lens_cpu=host_lengths)
        for k_cache, v_cache in caches:
            step.run(q, k_cache, v_cache, out=out)
        host_lengths = [length + 1 for length in host_lengths]
        seq_lens += 1
    print(f"the last layer's output: {list(out.shape)}, all finite: {bool(out.isfinite().all())}")


if __name__ == "__main__":
    main()
