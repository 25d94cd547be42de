"""Multi-head latent attention (DeepSeek-V2, section 2.1): its cache, its decode, its prefill.

Of each token the cache holds one row that all heads share: the latent, from which every head's key and value are
projected, then the rotary part of the keys.

* `write_mla_cache` writes such rows into the pages of a cache (folder `cache`);
* `mla_attention` attends to them with the up-projections absorbed into the queries and the output, so that a row is
  key and, up to its rotary part, value of every head (folder `attention`);
* `concat_mla_k` puts the keys of prefill together, which is `attention` over keys and values that were projected
  (folder `concat`).

The files of each folder: `problem` (facets), `op` (checks, launch, the public function), `adapter` (what a
kernel must be), `reference`, `inputs`, `cases`. Results of `mla_attention` are held to the tolerances of
`kernelhub.ops.attention.tolerance`: its arithmetic is that of `paged_attention` with one KV head.
"""
