"""WHERE we run: one fact about this machine per probe, found without importing what it asks about.

A probe never raises, never initialises CUDA, writes no file and opens no socket. It imports nothing
else of kernelhub.
"""
