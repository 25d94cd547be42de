"""`fused_moe`: tokens through the experts they were routed to; see `kernelhub.ops.moe`."""
