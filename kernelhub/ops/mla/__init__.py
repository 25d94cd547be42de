"""Multi-head latent attention (DeepSeek-V2, section 2.1): its cache, its decode, its prefill.

The cache has one row per token that all heads share: the latent, from which every head's key and value are
projected, then the rotary part of the keys.

* `write_mla_cache` writes such rows into the pages of a cache (folder `cache`);
* `mla_attention` attends to them with the up-projections absorbed into the queries and the output, so that a row is
  key and, up to its rotary part, value of every head (folder `attention`);
* `concat_mla_k` concatenates the keys of prefill, which is `attention` over keys and values that were projected
  (folder `concat`).

The files of each folder: `problem` (facets), `op` (checks, launch, the public function), `adapter` (the interface of
kernels), `reference`, `inputs`, `cases`. Results of `mla_attention` must meet the tolerances of
`kernelhub.ops.attention.tolerance`: its arithmetic is that of `paged_attention` with one KV head.
"""
