"""Caches on disk for compiled, measured and verified results, validated and non-blocking.

`root` gives the folder, `fingerprint` identifies source, compiler, libraries and machine, `manifest` validates entries,
`lock` gives one process the right to make an entry, and `store` combines these. `known` and `inventory` list the caches
of other projects; `variables` moves them below our root.
"""
