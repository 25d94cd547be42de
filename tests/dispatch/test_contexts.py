"""`use` blocks that end in another order than they began take their own words back, and nobody else's."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from tests.dispatch.backends import qkv


def said() -> list[str]:
    """What contexts say, outermost first."""
    return [layer.disables[0].names[0] for layer in HUB.contexts.get()]


KERNELS = ("torch.sdpa", "torch.blocked", "torch.packed")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_each_block_takes_its_own_words_back(order: tuple[int, ...]) -> None:
    blocks = [kernelhub.use(disable=name) for name in KERNELS]
    for block in blocks:
        block.__enter__()
    left = list(KERNELS)
    for place in order:
        blocks[place].__exit__(None, None, None)
        left.remove(KERNELS[place])
        assert said() == left


def test_equal_words_are_distinguished_by_their_block() -> None:
    outer, middle, inner = (kernelhub.use(disable=name) for name in ("torch.sdpa", "torch.blocked", "torch.sdpa"))
    for block in (outer, middle, inner):
        block.__enter__()
    outer.__exit__(None, None, None)
    assert said() == ["torch.blocked", "torch.sdpa"]
    middle.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert said() == []


def test_one_block_may_be_entered_again_inside_itself() -> None:
    block = kernelhub.use(disable="torch.sdpa")
    with block, kernelhub.use(disable="torch.blocked"), block:
        assert said() == ["torch.sdpa", "torch.blocked", "torch.sdpa"]
    assert said() == []


def test_a_generator_that_ends_later_takes_nobody_elses_words() -> None:
    def rows() -> Iterator[int]:
        with kernelhub.use(disable="torch.sdpa"):
            yield 1

    generator = rows()
    next(generator)
    with kernelhub.use(disable="torch.blocked"):
        generator.close()
        assert said() == ["torch.blocked"]
        assert kernelhub.explain(kernelhub.attention, *qkv()).selected != "torch.blocked"
    assert said() == []


def test_an_async_generator_that_is_closed_elsewhere_takes_nobody_elses_words() -> None:
    async def rows() -> AsyncIterator[int]:
        with kernelhub.use(disable="torch.sdpa"):
            yield 1

    async def main() -> list[str]:
        generator = rows()

        async def first() -> None:
            await anext(generator)

        await asyncio.create_task(first())  # in a context of its own
        with kernelhub.use(disable="torch.blocked"):
            with pytest.warns(RuntimeWarning, match="ends in a task or thread that it was not entered in"):
                await generator.aclose()
            return said()

    assert asyncio.run(main()) == ["torch.blocked"]
    assert said() == []


def test_tasks_share_one_block_without_harm() -> None:
    block = kernelhub.use(disable="torch.sdpa")

    async def task(pause: float) -> list[str]:
        with block:
            await asyncio.sleep(pause)
            return said()

    async def main() -> list[list[str]]:
        return await asyncio.gather(*(task(pause) for pause in (0.003, 0.001, 0.002)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == [["torch.sdpa"]] * 3
    assert said() == []
