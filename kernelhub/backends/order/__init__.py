"""Which kernel is expected fastest: one file per op, device family x regime -> kernels in order.

These are the only files that name kernels of several backends. Each line says on what evidence it stands.
"""
