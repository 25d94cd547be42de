"""`concat_mla_k`: with the keys it makes, prefill of latent attention becomes `attention`.

Files: `problem` (facets), `concat_mla_k` (the op), `call` (checks and launch), `adapter` (what a kernel must be),
`reference`, `inputs`, `library` (torch.compile).
"""
