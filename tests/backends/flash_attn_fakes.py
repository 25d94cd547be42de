"""Stand-ins for FlashAttention 2, 3 and 4: their headers, their checks, their conventions, and right numbers in torch.

Where the real libraries give wrong numbers in silence, these do so loudly: they raise.
"""

from __future__ import annotations
