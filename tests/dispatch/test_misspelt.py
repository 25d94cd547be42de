"""What is misspelt, or of a wrong type, where kernels are named ends in an error that says what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import ConfigurationError

NO_NAMES: tuple[Any, ...] = (3, b"torch", ["torch.sdpa", 3], ["torch.sdpa", ["torch"]], {"attention": 1}, object())


@pytest.mark.parametrize("names", NO_NAMES, ids=lambda names: type(names).__name__)
class TestWhatIsNoName:
    def test_of_a_call_is_refused_by_its_parameter(self, names: Any) -> None:
        q = torch.randn(1, 4, 2, 16)
        for function in (kernelhub.attention, kernelhub.attention.prepare):
            with pytest.raises(ConfigurationError, match=r"backend is .*give the name of a backend or a kernel"):
                function(q, q, q, backend=names)
        with pytest.raises(ConfigurationError, match=r"backend is .*give the name"):
            kernelhub.merge_attention_states([q[0]] * 2, [torch.zeros(2, 4)] * 2, backend=names)
        with pytest.raises(ConfigurationError, match=r"backend is .*give the name"):
            kernelhub.explain("attention", backend=names)

    def test_of_a_context_or_of_the_process_is_refused_by_its_parameter(self, names: Any) -> None:
        for say in (kernelhub.use, kernelhub.configure):
            with pytest.raises(ConfigurationError, match=r"disable=.* is .*give the name"):
                say(disable=names)
            with pytest.raises(ConfigurationError, match=r"attention=.* is .*give the name"):
                say(attention=names if not isinstance(names, dict) else 1)


def test_a_call_that_requires_no_kernel_at_all_is_refused() -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ConfigurationError, match=r"name a backend or a kernel, or leave it out"):
        kernelhub.attention(q, q, q, backend=[])


@pytest.mark.parametrize("say", [kernelhub.use, kernelhub.configure])
def test_a_misspelt_parameter_is_distinguished_from_a_misspelt_op(say: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'disabel' is not a parameter or op .did you mean disable"):
        say(disabel="torch")
    with pytest.raises(ConfigurationError, match=r"'atention' is not an op .did you mean attention"):
        say(atention="torch")


def test_a_misspelt_function_of_the_module_is_reported_with_what_was_meant() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atention' .did you mean attention"):
        _ = kernelhub.atention
    assert not hasattr(kernelhub, "nothing_of_the_kind")
