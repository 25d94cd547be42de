"""Multi-head latent attention: `concat_mla_k`, with which its prefill becomes `attention`.

A key of latent attention (DeepSeek-V2, section 2.1) has a part of each head's own and a rotary part that all heads
share. Prefill wants both side by side, for every head.

Files: `problem` (facets), `concat_mla_k` (the op), `call` (checks and launch), `adapter` (what a kernel must be),
`reference`, `inputs`, `library` (torch.compile).
"""
