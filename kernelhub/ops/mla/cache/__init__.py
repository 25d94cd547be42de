"""`write_mla_cache`: new tokens' latents and rotary parts into the pages that `mla_attention` reads.

A value is stored as ``value / kv_scale``, divided in float32 and rounded to nearest even, saturating; without a scale
bit for bit.
"""
