"""The lightning indexer of sparse attention: `mqa_logits`, `paged_mqa_logits`, `topk_indices`.

DeepSeek Sparse Attention (DeepSeek-V3.2, section 2.1) lets each query attend to few keys, those that a small
indexer scores highest:

    logits[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])

* `mqa_logits` scores keys in consecutive rows, as in prefill; every query has its own range of them;
* `paged_mqa_logits` scores the keys of a paged cache, as in decode, causally among the last tokens of a sequence;
* `topk_indices` finds the keys with the highest scores.

A score outside a query's range is -inf, and -inf is never selected, so logits can be passed on as they are. A scale of
q goes into `weights`. Scales are positive, so it does not matter whether they are applied inside the relu.

Files: `problem` (facets), one file per op (checks, launch, public function), `adapter` (the interface of kernels),
`reference`, `tolerance`, `inputs`, `cases`.
"""
