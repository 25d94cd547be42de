"""`concat_mla_k`: builds the keys with which prefill of latent attention is a call of `attention`.

Files: `problem` (facets), `op` (checks, launch, the public function), `adapter` (the interface of kernels),
    `reference`,
`inputs`, `cases`.
"""
