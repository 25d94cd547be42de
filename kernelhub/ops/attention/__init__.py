"""Softmax attention: `attention` over tensors, `paged_attention` over a paged KV cache.

Conventions, the same for both and for every kernel:

* scores are ``scale * q k^T``, then ``softcap * tanh(scores / softcap)`` if there is a softcap;
* masks align bottom right: with `q_len` queries over `kv_len` keys, query i is at key position
  ``p = kv_len - q_len + i``; causal allows keys up to p, a window ``(left, right)`` keys from p - left to
  p + right, -1 meaning no limit;
* a sink is one more score per query head, without a value: it only adds to the softmax denominator;
* LSE is the natural log of the softmax denominator (sinks included), float32, ``[..., heads, tokens]``;
* a query with no visible key gives zeros, and an LSE of -inf (or its sink);
* where the reference's result is infinite or NaN because of operands that a query sees, that of a kernel is so, too. It
  may also be NaN for other queries of the same sequence, which do not see them.

Files: `problem` (facets), `arguments` (checks and normal forms), `attention` and `paged_attention` (the
ops), `adapter` (the interface of kernels), `reference`, `tolerance`, `inputs`, `cases`.
"""
