"""xformers' operators of memory-efficient attention, each asked for by its class, never by xformers' own choice.

Files: `requirements` (what is asked of the machine, and the calls), `kernels` (records), `masks` (ragged sequences as
block-diagonal masks), `attention` (adapters).
"""
