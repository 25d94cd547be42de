"""`expert_parallel_moe`: a layer of experts that are spread over ranks.

A kernel of this op is a pair: the format in which tokens are dispatched, with the op that runs experts in that format.
The kernels of the dispatch, of the experts and of the combine are selected by their own ops, for that format.
"""
