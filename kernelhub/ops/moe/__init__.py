"""Mixtures of experts: `route_experts` selects the experts of each token, and `fused_moe` runs them.

Conventions of both:

* ``topk_ids`` are int32 ``[T, top_k]``, ``topk_weights`` float32 ``[T, top_k]``, best first;
* a routing without groups is ``num_groups=None``; 0 and 1 mean the same;
* experts' weights are ``w13 [E, 2I, H]``, the rows of gate, then those of up, and ``w2 [E, H, I]``;
* an id that names no expert, such as -1, is skipped: it adds nothing and reads nothing.

Files: `models` (shapes of published models); `routing/` and `experts/`, in each of which `problem` (facets),
`op` (the public function), `adapter` (the interface of kernels), `reference`, `tolerance`, `inputs`, `cases`; beside
the op of experts `call` (launch), `checks` and `weights` (formats of weights, by their scales).
"""
