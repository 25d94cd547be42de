"""kernelhub as a plugin of vLLM: its attention becomes the vLLM backend named CUSTOM.

vLLM calls `register`, the entry point ``vllm.general_plugins``, in each of its processes. Registration alone changes
nothing: ``--attention-backend CUSTOM`` selects the backend, and KERNELHUB_VLLM_HOOKS installs the hooks of
`kernelhub.compat.vllm.hooks`. If vLLM's interface, read from its source and signatures, is not the one that kernelhub
was written for, a warning says what differs, and selecting CUSTOM is an error that says the same.
"""

from __future__ import annotations

import importlib
import logging

from kernelhub.compat.vllm.hooks import install
from kernelhub.compat.vllm.interface import REGISTRY, interface, registers
from kernelhub.compat.vllm.refusal import of_release

BACKEND = "kernelhub.compat.vllm.backend.KernelhubBackend"

logger = logging.getLogger("kernelhub.compat")


def register() -> None:
    """Register kernelhub's attention as the backend CUSTOM, unless another plugin has that name; install the hooks.

    If the interface differs, the backend is registered, too, if that much of vLLM fits: it refuses to be selected.
    """
    install()
    fits = interface()
    if not fits.ok:
        logger.warning("%s", of_release(fits))
        if not registers():
            return
    registry = importlib.import_module(REGISTRY)
    custom = registry.AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        if custom.get_path() != BACKEND:
            logger.warning("kernelhub is not registered with vLLM: CUSTOM is already %s", custom.get_path())
        return
    registry.register_backend(custom, BACKEND)
