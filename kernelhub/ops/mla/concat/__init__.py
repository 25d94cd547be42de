"""`concat_mla_k`: with the keys it makes, prefill of latent attention becomes `attention`.

Files: `problem` (facets), `op` (checks, launch, the public function), `adapter` (the interface of kernels),
    `reference`,
`inputs`, `cases`.
"""
