"""Where FlashInfer's attention gives wrong numbers without saying so.

What it takes and drops, sinks given to the planned wrappers, is no entry here: their records do not list the feature.
"""

from __future__ import annotations

from kernelhub.dispatch.constraint import Between
from kernelhub.dispatch.kernel import KnownBad

KNOWN_BAD = (
    KnownBad(
        "flashinfer.trtllm_gen",
        "paged_attention",
        (Between("page_size", 129, 1 << 16),),
        "pages of more than 128 tokens are read as smaller ones",
        "https://github.com/flashinfer-ai/flashinfer/issues/4347",
    ),
)
