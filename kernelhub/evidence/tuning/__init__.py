"""Measured times of kernels on this machine: measured by `kernelhub.tune`, stored as tables, read by selection.

`decide` computes the ranking from times, `timers` measures, `entry` is the stored form, `tables` stores entries,
`lookup` gives them to selection, and `tune` does all of it for a model.
"""
