"""xformers' operators on a GPU, where xformers is installed: the contract, and queries that see no key."""

from __future__ import annotations

import pytest

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract, split
from tests.gpu.test_flash_attn_on_gpu import OnThisGpu, agrees, need

pytestmark = pytest.mark.gpu

GROUPED = AttentionModel("grouped", 8, 2, 128, 128)


def able(kernel: str) -> None:
    """Skip with the reason where the kernel cannot run, or xformers refuses this machine."""
    need("attention", kernel)
    args, kwargs = split(attention_inputs(GROUPED, q_tokens=4, device="cuda"))
    try:
        kernelhub.attention.prepare(*args, **kwargs, backend=kernel)
    except NoKernel as error:
        own = next(item for item in error.selection.decisions if item.kernel == kernel)
        pytest.skip(f"{kernel}: {own.reason}")


class OfXformers(OnThisGpu, DenseContract):
    __test__ = False

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        able(self.kernel)


class TestFlash(OfXformers):
    __test__ = True
    kernel = "xformers.flash"


class TestCutlass(OfXformers):
    __test__ = True
    kernel = "xformers.cutlass"


@pytest.mark.parametrize("kernel", ["xformers.flash", "xformers.cutlass"])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_no_key(kernel, causal) -> None:
    able(kernel)
    for q_lens, kv_lens in (((170, 5, 0, 3), (90, 5, 4, 300)), ((1, 0, 1), (4, 2, 1)), ((2, 3), (0, 0))):
        arguments = attention_inputs(GROUPED, q_lens=q_lens, kv_lens=kv_lens, device="cuda") | {"causal": causal}
        agrees(kernelhub.attention(**arguments, backend=kernel), arguments)
