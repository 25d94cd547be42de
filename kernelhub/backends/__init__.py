"""WHO can answer: one folder per backend.

In each, `kernels.py` holds the records, which are data and light to import; the adapters beside it are
imported only once one of them is chosen. `order/` ranks kernels by device and phase.
"""
