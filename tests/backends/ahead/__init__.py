"""What is compiled ahead, one file per family of ops: `CASES`, made into launches by its functions."""
