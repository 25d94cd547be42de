"""Products of groups of rows, each with the weights of its group: `grouped_gemm`.

Rows come in one of two forms:

* contiguous: a ``[M, K]``, rows sorted by group, and `offsets`, where each group ends, as of torch's grouped_mm;
* masked: a ``[G, M_max, K]`` and `group_sizes`, how many rows each group has, as in expert-parallel decode.

Lengths are on the device. Rows that belong to no group are not read and not written. Weights are ``[G, N, K]``, in a
float dtype, float8_e4m3fn or fp4, and rows too; scales multiply.

Files: `problem` (facets), `scales` (which geometry a scale has), `op` (launch, plan, the public function), `checks`,
`adapter` (the interface of kernels, the positions of groups), `reference`, `tolerance`, `inputs`, `cases`.
"""
