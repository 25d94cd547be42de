"""FlashAttention's adapters keep the contracts, given libraries that keep their own word."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band
from tests.contract.attention import Case, DenseContract, PagedContract, paged_cases
from tests.contract.test_liars import failures
from tests.dispatch.backends import register

SITE = Path(__file__).parent / "flash_attn_site"


class PagesOf256(PagedContract):
    """The cases with the pages that FlashAttention-2 takes."""

    __test__ = False
    cases = [dataclasses.replace(case, inputs={"page_size": 256} | case.inputs) for case in paged_cases()]
    plain = dataclasses.replace(PagedContract.plain, inputs=PagedContract.plain.inputs | {"page_size": 256})
    several = dataclasses.replace(PagedContract.several, inputs=PagedContract.several.inputs | {"page_size": 256})
    rich = dataclasses.replace(PagedContract.rich, inputs=PagedContract.rich.inputs | {"page_size": 256})


class RaggedPages(PagedContract):
    """With ragged queries where the contract has decode, which FlashAttention-4 is not asked for."""

    __test__ = False
    plain = several = Case("plain", {"seq_lens": (40, 9, 77), "q_lens": (3, 1, 6)})
    rich = dataclasses.replace(plain, features=("causal", "window_left"))


CONTRACTS = {
    ("fa3", "attention"): (DenseContract, 40),
    ("fa3", "paged_attention"): (PagedContract, 40),
    ("fa2", "attention"): (DenseContract, 40),
    ("fa2", "paged_attention"): (PagesOf256, 40),
    ("fa4", "attention"): (DenseContract, 20),
    ("fa4", "paged_attention"): (RaggedPages, 8),
}
LIBRARIES = {"fa2": "flash_attn", "fa3": "flash_attn_3", "fa4": "flash_attn"}


@pytest.fixture
def stand_ins(monkeypatch):
    """The stand-ins can be imported, and nothing real is."""
    for name in set(LIBRARIES.values()):
        spec = importlib.util.find_spec(name)
        if spec is not None and not any(str(SITE) in str(place) for place in spec.submodule_search_locations or ()):
            pytest.skip(f"the real {name} is installed here; these cases are for machines without it")
    monkeypatch.syspath_prepend(str(SITE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "cutlass", "quack", "tvm_ffi")]:
        del sys.modules[name]


def on_this_cpu(op: str, variant: str) -> str:
    """Register the record as it is, but for a CPU; the name under which it runs."""
    _ = HUB.settings
    kernel = next(k for k in HUB.registry.candidates(op).kernels if k.name == f"flash_attn.{variant}")
    constraints = tuple(OnDevice("cpu") if isinstance(item, OnDevice) else item for item in kernel.constraints)
    copy = dataclasses.replace(kernel, name=f"stand_in.{variant}", constraints=constraints, band=Band.PLUGIN)
    register("stand_in", copy)
    return copy.name


@pytest.mark.parametrize(("variant", "op"), list(CONTRACTS))
def test_the_adapter_keeps_the_contract(stand_ins, variant, op) -> None:
    contract, fewest = CONTRACTS[variant, op]
    name = on_this_cpu(op, variant)
    subject = type("Subject", (contract,), {"kernel": name, "device": "cpu", "fewest_cases": 1})
    assert len(subject.accepted_cases()) >= fewest
    assert failures(contract, name, "cpu") == []
