"""`fused_moe`: runs each token through its experts; see `kernelhub.ops.moe`."""
