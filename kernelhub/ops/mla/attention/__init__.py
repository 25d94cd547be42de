"""`mla_attention`: attention over a paged cache of latents.

Conventions are those of `kernelhub.ops.attention`: masks align bottom right, a sink only adds to the softmax
denominator, the LSE is a natural log, a query with no visible key gives zeros and an LSE of -inf (or its sink).
"""
