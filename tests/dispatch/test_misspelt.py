"""What is misspelt, or of a wrong type, where kernels are named ends in an error that says what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import ConfigurationError, NoKernel

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


@pytest.mark.parametrize(
    ("say", "flag"),
    [
        *((say, flag) for say in (kernelhub.use, kernelhub.configure) for flag in ("deterministic", "strict")),
        (kernelhub.configure, "batch_invariant"),
        (kernelhub.use, "unsafe"),
    ],
)
@pytest.mark.parametrize("value", ["no", "0", 0, 1, torch.tensor(True)], ids=repr)
def test_a_flag_that_is_no_bool_is_refused(say: Any, flag: str, value: Any) -> None:
    """The word "no" is true in Python."""
    with pytest.raises(ConfigurationError, match=f"{say.__name__}: {flag} is .*give True or False"):
        say(**{flag: value})


@pytest.mark.parametrize("asked", [print, 3, None], ids=repr)
def test_what_is_no_op_is_refused(asked: Any) -> None:
    for function in (kernelhub.explain, *([] if asked is None else [kernelhub.verify])):
        with pytest.raises(ConfigurationError, match=r"is not an op; give one, such as kernelhub\.attention"):
            function(asked)


@pytest.mark.parametrize("asked", [kernelhub.attention, 3], ids=["op", "number"])
def test_what_holds_no_problems_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"tune: .* is not a plan, a selection of explain or a need"):
        kernelhub.tune(asked, device="cpu")
    with pytest.raises(ConfigurationError, match=r"agree: .* is not a plan, a selection of explain or a need"):
        kernelhub.agree(what=asked)


def test_a_number_cannot_be_warmed_up() -> None:
    with pytest.raises(ConfigurationError, match=r"warmup: 3 cannot be prepared"):
        kernelhub.warmup(3, device="cpu")


def test_what_is_no_device_is_refused() -> None:
    for device in (3, b"cuda", ["cpu"]):
        with pytest.raises(ConfigurationError, match=r"device is .*; give a name such as 'H200'"):
            kernelhub.explain("attention", device=device)
    with pytest.raises(ConfigurationError, match=r"warm: device is 'H200'; give one of this machine"):
        kernelhub.warm(
            "attention", q="float32[1, 4, 2, 32]", k="float32[1, 4, 2, 32]", v="float32[1, 4, 2, 32]", device="H200"
        )


@pytest.mark.parametrize("wrong", [0, -1, 16.0, "16"], ids=repr)
def test_a_context_of_no_tokens_is_refused(wrong: Any) -> None:
    for function in (kernelhub.tune, kernelhub.warmup):
        with pytest.raises(ConfigurationError, match=f"context_len is {wrong!r}; give a number of tokens, 1 or more"):
            function("llama-3.1-8b", context_len=wrong, device="cpu")
    with pytest.raises(ConfigurationError, match="max_context_len is"):
        kernelhub.warmup("llama-3.1-8b", max_context_len=wrong, device="cpu")


def test_one_number_where_several_may_be_is_refused() -> None:
    for function in (kernelhub.tune, kernelhub.warmup):
        with pytest.raises(ConfigurationError, match=r"token_counts is 8; give a list of numbers, \[8\]"):
            function("llama-3.1-8b", token_counts=8, device="cpu")


def test_one_word_where_several_may_be_is_taken() -> None:
    assert kernelhub.problems_of("llama-3.1-8b", phases="decode") == kernelhub.problems_of(
        "llama-3.1-8b", phases=["decode"]
    )
    with pytest.raises(ConfigurationError, match=r"'atention' is not an op .did you mean attention"):
        kernelhub.tune("llama-3.1-8b", ops="atention", device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float46"}, r"dtype is 'float46' \(did you mean float16\?\); it takes float32, float16, bfloat16"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"kv_dtype": "fp9"}, "kv_dtype is 'fp9'.*it takes bfloat16, float8_e4m3fn, float8_e5m2"),
        ({"kv_dtype": "float16"}, "kv_dtype is 'float16'"),
        ({"page_size": 0}, "page_size is 0; it is a number of tokens, 1 or more"),
        ({"page_size": -1}, "page_size is -1"),
        ({"page_size": 16.0}, "page_size is 16.0"),
        ({"model": None}, "model is None; give a name"),
    ],
)
def test_how_a_model_is_served_is_checked_before_anything_runs(wrong: dict[str, Any], message: str) -> None:
    asked = {"model": "llama-3.1-8b"} | wrong
    with pytest.raises(ConfigurationError, match=message):
        kernelhub.problems_of(asked.pop("model"), **asked)


def test_a_dtype_of_torch_is_its_name() -> None:
    named = kernelhub.problems_of("llama-3.1-8b", dtype="fp16", kv_dtype="fp8")
    assert kernelhub.problems_of("llama-3.1-8b", dtype=torch.float16, kv_dtype=torch.float8_e4m3fn) == named


@pytest.mark.parametrize("say", [kernelhub.use, kernelhub.configure])
def test_a_misspelt_flag_is_not_taken_for_an_op(say: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'determinstic' is not a parameter or op \(did you mean determin"):
        say(determinstic=True)


@pytest.mark.parametrize("names", [{"torch"}, frozenset({"torch", "cpp"})])
def test_a_set_has_no_order_of_preference(names: Any) -> None:
    q = torch.randn(1, 4, 2, 16)
    for function in (kernelhub.attention, kernelhub.attention.prepare, kernelhub.attention.explain):
        with pytest.raises(ConfigurationError, match="give a list or a tuple, in the order of preference"):
            function(q, q, q, backend=names)
    with kernelhub.use(disable=names):
        assert kernelhub.explain(kernelhub.attention, q, q, q).selected.partition(".")[0] not in names


@pytest.mark.parametrize("name", ["deep_gemm", "torch.experts", "torch.exp*"])
def test_a_backend_without_a_kernel_of_the_op_is_named_as_such(name: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(NoKernel, match=r"requests .*, and no kernel of attention has that name"):
        kernelhub.attention(q, q, q, backend=name)
    with pytest.raises(NoKernel, match="which cannot run this"):
        kernelhub.attention(q, q, q, backend=(name, "flash_attn"))
