"""What is compiled, measured and verified, kept on disk so that it can neither lie nor block.

`root` says where, `fingerprint` for which source, compiler, libraries and machine, `manifest` whether what lies there
is what was put there, `lock` who makes it, `store` puts these together. `known` and `inventory` tell of other
projects' caches, `variables` moves them below our root.
"""
