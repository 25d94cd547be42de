"""The requirements on the releases, compared with their files. FlashAttention-2 is released as source only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernelhub.backends.flash_attn import fa3, fa3_build
from kernelhub.backends.flash_attn.requirements import FA2, FA2_CACHE, FA2_VARLEN, FA3, FA4, FA4_VARLEN
from kernelhub.probes.signature import Call, takes
from tests.providers.wheels import sources, wheel

FA3_WHEEL = ("tokenspeed-fa3", "3.0.0.post20260810")
FA2_VERSIONS = ("2.7.4.post1", "2.8.3")
FA4_VERSIONS = ("4.0.0b27", "4.0.0b36")

# How the library's wrapper calls what the operator's schema names.
_RENAMED = {"qv": "q_v", "out_": "out", "causal": "is_causal", "rotary_interleaved": "is_rotary_interleaved"}


@pytest.fixture(scope="module")
def fa3_files() -> Path:
    return wheel(*FA3_WHEEL)


def test_the_wrapper_of_fa3_takes_what_the_operator_is_given(fa3_files) -> None:
    finding = takes(FA3, root=fa3_files / "flash_attn_interface.py")
    assert finding.ok, finding.reason


def test_the_operator_of_fa3_is_given_its_parameters_in_the_library_s_own_order(fa3_files) -> None:
    tree = ast.parse((fa3_files / "flash_attn_interface.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fwd"
    ]
    (call,) = calls
    names = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
    assert not call.keywords
    assert [_RENAMED.get(name, name) for name in names] == [*fa3.PARAMETERS, "sinks"]


def test_the_parts_of_fa3_are_read_from_its_own_list(fa3_files, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(fa3_files))
    held = {part: fa3_build.compiled_with(part, "").ok for part in ("HDIM128", "HDIM256", "PAGEDKV", "LOCAL", "FP16")}
    assert all(held.values()), held
    for part in ("SOFTCAP", "HDIM96", "HDIMDIFF192"):
        assert fa3_build.compiled_with(part, "").code == "not_compiled"
    assert fa3_build.library("").ok


@pytest.mark.xdist_group("fa2_sources")  # each version is downloaded once for its calls
@pytest.mark.parametrize("version", FA2_VERSIONS)
@pytest.mark.parametrize("call", [FA2, FA2_VARLEN, FA2_CACHE], ids=lambda call: call.target)
def test_fa2_takes_our_calls(call, version) -> None:
    folder = sources("flash-attn", version, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    finding = takes(call, root=folder / "flash_attn")
    assert finding.ok, finding.reason
    wrong = Call(call.target, call.positional, (*call.keywords, "no_such_parameter"))
    assert takes(wrong, root=folder / "flash_attn").code == "signature_changed"


@pytest.mark.parametrize("version", FA4_VERSIONS)
@pytest.mark.parametrize("call", [FA4, FA4_VARLEN], ids=lambda call: call.target)
def test_fa4_takes_our_calls(call, version) -> None:
    finding = takes(call, root=wheel("flash-attn-4", version) / "flash_attn")
    assert finding.ok, finding.reason


@pytest.mark.parametrize("version", FA4_VERSIONS)
def test_fa4_means_none_by_a_window_without_limit_and_splits_nothing_unasked(version) -> None:
    tree = ast.parse((wheel("flash-attn-4", version) / "flash_attn" / "cute" / "interface.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        arguments = functions[name].args
        defaults = dict(
            zip([a.arg for a in arguments.args][-len(arguments.defaults) :], arguments.defaults, strict=True)
        )
        assert ast.literal_eval(defaults["window_size"]) == (None, None)
        assert ast.literal_eval(defaults["num_splits"]) == 1
