"""FlashInfer's adapters against its released wheels."""
