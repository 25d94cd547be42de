"""Ops as data: the same as their functions, without torch."""

from __future__ import annotations

import dataclasses

from kernelhub.dispatch.contract import OpRecord
from kernelhub.ops import functions
from kernelhub.ops.records import OPS


def test_the_records_are_those_of_the_functions() -> None:
    contracts = [function.op.contract for function in functions()]
    assert [contract.name for contract in contracts] == [record.name for record in OPS]
    for contract, record in zip(contracts, OPS, strict=True):
        for item in dataclasses.fields(OpRecord):
            assert getattr(contract, item.name) is getattr(record, item.name)
        assert contract.schema is record.schema
