"""xformers' operators of memory-efficient attention, each requested by its class, never selected by xformers.

Files: `requirements` (what they need on the machine, and the calls), `kernels` (records), `masks` (ragged sequences as
block-diagonal masks), `attention` (adapters).
"""
