"""Merging attention over parts of the keys: `merge_attention_states`.

Attention over a set of keys is a state: its result and the log of its softmax denominator (LSE). The states of
disjoint sets merge into that of their union, exactly:

* ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) out_i``;
* an LSE of -inf, or of +inf, which FlashAttention writes for it, means that there were no keys: that part's
  result is not read;
* where no part has a key the result is zero and the LSE -inf.

LSE is the natural log. Files: `problem` (facets), `op` (checks, launch, the public function), `adapter`
(what a kernel must be), `reference`, `tolerance`, `inputs`, `cases`.
"""
