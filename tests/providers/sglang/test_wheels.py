"""SGLang's released wheels have the interface that kernelhub's backend is written for, or are left alone."""

from __future__ import annotations

from kernelhub.compat.sglang import plugin
from tests.providers.wheels import wheel


def test_a_release_of_the_interface_fits() -> None:
    finding = plugin.interface(wheel("sglang", "0.5.23") / "sglang")
    assert finding.ok, finding.reason


def test_an_older_release_is_left_alone_with_what_differs() -> None:
    finding = plugin.interface(wheel("sglang", "0.5.10.post1") / "sglang")
    assert not finding.ok
    assert "AttentionBackend without init_forward_metadata_out_graph" in finding.reason


def test_a_release_runs_plugins_before_it_reads_its_arguments() -> None:
    folder = wheel("sglang", "0.5.23") / "sglang"
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in (folder / "srt/plugins/__init__.py").read_text()
    for entry, arguments in (("cli/serve.py", "backend.run(request)"), ("launch_server.py", "prepare_server_args(sys")):
        text = (folder / entry).read_text()
        assert 0 <= text.index("    load_plugins()\n") < text.index(arguments, text.index("    load_plugins()\n"))
