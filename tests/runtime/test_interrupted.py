"""Code that interrupts kernelhub's own loading and calls it: an answer or an error of ours, and never a wait."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from tests.dispatch.backends import qkv
from tests.dispatch.test_registry import install, site  # noqa: F401 - a fixture

# A signal handler that calls an op every few milliseconds of the first call.
INTERRUPTED = """
import collections, json, signal, torch, kernelhub

q, met, inside = torch.zeros(1, 4, 4, 16), collections.Counter(), []

def handler(number, frame):
    if inside:
        return
    inside.append(True)
    try:
        kernelhub.attention(q, q, q)
        met["answered"] += 1
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if isinstance(error, ImportError) and "is still being imported" in str(error):
            kinds = ["KernelhubError"]  # but for the module of our errors, which was the one that is half imported
        met[" ".join(kinds)] += 1
    inside.clear()

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
shape = list(kernelhub.attention(q, q, q).shape)
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps({"shape": shape, "met": met}))
"""
LIMIT_S = 60.0  # half of the time limit of an import that waits for its own caller


@pytest.mark.skipif(sys.platform == "win32", reason="there are no timers that send signals: this one case")
def test_a_signal_handler_that_calls_an_op_during_the_first_call() -> None:
    begun = time.monotonic()
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=LIMIT_S)
        # A signal between two lines of Python's own import lock (before 3.12) breaks its books, whoever imports.
        if "<frozen importlib._bootstrap>" not in done.stderr or "\nKeyError: " not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["shape"] == [1, 4, 4, 16]
    refused = {kinds: count for kinds, count in told["met"].items() if kinds != "answered"}
    assert sum(told["met"].values()) > 3
    assert all("KernelhubError" in kinds.split() for kinds in refused), refused
    assert time.monotonic() - begun < LIMIT_S


# The same before Python knows the module of the op, while it looks for it.
BEFORE_IT_IS_KNOWN = """
import sys, torch, kernelhub

class Interrupts:
    met = None
    def find_spec(self, name, path, target=None):
        if name == "kernelhub.ops.attention.attention" and self.met is None:
            try:
                self.met = kernelhub.attention
            except Exception as error:
                self.met = error

sys.meta_path.insert(0, Interrupts())
q = torch.zeros(1, 4, 4, 16)
assert kernelhub.attention(q, q, q).shape == (1, 4, 4, 16)
print(type(sys.meta_path[0].met).__name__, sys.meta_path[0].met)
"""


def test_an_op_used_before_its_module_is_known_runs_the_module_once() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_IT_IS_KNOWN], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "KernelhubError kernelhub.attention is used while kernelhub.ops.attention.attention is"
    )


def test_a_plugin_whose_import_calls_an_op_is_left_out_at_once(site) -> None:  # noqa: F811
    text = "import torch, kernelhub\nq = torch.zeros(1, 4, 4, 16)\nkernelhub.attention(q, q, q)\n"
    install(site, "acme", "acme = acme_calls", {"acme_calls.py": text})
    begun = time.monotonic()
    kernelhub.reload()
    assert time.monotonic() - begun < LIMIT_S
    assert "kernelhub is still loading" in HUB.registry.backends["acme"].error
    assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
