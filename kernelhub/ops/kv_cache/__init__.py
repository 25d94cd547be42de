"""`write_kv_cache`: keys and values of new tokens into the pages that `paged_attention` reads.

A value of a float8 cache is ``value / scale``, divided in float32, rounded to nearest even and saturated at the
format's largest number; NaN stays NaN. Without a scale bits are copied.
"""
