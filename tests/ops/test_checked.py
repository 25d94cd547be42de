"""A call that binds a kernel checks its operands once, and later calls with others again."""

from __future__ import annotations

import threading

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.checked import Checked
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs


def test_operands_are_checked_ones_within_their_own_call_only() -> None:
    checked, one, other, seen = Checked(), object(), object(), []

    def run(*arguments: object) -> str:
        seen.extend(checked.holds(given) for given in ((one, other), (other, one), (one,), ()))
        thread = threading.Thread(target=lambda: seen.append(checked.holds((one, other))))
        thread.start()
        thread.join()
        return f"{len(arguments)} arguments"

    assert checked.run((one, other), run, 1, 2) == "2 arguments"
    assert seen == [True, False, False, False, False]
    assert not checked.holds((one, other))
    with pytest.raises(ZeroDivisionError):
        checked.run((one, other), lambda: 1 / 0)
    assert not checked.holds((one, other)), "an error leaves nothing behind"


def test_the_first_call_and_later_ones_name_what_is_wrong() -> None:
    for forget in (True, False):
        for function, given, wrong in (
            (kernelhub.write_kv_cache, write_kv_cache_inputs(tokens=4), "v"),
            (kernelhub.linear_attention, linear_inputs(), "decay"),
        ):
            if forget:
                function.op._forget()
            else:
                function(**given)
            with pytest.raises(InvalidArgument, match=wrong):
                function(**{**given, wrong: torch.zeros(3, 5, 7, 2)})
            function(**given)
