"""Matrix products with weights as checkpoints hold them, `[N, K]`: one subfolder per op."""
