"""Registration: the schema is closed, names are unique, and a broken plugin harms nothing."""

from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.constraint import AnyOf, Between, Constraint, MultipleOf, OnDevice, OneOf
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band
from kernelhub.errors import ConfigurationError, NoKernel, RegistrationError
from tests.dispatch.backends import qkv, record, register


class TestRecords:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"features": {"softcapp"}}, "unknown feature 'softcapp'.*did you mean softcap"),
            ({"features": {"kv_layout=NDH"}}, "unknown feature 'kv_layout=NDH'"),
            ({"target": "no_colon"}, "is not 'module:attribute'"),
            ({"op": "atention"}, "unknown op 'atention'.*did you mean attention"),
            ({"band": Band.TUNED}, "a third-party kernel has band PLUGIN"),
        ],
    )
    @pytest.mark.fault("wrong_record")
    def test_what_the_schema_does_not_know_is_refused(self, arguments: dict, message: str) -> None:
        base = record("ours.k", op="attention")
        fields = {name: getattr(base, name) for name in base.__dataclass_fields__} | arguments
        fields["features"] = frozenset(fields["features"])
        with pytest.raises(RegistrationError, match=message):
            register("ours", type(base)(**fields))

    @pytest.mark.fault("wrong_record")
    def test_a_constraint_on_an_unknown_facet_is_refused(self) -> None:
        with pytest.raises(RegistrationError, match=r"unknown facet 'head_dim'.*did you mean head_dim_"):
            register("ours", record("ours.k", "Ones", Between("head_dim", 1, 2)))

    @pytest.mark.fault("wrong_record")
    @pytest.mark.parametrize(
        ("constraint", "message"),
        [
            (Between("q_dtype", 1, 2), "Between is for numbers, but q_dtype is of type str"),
            (MultipleOf("q_len", 8), "MultipleOf is for numbers, but q_len is of type str"),
            (MultipleOf("causal", 2), "MultipleOf is for numbers, but causal is of type bool"),
            (AnyOf((OnDevice("cpu"), Between("kv_dtype", 1, 2))), "Between is for numbers, but kv_dtype"),
            (MultipleOf("head_dim_qk", 0), "divisor 0 is below 1"),
        ],
    )
    def test_a_bound_on_a_facet_without_numbers_is_refused(self, constraint: Constraint, message: str) -> None:
        with pytest.raises(RegistrationError, match=message):
            register("ours", record("ours.k", "Ones", constraint))

    @pytest.mark.fault("wrong_record")
    def test_silence_about_a_structural_facet_is_refused(self) -> None:
        base = record("ours.k")
        fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
        fields["constraints"] = (OnDevice("cpu"), OneOf("q_dtype", ("float32",)))
        with pytest.raises(
            RegistrationError, match=r"does not mention head_dim_qk, .*kv_dtype.*; constrain them, or write anything"
        ):
            register("ours", type(base)(**fields))

    def test_a_kernel_bears_its_backend_s_name(self) -> None:
        with pytest.raises(RegistrationError, match=r"the name must be 'ours\.<variant>'"):
            register("ours", record("theirs.k"))

    def test_two_records_of_one_name_are_refused(self) -> None:
        with pytest.raises(RegistrationError, match=r"two records are named ours\.k"):
            register("ours", record("ours.k"), record("ours.k"))

    def test_two_backends_of_one_name_are_refused(self) -> None:
        register("ours", record("ours.k"))
        with pytest.raises(RegistrationError, match="already registered"):
            register("ours", record("ours.j"))
        with pytest.raises(RegistrationError, match="already registered"):
            register("torch", record("torch.k"))

    def test_a_module_that_is_no_backend_is_refused(self) -> None:
        with pytest.raises(RegistrationError, match="needs BACKEND and KERNELS"):
            kernelhub.register_backend(sys)

    def test_a_handle_takes_its_backend_out_again(self) -> None:
        handle = register("ours", record("ours.k"))
        assert "ours.k" in kernelhub.attention.kernels()
        handle.remove()
        assert "ours.k" not in kernelhub.attention.kernels()

    def test_a_backend_registered_by_hand_outlives_a_reload(self) -> None:
        register("ours", record("ours.k"))
        kernelhub.reload()
        assert "ours.k" in kernelhub.attention.kernels()


GOOD = """
    from kernelhub.dispatch.constraint import anything
    from kernelhub.dispatch.kernel import Backend, Band, Kernel
    from kernelhub.dispatch.standing import verified
    from kernelhub.ops.attention.problem import AttentionProblem

    BACKEND = Backend("acme", "a third party's kernels")
    KERNELS = (
        Kernel(
            op="attention", name="acme.fast", target="acme_kernels.adapter:Fast", summary="fast", band=Band.PLUGIN,
            constraints=(anything(*AttentionProblem.__dataclass_fields__),),
            standings=(verified("*", evidence="the third party's own tests"),),
        ),
    )
"""
ADAPTER = """
    from kernelhub.ops.attention.adapter import AttentionAdapter

    class Fast(AttentionAdapter):
        def launch(self, q, k, v, step, values, out, lse):
            out.fill_(7.0)
"""


def install(site: Path, distribution: str, entry: str, files: dict[str, str]) -> None:
    """What pip would leave: modules, and metadata that declares the entry point."""
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kernelhub.backends]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch):
    """A site-packages folder of its own; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


class TestPlugins:
    def test_a_third_party_s_kernel_is_found_by_its_entry_point_and_runs(self, site: Path) -> None:
        files = {"acme_kernels/__init__.py": "", "acme_kernels/kernels.py": GOOD, "acme_kernels/adapter.py": ADAPTER}
        install(site, "acme", "acme = acme_kernels.kernels", files)
        kernelhub.reload()
        assert "acme_kernels.adapter" not in sys.modules
        assert float(kernelhub.attention(*qkv()).mean()) == 7.0
        assert HUB.registry.backends["acme"].origin == "acme_kernels.kernels"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12"),
            ("raise SystemExit(3)", "SystemExit"),
            ("this is no python", "SyntaxError"),
            ("KERNELS = ()", "needs BACKEND and KERNELS"),
            (GOOD.replace("acme.fast", "acme_fast"), "the name must be"),
            (GOOD.replace("),\n    )\n", ")\n    )\n"), "a tuple of one needs a comma"),
            (GOOD.replace("KERNELS = (", "KERNELS = (None,"), r"KERNELS[0] is of type NoneType, not Kernel"),
            (GOOD.replace("KERNELS = (", "KERNELS = ({},"), r"KERNELS[0] is of type dict, not Kernel"),
            (GOOD.replace('summary="fast"', "summary=3"), "summary is 3, not a str"),
            (GOOD.replace('summary="fast"', 'summary="fast", features="softcap"'), "not a frozenset"),
            (GOOD.replace("acme_kernels.adapter:Fast", "../x"), "is not 'module:attribute'"),
            (GOOD.replace("constraints=(anything", "constraints=(None, anything"), "None is not a constraint"),
            (GOOD + "    KNOWN_BAD = (3,)\n", "KNOWN_BAD[0] is of type int, not KnownBad"),
        ],
    )
    def test_a_broken_plugin_is_reported_and_harms_nothing(self, site: Path, text: str, reason: str, caplog) -> None:
        install(site, "acme", "acme = acme_kernels", {"acme_kernels.py": text})
        kernelhub.reload()
        broken = HUB.registry.backends["acme"]
        assert reason in broken.error
        assert broken.code in ("load_failed", "load_library", "plugin_invalid")
        assert broken.distribution == "acme 1.0"
        assert "acme 1.0" in caplog.text
        assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)

    def test_a_plugin_whose_import_hangs_is_left_behind(self, site: Path, monkeypatch) -> None:
        install(site, "acme", "acme = acme_sleeps", {"acme_sleeps.py": "import time; time.sleep(60)"})
        monkeypatch.setenv("KERNELHUB_LOAD_TIMEOUT_S", "0.2")
        kernelhub.reload()
        assert "did not return within 0.2 s" in HUB.registry.backends["acme"].error

    def test_plugins_can_be_chosen_by_name_or_switched_off(self, site: Path, monkeypatch) -> None:
        files = {"acme_kernels/__init__.py": "", "acme_kernels/kernels.py": GOOD, "acme_kernels/adapter.py": ADAPTER}
        install(site, "acme", "acme = acme_kernels.kernels", files)
        monkeypatch.setenv("KERNELHUB_PLUGINS", "none")
        kernelhub.reload()
        assert "acme" not in HUB.registry.backends
        monkeypatch.setenv("KERNELHUB_PLUGINS", "acme")
        kernelhub.reload()
        assert "acme" in HUB.registry.backends
        monkeypatch.setenv("KERNELHUB_PLUGINS", "acne")
        with pytest.raises(ConfigurationError, match=r"no installed plugin is named 'acne'.*did you mean acme"):
            kernelhub.reload()

    def test_a_plugin_may_not_take_a_name_that_is_taken(self, site: Path) -> None:
        install(
            site,
            "acme",
            "torch = acme_kernels",
            {"acme_kernels.py": GOOD.replace("acme.", "torch.").replace('"acme"', '"torch"')},
        )
        kernelhub.reload()
        assert HUB.registry.backends["torch"].error == ""
        assert "torch.fast" not in kernelhub.attention.kernels()
        assert "already registered" in HUB.registry.backends["torch (acme_kernels)"].error

    @pytest.mark.parametrize(
        "constraint",
        ["Rule((), lambda problem: 1 / 0)", "Rule((), lambda problem: 7)", "Rule((), lambda problem: exit(3))"],
    )
    def test_a_constraint_that_raises_rejects_its_kernel_and_nothing_else(self, site: Path, constraint: str) -> None:
        text = GOOD.replace("import anything", "import Rule, anything")
        text = text.replace("constraints=(anything", f"constraints=({constraint}, anything")
        files = {"acme_kernels/__init__.py": "", "acme_kernels/kernels.py": text, "acme_kernels/adapter.py": ADAPTER}
        install(site, "acme", "acme = acme_kernels.kernels", files)
        kernelhub.reload()
        assert float(kernelhub.attention(*qkv()).mean()) != 7.0
        decision = next(d for d in kernelhub.explain(kernelhub.attention, *qkv()).decisions if d.kernel == "acme.fast")
        assert decision.code == "constraint_error"
        with pytest.raises(NoKernel, match=r"raised|neither"):
            kernelhub.attention(*qkv(), backend="acme")

    def test_a_plugin_speaks_of_defects_of_its_own_kernels_only(self, site: Path) -> None:
        text = GOOD.replace("Band, Kernel", "Band, Kernel, KnownBad")
        text += "    KNOWN_BAD = (KnownBad('*', '*', (), 'everything is wrong', 'https://example.org'),)\n"
        install(site, "acme", "acme = acme_kernels", {"acme_kernels.py": text})
        kernelhub.reload()
        assert "is of another backend than acme" in HUB.registry.backends["acme"].error
        assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)

    def test_a_log_handler_may_call_kernelhub_while_a_broken_plugin_is_logged(self, site: Path) -> None:
        install(site, "acme", "acme = acme_kernels", {"acme_kernels.py": "raise ImportError('broken')"})
        shapes = []

        class Calls(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                shapes.append(kernelhub.attention(*qkv()).shape)

        handler = Calls()
        logging.getLogger("kernelhub").addHandler(handler)
        try:
            kernelhub.reload()
        finally:
            logging.getLogger("kernelhub").removeHandler(handler)
        assert shapes == [(1, 4, 4, 16)]

    def test_entry_points_of_an_unrelated_package_that_cannot_be_read_end_nothing(self, site: Path) -> None:
        contents = (b"[console_scripts]\nno equals sign\n", b"\xff\xfe", b"[kernelhub.backends]\nno equals sign\n")
        for number, content in enumerate(contents):
            info = site / f"other{number}-1.0.dist-info"
            info.mkdir()
            (info / "entry_points.txt").write_bytes(content)
        kernelhub.reload()
        assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
        assert HUB.registry.backends["other2"].code == "metadata_broken"


class TestLoading:
    """Imports of adapters that raise, exit or hang: the next kernel runs, and the reason is kept."""

    @pytest.mark.parametrize(
        ("text", "reason", "code"),
        [
            ("raise ImportError('undefined symbol: foo')", "undefined symbol: foo", "load_symbol"),
            ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12", "load_library"),
            ("raise OSError('/x/_C.so: wrong ELF class: ELFCLASS32')", "ELFCLASS32", "load_file"),
            pytest.param(
                "raise TypeError('unexpected keyword')",
                "TypeError",
                "load_failed",
                marks=pytest.mark.fault("import_raises"),
            ),
            pytest.param(
                "import sys; sys.exit(1)", "SystemExit", "load_failed", marks=pytest.mark.fault("import_raises")
            ),
            pytest.param(
                "raise KeyboardInterrupt", "KeyboardInterrupt", "load_failed", marks=pytest.mark.fault("import_raises")
            ),
            pytest.param("def (", "SyntaxError", "load_failed", marks=pytest.mark.fault("import_raises")),
            ("x = 1", "has no attribute Fast", "load_failed"),
            ("def Fast(problem): raise ValueError('bad tile')", "bad tile", "load_failed"),
            (
                "def Fast(problem): raise OSError('libnccl.so.2: cannot open shared object file')",
                "nccl",
                "load_library",
            ),
        ],
    )
    def test_a_failing_adapter_is_passed(self, site: Path, text: str, reason: str, code: str) -> None:
        (site / "acme_adapter.py").write_text(text)
        register("acme", record("acme.k", "acme_adapter:Fast"))
        assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
        fallback = kernelhub.report().fallbacks[0]
        assert (fallback.kernel, fallback.code) == ("acme.k", code)
        assert reason in fallback.reason
        with pytest.raises(NoKernel, match=r"acme\.k"):
            kernelhub.attention(*qkv(), backend="acme")

    @pytest.mark.fault("import_hangs")
    def test_a_hanging_adapter_is_passed_and_so_is_the_rest_of_its_backend(self, site: Path, monkeypatch) -> None:
        (site / "acme_hang.py").write_text("import time; time.sleep(60)")
        monkeypatch.setenv("KERNELHUB_LOAD_TIMEOUT_S", "0.2")
        kernelhub.reload()
        register("acme", record("acme.a", "acme_hang:A"), record("acme.b", "acme_hang:B"))
        assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
        codes = {d.kernel: d.code for d in kernelhub.explain(kernelhub.attention, *qkv()).decisions}
        assert codes["acme.a"] == codes["acme.b"] == "load_timeout"
        assert len(kernelhub.report().fallbacks) == 1

    def test_reload_tries_again(self, site: Path) -> None:
        adapter = site / "acme_late.py"
        adapter.write_text("raise ImportError('not yet')")
        register("acme", record("acme.k", "acme_late:Fast"))
        kernelhub.attention(*qkv())
        adapter.write_text(textwrap.dedent(ADAPTER) + "\n# mended\n")
        kernelhub.reload()
        assert float(kernelhub.attention(*qkv()).mean()) == 7.0
