"""`bmm_fp8`: a product of float8 matrices for each of a batch.

Files: `problem` (facets), `bmm_fp8` (the op), `call` (checks and launch), `adapter` (what a kernel must be),
`reference`, `inputs`, `library` (torch.compile). Results are held to the bounds of `kernelhub.ops.gemm.fp8.tolerance`.
"""
