"""Stand-in for xformers: its functions' headers, its checks, right numbers in torch."""
