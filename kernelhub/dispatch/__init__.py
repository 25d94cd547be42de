"""HOW a kernel is chosen, and nothing about which kernels there are.

Read in this order: `problem` (what selection may look at), `constraint` and `kernel` (what a kernel
record says), `registry` (where records come from), `policy` (what the user said), `select` (the pure
choice), `op` (the table of plans behind a call), `plan` (a choice bound and ready), `report`.
"""
