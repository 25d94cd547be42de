"""WHAT was measured on this machine: kernels held against their references, and the store of what came out.

Selection reads none of it but the set of kernels that were found wrong, loaded at the first decision (`quarantine`).
"""
