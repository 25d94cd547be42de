"""The requirements on xformers, compared with Python files of released wheels, and the libraries of its operators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelhub.backends.xformers import beside
from kernelhub.backends.xformers.requirements import CALLS
from kernelhub.probes.signature import takes
from tests.providers.wheels import _cache, wheel

LARGE = ("0.0.33.post2", "0.0.34")
VERSIONS = (*LARGE, "0.0.35")


def files(version: str) -> Path:
    """The wheel's; of those of 110 MB only where they have been downloaded before."""
    if version in LARGE and not (_cache() / f"xformers-{version}").is_dir():
        pytest.skip(f"the wheel of xformers {version} is large and has not been downloaded before")
    return wheel("xformers", version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.target)
def test_it_takes_our_calls(call, version) -> None:
    finding = takes(call, root=files(version) / "xformers")
    assert finding.ok, finding.reason


@pytest.mark.parametrize("version", VERSIONS)
def test_its_operators_are_kernels_of_others(version) -> None:
    folder = files(version) / "xformers" / "ops" / "fmha"
    assert 'get_operator("aten", "_efficient_attention_forward")' in (folder / "cutlass.py").read_text()
    flash = (folder / "flash.py").read_text()
    assert "torch.ops.aten._flash_attention_forward(" in flash
    assert 'find_spec("flash_attn")' in flash
    assert "torch.ops.flash_attn_3.fwd" in (folder / "flash3.py").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bound_of_packed_queries_may_be_raised(version) -> None:
    """It is an attribute of a dataclass that is not frozen, and passed on as it is."""
    folder = files(version) / "xformers" / "ops" / "fmha"
    text = (folder / "attn_bias.py").read_text()
    assert "@dataclass\nclass _SeqLenInfo:" in text
    assert "    max_seqlen: int\n" in text
    assert "attn_bias.q_seqinfo.max_seqlen" in (folder / "flash.py").read_text()
    assert "attn_bias.q_seqinfo.max_seqlen" in (folder / "cutlass.py").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_it_says_whether_its_library_was_loaded(version) -> None:
    """Where it was not, operators that need nothing of it are refused as well, so the adapter looks there first."""
    folder = files(version) / "xformers"
    text = (folder / "_cpp_lib.py").read_text()
    assert "\n_built_with_cuda = (" in text
    assert "\n_cpp_library_load_exception = None" in text
    assert "and not _built_with_cuda" in (folder / "ops" / "fmha" / "common.py").read_text()
    assert "def is_available(cls)" in (folder / "ops" / "common.py").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_which_flash_attn_it_can_be_imported_beside(version, monkeypatch) -> None:
    folder = files(version) / "xformers"
    monkeypatch.setattr(beside, "folders", lambda name: [folder] if name == "xformers" else [])
    assert re.fullmatch(r">=2\.7\.1,<=2\.8\.[2-9]", beside.versions_of_flash_attn())
    flash = (folder / "ops" / "fmha" / "flash.py").read_text()
    assert "import flash_attn.flash_attn_interface" in flash
    assert f'os.environ.get("{beside.IGNORED}", "0") != "1"' in flash
