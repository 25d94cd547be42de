"""Threads that call one kernel with metadata of their own, in turns: each has its step kept, and none outlives it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.attention import arguments as attention_arguments
from kernelhub.ops.attention import dense_call, paged_call
from kernelhub.ops.attention.adapter import AttentionAdapter
from kernelhub.ops.mla.attention import call as mla_call
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues

i32 = torch.int32
THREADS, TURNS = 3, 4


def elsewhere(device: int) -> Any:
    raise AssertionError("the call went to another device")


def bound(call: Any, name: str, adapter: type, seen: list[Any], **facets: Any) -> Callable[..., Any]:
    """The function of a kernel that notes its steps, made for a GPU's facts: there a step serves more than one call."""
    problem = kernelhub.explain(name, device="H200", **facets).problem

    class Noting(adapter):  # type: ignore[misc]
        def launch(self, *arguments: Any) -> None:
            seen.append(next(one for one in arguments if hasattr(one, "outlives")))

    return call.bind(Noting(problem), problem, -1, lambda: 0, elsewhere)


def paged(seen: list[Any]) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    run = bound(paged_call, "paged_attention", AttentionAdapter, seen, q_dtype="float32", kv_dtype="float32")
    p = kernelhub.explain("paged_attention", device="H200", q_dtype="float32", kv_dtype="float32").problem
    q, cache = torch.zeros(2, p.num_q_heads, p.head_dim_qk), torch.zeros(5, *p.kv_dims, p.head_dim_qk)

    def call(table: torch.Tensor, lengths: torch.Tensor) -> None:
        run(q, cache, cache, table, lengths, q.shape, None, None)

    return call, lambda: (torch.zeros(2, 2, dtype=i32), torch.ones(2, dtype=i32))


def ragged(seen: list[Any]) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    facets = {"q_dtype": "float32", "kv_dtype": "float32", "ragged": True, "q_len": "any"}
    run = bound(dense_call, "attention", AttentionAdapter, seen, **facets)
    p = kernelhub.explain("attention", device="H200", **facets).problem
    q, k = torch.zeros(6, p.num_q_heads, p.head_dim_qk), torch.zeros(6, p.num_kv_heads, p.head_dim_qk)

    def call(q_offsets: torch.Tensor, k_offsets: torch.Tensor) -> None:
        run(q, k, k, q.shape, k.shape, k.shape, None, None, q_offsets, k_offsets)

    return call, lambda: (torch.tensor([0, 2, 6], dtype=i32), torch.tensor([0, 2, 6], dtype=i32))


def latent(seen: list[Any]) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    facets = {"q_dtype": "float32", "kv_dtype": "float32"}
    run = bound(mla_call, "mla_attention", MlaAdapter, seen, **facets)
    p = kernelhub.explain("mla_attention", device="H200", **facets).problem
    q, cache = torch.zeros(2, p.num_heads, p.head_dim), torch.zeros(5, p.page_size, p.head_dim)

    def call(table: torch.Tensor, lengths: torch.Tensor) -> None:
        run(q, cache, table, lengths, None, None, None, MlaValues(1.0, None, None), None)

    return call, lambda: (torch.zeros(2, 2, dtype=i32), torch.ones(2, dtype=i32))


@pytest.fixture(params=[paged, ragged, latent], ids=["paged", "ragged", "latent"])
def kernel(request, monkeypatch) -> Any:
    """A kernel's function, what makes metadata for it, and the steps that its launches were given."""
    for module in (paged_call, attention_arguments):  # the values lie on a GPU, as far as the kernel knows
        monkeypatch.setattr(module, "values_to_check", lambda tensor: None)
    seen: list[Any] = []
    return *request.param(seen), seen


def in_turns(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, one call after another."""
    places = [threading.Semaphore(0) for _ in works]
    failures: list[BaseException] = []

    def go(place: int) -> None:
        for _ in range(TURNS):
            places[place].acquire()
            try:
                works[place]()
            except BaseException as error:
                failures.append(error)
            places[(place + 1) % len(works)].release()

    crew = [threading.Thread(target=go, args=(place,)) for place in range(len(works))]
    for thread in crew:
        thread.start()
    places[0].release()
    for thread in crew:
        thread.join()
    assert not failures, failures


def test_each_of_several_threads_has_its_step_kept(kernel) -> None:
    call, metadata, seen = kernel
    own = [metadata() for _ in range(THREADS)]
    in_turns(*[lambda given=given: call(*given) for given in own])
    assert len(seen) == THREADS * TURNS
    assert len({id(step) for step in seen}) == THREADS
    for place, (first, second) in enumerate(own):
        for step in seen[place::THREADS]:
            tensors = (step.cu_seqlens_q, step.cu_seqlens_k) if hasattr(step, "cu_seqlens_k") else ()
            held = tensors or (step.block_table, step.seq_lens)
            assert held[0] is first
            assert held[1] is second


def test_a_thread_that_ended_keeps_no_tensors(kernel) -> None:
    call, metadata, seen = kernel
    alive: list[Any] = []

    def work() -> None:
        given = metadata()
        alive.extend(weakref.ref(tensor) for tensor in given)
        call(*given)

    in_turns(work, work)
    seen.clear()
    gc.collect()
    assert len(alive) == 2 * TURNS * 2
    assert [ref() for ref in alive] == [None] * len(alive)


def test_one_thread_keeps_one_step(kernel) -> None:
    call, metadata, seen = kernel
    alive = []
    for _ in range(5):
        given = metadata()
        call(*given)
        call(*given)
        alive.append(weakref.ref(given[0]))
    assert len({id(step) for step in seen}) == 5
    seen.clear()
    del given
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 4 + [True]


def test_a_step_of_other_tensors_is_never_taken(kernel) -> None:
    call, metadata, seen = kernel
    one, other = metadata(), metadata()
    for given in (one, other, (one[0], other[1]), (other[0], one[1])):
        call(*given)
    assert len({id(step) for step in seen}) == 4
