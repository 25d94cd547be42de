"""CUTLASS kernels out of the compiled libraries of vLLM and of SGLang's kernel package, without importing either.

Such a library registers operators with torch when it is loaded; that is all that is used of it. Its Python package is
never imported, until one of its kernels is selected, its file is only looked up.

Files: `libraries` (which libraries, and the expected schemas of their operators), `requirements` (constraints),
`kernels` (records), `layouts` (layouts of operands and scales), `fp8`, `fp4` (adapters).
"""
