"""Selection and dispatch of kernels. This room names no backend and no kernel.

Read in this order: `problem` (the inputs of a selection), `constraint` and `kernel` (kernel records), `registry`
(where records come from), `policy` (requests and preferences), `select` (the pure selection), `op` (the table of
bound kernels behind a call), `plan` (a bound selection), `report`.
"""
