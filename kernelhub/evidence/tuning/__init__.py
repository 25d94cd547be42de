"""Measured times of kernels on this machine: taken by `kernelhub.tune`, kept as tables, read at the first decision.

`decide` says which kernel a measurement makes the choice, `timers` how one is taken, `entry` what is kept of it,
`tables` where it is kept, `lookup` what selection is told, `tune` does all of it for a model.
"""
