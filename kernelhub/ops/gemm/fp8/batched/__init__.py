"""`bmm_fp8`: a product of float8 matrices for each of a batch.

Files: `problem` (facets), `op` (checks, launch, the public function), `adapter` (the interface of kernels),
`reference`, `inputs`. Results must meet the bounds of `kernelhub.ops.gemm.fp8.tolerance`.
"""
