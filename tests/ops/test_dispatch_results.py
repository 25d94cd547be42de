"""Results of dispatches with a capacity are fresh in each call, though small ones are allocated for several calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import FIXED, FORMATS, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Header, Headers, handle_of, numbers_of
from kernelhub.ops.comm.experts.results import Fresh, Results, outputs_of

CPU = torch.device("cpu")
MANY = 40  # calls: more than come from one allocation


def header(format: str, tokens: int = 3, most: int = 4, experts: int = 8) -> Header:
    received, local = 2 * most, experts // 2
    rows = {FORMATS[0]: received, FORMATS[1]: received * 2, FORMATS[2]: received * local}
    return Header(FORMATS.index(format), ROWS.index(FIXED), 2, experts, tokens, most, rows[format])


def made(format: str, scales: int = 0, **sizes: int) -> Fresh:
    return Fresh(header(format, **sizes), 32, 2, scales, torch.float8_e4m3fn if scales else torch.bfloat16, CPU)


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scales", [0, 1])
def test_no_two_results_share_memory(format: str, scales: int) -> None:
    fresh = made(format, scales)
    calls = [fresh.take() for _ in range(MANY)]
    spans = sorted(span(tensor) for call in calls for tensor in call)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for call in calls:
        for tensor in call:
            assert tensor.is_contiguous()
            assert not tensor.data_ptr() % 16
            assert not tensor._is_view()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scales", [0, 1])
def test_a_result_has_the_tensors_that_the_contract_names(format: str, scales: int) -> None:
    fresh = made(format, scales)
    outputs, ids = fresh.take(), torch.zeros(3, 2, dtype=torch.int32)
    sent = Results(header(format), fresh).dispatched(outputs, ids)
    assert sent.format == format
    assert all(one is other for one, other in zip(outputs_of(sent), outputs, strict=True))
    assert numbers_of(sent.handle) == header(format)
    assert sent.handle[1] is ids
    assert sent.x.shape == (*header(format).y_shape, 32)
    assert (sent.scales is None) == (not scales)
    assert scales == 0 or (sent.scales is not None and sent.scales.shape == (*header(format).y_shape, 1))
    assert sent.counts.shape == (4,)
    assert (sent.handle[2].dtype, sent.handle[3].dtype) == (torch.int32, torch.float32)
    assert sent.handle[2].shape == sent.handle[3].shape == (8, 2)


def test_handles_of_all_dispatches_share_what_is_empty_in_them() -> None:
    ids, sent = torch.zeros(3, 2, dtype=torch.int32), []
    for format, tokens in ((FORMATS[0], 3), (FORMATS[0], 2), (FORMATS[1], 3)):
        fresh = made(format, tokens=tokens)
        sent.append(Results(header(format, tokens), fresh).dispatched(fresh.take(), ids))
    headers, handle = Headers(), sent[0].handle
    assert not headers.has_rest(handle)
    headers.keep_rest(handle)
    for one in sent:
        assert headers.has_rest(one.handle)
    for at in (4, 5, 6):
        other = list(handle)
        other[at] = other[at].clone()
        assert not headers.has_rest(other)
    full = [*handle[:4], torch.ones(2, dtype=torch.int64), *handle[5:]]
    headers.keep_rest(full)
    assert not headers.has_rest(full), "what a combine may read is compared"
    assert headers.has_rest(handle)


def test_counts_of_tokens_begin_as_zeros_whatever_calls_before_wrote() -> None:
    fresh = made(TOKENS)
    for _ in range(MANY):
        counts = fresh.take()[1]
        assert not counts.any()
        counts.fill_(7)


def test_large_results_have_an_allocation_of_their_own() -> None:
    fresh = made(FORMATS[1], most=1 << 15)
    x, *small = fresh.take()
    assert x.untyped_storage().nbytes() == x.nbytes
    assert small[0].untyped_storage().nbytes() > small[0].nbytes


def test_parts_are_aligned_as_tensors_of_the_allocator_are() -> None:
    fresh = made(TOKENS, experts=6)  # counts of 12 bytes
    parts = [one for _ in range(MANY) for one in fresh.take()]
    assert all(one.untyped_storage().nbytes() > one.nbytes for one in parts)
    assert not any((one.data_ptr() - one.untyped_storage().data_ptr()) % 256 for one in parts)
    assert all(one.is_contiguous() for one in parts)


def test_results_of_another_stream_or_a_capture_have_memory_of_their_own() -> None:
    """The allocator keeps memory for the stream that asked for it, and a graph's for the graph."""
    fresh = made(TOKENS)
    first = fresh.take()[0].untyped_storage().data_ptr()
    assert fresh.take()[0].untyped_storage().data_ptr() == first
    fresh._stream = lambda device: 7
    other = [fresh.take()[0] for _ in range(3)]
    assert {one.untyped_storage().data_ptr() for one in other} == {other[0].untyped_storage().data_ptr()} != {first}
    fresh._stream = lambda device: 0
    assert fresh.take()[0].untyped_storage().data_ptr() == first, "streams in turn keep what is ready for each"
    fresh._stream = lambda device: 7
    fresh._captures = lambda: True
    captured = [fresh.take() for _ in range(3)]
    assert all(one.untyped_storage().nbytes() == one.nbytes for call in captured for one in call)
    assert all(not call[1].any() for call in captured)
    fresh._captures = lambda: False
    assert fresh.take()[0].untyped_storage().data_ptr() == other[0].untyped_storage().data_ptr()


def test_results_that_inference_mode_made_ready_serve_outside_of_it() -> None:
    fresh = made(TOKENS)
    with torch.inference_mode():
        fresh.take()
    x = fresh.take()[0]
    assert not x.is_inference()
    weight = torch.ones(32, requires_grad=True)
    x.zero_().mul_(weight).sum().backward()
    assert weight.grad is not None


def test_headers_are_read_again_after_a_change() -> None:
    none = torch.empty(0, 1, dtype=torch.int32)
    handle, headers = handle_of(header(TOKENS), none, none, none), Headers()
    assert headers.of(handle) == headers.of(handle) == header(TOKENS)
    handle[0][4] = 2
    assert headers.of(handle) == header(TOKENS, tokens=2)
    handle[0].data = torch.tensor(header(TOKENS, tokens=1))
    assert headers.of(handle) == header(TOKENS, tokens=1)
    handle[0].numpy()[4] = 3
    assert headers.of(handle) == header(TOKENS, tokens=3)
    assert headers.of(tuple(handle)) is None
    assert headers.of(handle[:3]) is None
    assert headers.of([handle[0].int(), *handle[1:]]) is None
