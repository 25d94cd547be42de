"""The backends: one folder each.

In each, `kernels.py` has the records, which are data and light to import. A large backend has a folder for each
family of ops, whose `__init__.py` holds the family's records. Adapters are beside the records and are imported once a
kernel is selected. `order/` ranks kernels by device and phase, `shared/` is what adapters of several backends use.
"""
