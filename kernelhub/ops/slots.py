"""Slots of new tokens in a paged cache, for the ops that write one."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.arguments import dtype_name, refuse
from kernelhub.ops.values import values_to_check

_FEW = 64  # that are compared faster as ints than by torch
# Slots are counted instead of sorted where they are at most so far apart on average: 512 slots as far apart take 68 us
# instead of 145 with nothing in the caches of a Zen 4 core.
_COUNTED = 16


def check_slot_form(op: str, slot_mapping: Tensor, tokens: int) -> None:
    """An int64 for each token."""
    if slot_mapping.dtype is not torch.int64:
        refuse(op, "slot_mapping", f"has dtype {dtype_name(slot_mapping.dtype)}", "give int64: .to(torch.int64)")
    if slot_mapping.shape != (tokens,):
        refuse(op, "slot_mapping", f"has shape {list(slot_mapping.shape)}", f"give [{tokens}], a slot for each token")


def check_slots(op: str, cache: str, slot_mapping: Tensor, slots: int) -> None:
    """Each is in the cache, and all are distinct; on a GPU only KERNELHUB_CHECK=1 checks that.

    Args:
        op, cache: names of the op and of the parameter that holds the slots.
        slot_mapping: int64 ``[T]``; negative ones name no slot.
        slots: how many the cache has.
    """
    given = values_to_check(slot_mapping)
    if given is None or not given.numel():
        return
    if given.numel() <= _FEW:
        few = given.tolist()
        named = [slot for slot in few if slot >= 0]
        if max(few) < slots and len(set(named)) == len(named):
            return
    least, most = (int(bound) for bound in given.aminmax())
    if most >= slots:
        token = int(given.argmax())
        refuse(op, "slot_mapping", f"is {int(given[token])} for token {token}", f"{cache} has {slots} slots")
    written = given if least >= 0 else given[given >= 0]
    if most >= 0 and not _are_distinct(written, max(least, 0), most):
        values, counts = written.unique(return_counts=True)
        slot = int(values[counts > 1][0])
        first, second, *_ = (given == slot).nonzero().flatten().tolist()
        refuse(op, "slot_mapping", f"is {slot} for tokens {first} and {second}", "give each token a slot of its own")


def _are_distinct(written: Tensor, least: int, most: int) -> bool:
    if most - least < _COUNTED * len(written):
        return int((written - least).bincount().max()) == 1
    ordered = written.sort().values
    return not bool((ordered[1:] == ordered[:-1]).any())
