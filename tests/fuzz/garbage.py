"""Garbage in memory that an op's contract calls unused: entries, pages, slots, rows and experts of nobody."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from kernelhub.evidence.poison import copied
from tests.fuzz.operands import Arguments

_NO_PAGE = (-1, 0x7FFFFFFF, -0x80000000, 1_000_000_007, -7)


def garbage(op: str, arguments: Arguments, random: Random) -> tuple[Arguments, Arguments, str] | None:
    """What results are judged by, what the call is made with, and a note; None where nothing is unused."""
    given = copied(arguments)
    notes: list[str] = []
    if "block_table" in given:
        given["block_table"] = _entries(given, random)
        notes.append("block_table entries past the lengths")
    for change in _BY_OP.get(op, ()):
        note = change(given, random)
        if note:
            notes.append(note)
    if not notes:
        return None
    # The reference sees what was there before, but for rows that are new.
    judged = {name: given[name] if _longer(value, given[name]) else value for name, value in arguments.items()}
    return judged, given, "garbage in " + ", ".join(notes)


def _longer(value: object, now: object) -> bool:
    return isinstance(value, Tensor) and isinstance(now, Tensor) and len(value.shape) > 0 and len(now) > len(value)


def _entries(given: Arguments, random: Random) -> Tensor:
    """The block table with garbage where no page is, in some more columns too."""
    table, lengths = given["block_table"], given["seq_lens"]
    pages = -(-lengths.long() // _page_size(given))
    more = random.choice((0, 1, 5))
    table = torch.nn.functional.pad(table, (0, more), value=-1)
    nobody = torch.arange(table.shape[1], device=table.device) >= pages[:, None]
    fill = torch.tensor([random.choice(_NO_PAGE) for _ in range(table.numel())], dtype=table.dtype)
    return torch.where(nobody, fill.view(table.shape).to(table.device), table)


def _page_size(given: Arguments) -> int:
    cache = given.get("k_cache", given.get("kv_cache"))
    return int(cache.shape[2] if given.get("kv_layout") == "HND" else cache.shape[1])


def _slots(given: Arguments, random: Random) -> str:
    """NaN in the pages and slots of no sequence."""
    size = _page_size(given)
    table, lengths = given["block_table"], given["seq_lens"]
    caches = [name for name in ("k_cache", "v_cache", "kv_cache", "k_scale_cache") if given.get(name) is not None]
    num_pages = given[caches[0]].shape[0]
    nobody = torch.ones(num_pages, size, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        for column in range(-(-length // size)):
            nobody[int(table[row, column]), : min(size, length - column * size)] = False
    nobody = nobody.to(table.device)
    fused = given.get("k_scale_cache", 0) is None and given[caches[0]].dtype is torch.uint8
    for name in caches:
        cache = given[name]
        raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        value = (0x7F if random.random() < 0.5 else 0xFF) if cache.itemsize == 1 else torch.nan
        if fused:  # values and scales of a page lie one after the other: only whole pages are told apart
            raw[nobody.all(1)] = 0xFF
        elif given.get("kv_layout") == "HND":
            raw.transpose(1, 2)[nobody] = value
        else:
            raw[nobody] = value
    return "pages and slots of no sequence"


def _later_tokens(offsets: str, *rows: str):  # type: ignore[no-untyped-def]
    """NaN in tokens past the last offset, of which there are some more."""

    def change(given: Arguments, random: Random) -> str:
        if given.get(offsets) is None:
            return ""
        more = random.choice((1, 3, 16))
        for name in rows:
            if given.get(name) is not None:
                given[name] = _with_rows(given[name], more)
        return f"{', '.join(rows)} past {offsets}"

    return change


def _with_rows(tensor: Tensor, more: int) -> Tensor:
    """The tensor with more rows, of NaN or -1."""
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    fill = 0xFF if tensor.itemsize == 1 else torch.nan if tensor.is_floating_point() else -1
    extra = torch.full((more, *raw.shape[1:]), fill, dtype=raw.dtype, device=raw.device)
    return torch.cat([raw, extra]).view(tensor.dtype)


def _other_experts(given: Arguments, random: Random) -> str:
    """NaN in the weights, scales and biases of experts that no token is sent to."""
    if given.get("expert_map") is not None:
        return ""
    count = given["w13"].shape[0]
    idle = torch.ones(count, dtype=torch.bool, device=given["topk_ids"].device)
    used = given["topk_ids"].flatten().long()
    idle[used[(used >= 0) & (used < count)]] = False
    if not bool(idle.any()):
        return ""
    for name in ("w13", "w2", *(f"{w}_{part}" for w in ("w13", "w2") for part in ("scale", "global_scale", "bias"))):
        tensor = given.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] == count:
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            raw[idle] = 0xFF if raw.dtype is torch.uint8 else torch.nan
    return "experts of no token"


def _idle_groups(given: Arguments, random: Random) -> str:
    """NaN in the weights of groups without rows."""
    sizes = given.get("group_sizes")
    if sizes is None:
        sizes = given["offsets"].diff(prepend=given["offsets"].new_zeros(1))
    idle = sizes == 0
    if not bool(idle.any()):
        return ""
    for name in ("b", "b_scale", "b_global_scale", "bias", "a_global_scale"):
        tensor = given.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] == len(idle):
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            raw[idle] = 0xFF if raw.dtype is torch.uint8 else torch.nan
    return "weights of empty groups"


def _skipped_tokens(given: Arguments, random: Random) -> str:
    """NaN in tokens that go to no slot."""
    skipped = given["slot_mapping"] < 0
    if not bool(skipped.any()):
        return ""
    for name in ("kv_c", "k_rope", "k", "v"):
        if name in given:
            given[name][skipped] = torch.nan
    return "tokens of slot -1"


def _idle_states(given: Arguments, random: Random) -> str:
    """NaN in the states of no sequence."""
    slots = given.get("state_indices")
    if slots is None or given.get("state") is None:
        return ""
    idle = torch.ones(len(given["state"]), dtype=torch.bool, device=slots.device)
    idle[slots[slots >= 0].long()] = False
    given["state"][idle] = torch.nan
    return "states of no sequence"


def _unseen_keys(given: Arguments, random: Random) -> str:
    """NaN in keys that no query sees."""
    keys = torch.arange(given["k"].shape[0], device=given["k"].device)
    starts, ends = given["cu_seqlen_ks"], given["cu_seqlen_ke"]
    unseen = ~((keys >= starts[:, None]) & (keys < ends[:, None])).any(0)
    if not bool(unseen.any()):
        return ""
    k = given["k"]
    raw = k.view(torch.uint8) if k.itemsize == 1 else k
    raw[unseen] = 0xFF if k.itemsize == 1 else torch.nan
    if given.get("k_scale") is not None and given["k_scale"].shape[0] == len(keys):
        given["k_scale"][unseen] = torch.nan
    return "keys that no query sees"


def _unseen_columns(given: Arguments, random: Random) -> str:
    """NaN outside of each row's range."""
    logits, starts, ends = given["logits"], given.get("row_starts"), given.get("row_ends")
    columns = torch.arange(logits.shape[1], device=logits.device)
    outside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    if starts is not None:
        outside |= columns < starts[:, None]
    if ends is not None:
        outside |= columns >= ends[:, None]
    logits[outside] = torch.nan
    return "columns outside of ranges" if bool(outside.any()) else ""


_BY_OP = {
    "attention": (_later_tokens("cu_seqlens_q", "q"), _later_tokens("cu_seqlens_k", "k", "v")),
    "paged_attention": (_slots, _later_tokens("cu_seqlens_q", "q")),
    "mla_attention": (_slots, _later_tokens("cu_seqlens_q", "q", "topk_indices")),
    "paged_mqa_logits": (_slots,),
    "mqa_logits": (_unseen_keys,),
    "topk_indices": (_unseen_columns,),
    "linear_attention": (_idle_states,),
    "write_kv_cache": (_skipped_tokens,),
    "write_mla_cache": (_skipped_tokens,),
    "grouped_gemm": (_idle_groups,),
    "fused_moe": (_other_experts,),
}
