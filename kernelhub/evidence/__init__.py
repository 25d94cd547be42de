"""Evidence from this machine: checks of kernels against their references, measured times, and their storage."""
