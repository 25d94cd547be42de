"""SGLang's released wheels have the interface that kernelhub's backend is written for, or are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.compat.sglang import plugin
from tests.providers.subclasses import differences
from tests.providers.wheels import wheel

_OURS = Path(plugin.__file__).with_name("attention.py")
_BASE = "srt/layers/attention/base_attn_backend.py"


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_a_release_of_the_interface_fits(release) -> None:
    finding = plugin.interface(wheel("sglang", release) / "sglang")
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


def test_a_release_starts_its_runner_as_the_plugin_follows_it() -> None:
    srt = wheel("sglang", "0.5.23") / "sglang/srt"
    scheduler = (srt / "managers/scheduler.py").read_text()
    order = ("self.init_memory_pools()", "self.init_all_attention_backends()", "self.init_all_cuda_graphs()")
    places = [scheduler.index(call) for call in order]
    assert places == sorted(places)
    runner = (srt / "model_executor/model_runner.py").read_text()
    assert "capture = capture_cuda_graphs(" in runner[runner.index("def init_cuda_graphs(") :]
    assert (
        "get_exec().graph.cuda_graph_config.decode.bs"
        in (srt / "model_executor/runner/base_cuda_graph_runner.py").read_text()
    )


def test_the_backend_has_the_methods_of_a_release_s_base_class() -> None:
    assert differences(_OURS, wheel("sglang", "0.5.23") / "sglang" / _BASE) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "def forward_decode(\n        self,\n        q:",
            "def forward_decode(\n        self,\n        query:",
            "takes",
        ),
        ("def get_cuda_graph_seq_len_fill_value", "def fill_value", "has no get_cuda_graph_seq_len_fill_value"),
        ("def forward_mixed(", "@abstractmethod\n    def forward_mixed(", "has no forward_mixed"),
    ],
)
def test_another_base_class_would_be_noticed(tmp_path, old, new, told) -> None:
    text = (wheel("sglang", "0.5.23") / "sglang" / _BASE).read_text()
    assert old in text
    (tmp_path / "base.py").write_text(text.replace(old, new))
    assert any(told in difference for difference in differences(_OURS, tmp_path / "base.py"))
