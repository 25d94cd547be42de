"""kernelhub as an attention backend of vLLM, against a vLLM of the same interface whose cache writer is plain torch.

That the interface is the real one is checked on a real vLLM where UNPACKED_VLLM names the folder of one that is
unpacked (the folder ``vllm`` of its wheel or source distribution), or several, the newest last; they are too large for
a test to download.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.backends.cutlass.libraries import SCHEMAS
from kernelhub.backends.marlin.kernels import SCHEMA as MARLIN
from kernelhub.compat.start import MIXED as MIXED_STEPS
from kernelhub.compat.start import SPECULATIVE, Limits
from kernelhub.compat.vllm import interface, plugin, start
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.quarantine import keep, now
from kernelhub.evidence.results import Check, Result
from kernelhub.probes.device import facts
from tests.compat import vllm_releases
from tests.providers.subclasses import differences

BACKEND = """
from enum import Enum
class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
class MultipleOf:
    def __init__(self, base): self.base = base
class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0
class CommonAttentionMetadata:
    query_start_loc = seq_lens = num_reqs = num_actual_tokens = max_query_len = block_table_tensor = None
    seq_lens = None
    num_reqs = 0
    num_actual_tokens = 0
    max_query_len = 0
    block_table_tensor = None
    slot_mapping = None
    causal = True
    def __init__(self, **fields):
        self.__dict__.update(fields)
class AttentionBackend:
    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ): ...
    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls): return True
    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype="auto", block_size=None, use_adaptive_verification=False
    ):
        reasons = [] if dtype in cls.supported_dtypes else ["dtype not supported"]
        if kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            reasons.append("kv_cache_dtype not supported")
        sizes = cls.get_supported_kernel_block_sizes()
        if block_size is not None and all(block_size % size.base for size in sizes):
            reasons.append("block_size not supported")
        if use_adaptive_verification and not cls.supports_device_cpu_query_lens_mismatch():
            reasons.append("device-cpu query lens mismatch not supported")
        return reasons
class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device
    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec): ...
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...
class AttentionImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
    ): ...
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...
"""
REGISTRY = """
from enum import Enum
OVERRIDES = {}
class AttentionBackendEnum(Enum):
    FLASH_ATTN = "a.b.C"
    CUSTOM = None
    def is_overridden(self):
        return self in OVERRIDES
    def get_path(self):
        return OVERRIDES[self]
def register_backend(backend, class_path=None, is_mamba=False):
    OVERRIDES[backend] = class_path
"""
WRITER = """
import torch
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    size = key_cache.shape[1]
    if kv_cache_dtype.startswith("fp8"):
        key_cache, value_cache = key_cache.view(torch.float8_e4m3fn), value_cache.view(torch.float8_e4m3fn)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
                row = new[token] / scale if kv_cache_dtype.startswith("fp8") else new[token]
                cache[slot // size, slot % size] = row.to(cache.dtype)
"""
WORKER = """
class Worker:
    started = 0
    def __init__(self, vllm_config, device):
        self.vllm_config, self.device = vllm_config, device
    def compile_or_warm_up_model(self):
        type(self).started += 1
        return "times"
"""
LATENT = """
from enum import Enum
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
class MLACommonDecodeMetadata:
    block_table = seq_lens = None
    block_table = None
    seq_lens = None
class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls): return True
class MLACommonMetadataBuilder(AttentionMetadataBuilder): ...
class MLACommonImpl(AttentionImpl):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
        logits_soft_cap, attn_type, kv_sharing_target_layer_name, kv_lora_rank,
    ):
        self.num_heads, self.head_size, self.scale, self.kv_lora_rank = num_heads, head_size, scale, kv_lora_rank
        self.supports_quant_query_input = True
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...
"""
CONFIG = """
CURRENT = None
def get_current_vllm_config_or_none():
    return CURRENT
"""
FILES = {
    "config/__init__.py": CONFIG,
    "model_executor/layers/attention/mla_attention.py": LATENT,
    "v1/worker/gpu_worker.py": WORKER,
    "v1/attention/backend.py": BACKEND,
    "v1/attention/backends/registry.py": REGISTRY,
    "_custom_ops.py": WRITER,
}
HEADS, KV_HEADS, WIDTH, SIZE = 4, 2, 32, 16

# Up to 0.28 backends state the form of their cache, up to 0.25 another one, up to 0.23 without use_mm_prefix.
STATED = """
class AttentionBackend:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ..."""
TRITON = """
class TritonAttentionBackend:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return {shape}
    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return {order}
"""
PACKED = TRITON.format(shape="(num_blocks, num_kv_heads, block_size, 2 * head_size)", order="(0, 2, 1, 3)")
APART = TRITON.format(shape="(num_blocks, 2, block_size, num_kv_heads, head_size)", order="(0, 1, 2, 3, 4)")
RELEASES = {"0.33": "", "0.26": PACKED, "0.20": APART}


def text_of(release: str, name: str, text: str) -> str:
    """A file of the vLLM above, as an older release has it."""
    if release != "0.33" and name == "v1/attention/backend.py":
        text = text.replace("\nclass AttentionBackend:", STATED)
        text = text.replace(" use_mm_prefix,", "") if release == "0.20" else text
    return text


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a vLLM on the path, some of its text changed."""

    def install(old: str = "", new: str = "", release: str = "0.33") -> Path:
        files = {name: text_of(release, name, text) for name, text in FILES.items()}
        if RELEASES[release]:
            files["v1/attention/backends/triton_attn.py"] = RELEASES[release]
        for name, text in files.items():
            path = tmp_path / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents:
                if folder.name:
                    (tmp_path / folder / "__init__.py").touch()
            assert not old or any(old in text for text in files.values())
            path.write_text(text.replace(old, new) if old else text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path / "vllm"

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        for name in ("attention", "mla"):
            sys.modules.pop(f"kernelhub.compat.vllm.{name}", None)

    forget()
    yield install
    forget()


class TestRegistration:
    def test_the_entry_point_is_declared_and_loads(self) -> None:
        text = (Path(kernelhub.__file__).parents[1] / "pyproject.toml").read_text()
        assert (
            '[project.entry-points."vllm.general_plugins"]\nkernelhub = "kernelhub.compat.vllm.plugin:register"' in text
        )
        point = metadata.EntryPoint("kernelhub", "kernelhub.compat.vllm.plugin:register", "vllm.general_plugins")
        assert point.load() is plugin.register

    def test_custom_becomes_kernelhub_and_nothing_else_changes(self, vllm) -> None:
        vllm()
        plugin.register()
        plugin.register()  # vLLM may load a plugin more than once
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        assert {item.name: path for item, path in registry.OVERRIDES.items()} == {"CUSTOM": plugin.BACKEND}
        module, _, name = plugin.BACKEND.rpartition(".")
        config = importlib.import_module("vllm.config")
        for latent, implementation in ((None, "KernelhubImpl"), (False, "KernelhubImpl"), (True, "KernelhubMlaImpl")):
            config.CURRENT = None if latent is None else SimpleNamespace(model_config=SimpleNamespace(use_mla=latent))
            backend = getattr(importlib.import_module(module), name)
            assert backend.get_name() == "CUSTOM"
            assert backend.get_impl_cls().__name__ == implementation
        config.CURRENT = SimpleNamespace(model_config=None)
        assert getattr(importlib.import_module(module), name).get_impl_cls().__name__ == "KernelhubImpl"

    def test_another_plugin_that_came_first_stays(self, vllm, caplog) -> None:
        vllm()
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "their.Backend")
        plugin.register()
        assert registry.AttentionBackendEnum.CUSTOM.get_path() == "their.Backend"
        assert "CUSTOM is already their.Backend" in caplog.text

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (
                "def register_backend(backend,",
                "def register_backend(which,",
                "has which as argument 1, where backend was",
            ),
            ("kv_cache, attn_metadata, output,", "attn_metadata, kv_cache, output,", "where kv_cache was"),
            (
                "key_cache, value_cache, slot_mapping, kv",
                "value_cache, key_cache, slot_mapping, kv",
                "where key_cache was",
            ),
            ("class MultipleOf", "class Multiple", "does not define MultipleOf"),
            ("    slot_mapping = None\n", "", "does not define CommonAttentionMetadata.slot_mapping"),
            ("forward_mqa(self, q, kv_c", "forward_mqa(self, kv_c", "where q was"),
            (
                "class AttentionBackend:",
                "class AttentionBackend:\n    def get_kv_cache_shape(): ...",
                "triton_attn does not define TritonAttentionBackend.get_kv_cache_shape",
            ),
        ],
    )
    def test_another_interface_is_an_error_at_start_that_names_release_reason_and_remedy(
        self, vllm, caplog, tmp_path, old, new, reason
    ) -> None:
        folder = tmp_path / "vllm-0.99.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
        vllm(old, new)
        plugin.register()
        told = (
            "attention backend of vLLM 0.99.1: ",
            reason,
            "supports vLLM 0.20 to 0.33",
            "--attention-backend CUSTOM",
        )
        assert all(part in caplog.text for part in told)
        assert "kernelhub.compat.vllm.attention" not in sys.modules
        if "register_backend" in old:
            assert "vllm.v1.attention.backends.registry" not in sys.modules
            return
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        module, _, name = registry.AttentionBackendEnum.CUSTOM.get_path().rpartition(".")
        with pytest.raises(NotImplementedError) as error:  # as vLLM finds the class if CUSTOM is selected
            getattr(importlib.import_module(module), name)
        assert all(part in str(error.value) for part in told)

    @pytest.mark.parametrize("release", vllm_releases.recorded())
    def test_the_recorded_interface_of_each_release(self, tmp_path, release) -> None:
        """Parameters and names as the released wheels have them (`tests/compat/vllm_releases.py`)."""
        fits = interface.interface(vllm_releases.written(vllm_releases.recorded()[release], tmp_path))
        number = tuple(int(part) for part in release.split("."))
        assert fits.ok == (number >= (0, 19)), fits.reason

    def test_the_record_has_every_function_and_name_and_each_minor_release(self) -> None:
        releases = vllm_releases.recorded()
        assert {f"0.{minor}" for minor in range(20, 34)} <= {release.rpartition(".")[0] for release in releases}
        asked = {*vllm_releases.calls(), *vllm_releases.names()}
        assert asked == {name for interface in releases.values() for name in interface} & asked

    @pytest.mark.parametrize("release", RELEASES)
    def test_every_release_registers(self, vllm, release) -> None:
        vllm(release=release)
        plugin.register()
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        assert registry.AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND
        backend = importlib.import_module("kernelhub.compat.vllm.attention").KernelhubBackend
        if release != "0.33":
            theirs = importlib.import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
            assert backend.get_kv_cache_shape(9, 16, 4, 64) == theirs.get_kv_cache_shape(9, 16, 4, 64)
            assert backend.get_kv_cache_stride_order() == theirs.get_kv_cache_stride_order()

    def test_a_cache_of_another_form_is_an_error_that_names_it(self, vllm) -> None:
        vllm("(num_blocks, 2, block_size,", "(2, num_blocks, block_size,", release="0.20")
        with pytest.raises(NotImplementedError, match=r"shape \(2, 3, 16, 5, 32\).*select another attention backend"):
            importlib.import_module("kernelhub.compat.vllm.attention")

    def test_without_vllm_nothing_happens(self, caplog) -> None:
        if importlib.util.find_spec("vllm") is not None:
            pytest.skip("vLLM is installed: 1 case")
        plugin.register()
        assert "vllm is not installed" in caplog.text


@pytest.fixture
def attention(vllm, request):
    """The backend, beside a vLLM of a release; `cache` makes caches as the release has them."""
    release = getattr(request, "param", "0.33")
    vllm(release=release)
    module = importlib.import_module("kernelhub.compat.vllm.attention")
    module.cache = cache_apart if release == "0.20" else cache
    return module


EVERY_RELEASE = pytest.mark.parametrize("attention", RELEASES, indirect=True)


def cache_apart(blocks: int, dtype: torch.dtype, order: str) -> torch.Tensor:
    """The cache of releases before 0.26, ``[B, 2, N, H, D]`` in memory of either order, poisoned."""
    shape = (blocks, 2, KV_HEADS, SIZE, WIDTH) if order == "HND" else (blocks, 2, SIZE, KV_HEADS, WIDTH)
    empty = torch.full(shape, 200.0 if dtype is torch.float8_e4m3fn else float("nan")).to(dtype)
    return empty.transpose(2, 3) if order == "HND" else empty


def cache(blocks: int, dtype: torch.dtype, order: str) -> torch.Tensor:
    """vLLM's cache ``[B, H, N, 2 * D]`` in memory of either order, poisoned."""
    shape = (blocks, KV_HEADS, SIZE, 2 * WIDTH) if order == "HND" else (blocks, SIZE, KV_HEADS, 2 * WIDTH)
    empty = torch.full(shape, 200.0 if dtype is torch.float8_e4m3fn else float("nan")).to(dtype)
    return empty if order == "HND" else empty.transpose(1, 2)


def speculating(tokens: int) -> SimpleNamespace:
    """A configuration with as many speculative tokens."""
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=tokens) if tokens else None)


def attended():
    """The problems of the calls of attention."""
    return [row.problem for row in kernelhub.report().rows if row.op == "paged_attention"]


def run(
    attention,
    order="HND",
    kv_cache_dtype="auto",
    lens=((1, 40), (1, 7)),
    padding=2,
    sinks=None,
    speculative=0,
    **layer_options,
):
    """A step of one layer through the backend, and the same by the op's reference; lens are (queries, tokens)."""
    torch.manual_seed(0)
    fp8 = kv_cache_dtype != "auto"
    scale = torch.tensor(0.5 if fp8 else 1.0)
    layer = SimpleNamespace(_k_scale=scale, _v_scale=scale * 0.5)
    backend = attention.KernelhubBackend
    impl = backend.get_impl_cls()(
        HEADS, WIDTH, 0.2, KV_HEADS, None, kv_cache_dtype=kv_cache_dtype, sinks=sinks, **layer_options
    )
    blocks_each = 4
    table = torch.arange(1, 1 + len(lens) * blocks_each, dtype=torch.int32).view(len(lens), blocks_each).flip(1)
    kv = attention.cache(2 + table.numel(), torch.float8_e4m3fn if fp8 else torch.float32, order)
    stored = kv.view(torch.uint8) if fp8 else kv
    for sequence, (_, tokens) in enumerate(lens):  # what earlier steps wrote, this one's tokens included
        places = torch.arange(tokens)
        slots = table[sequence][places // SIZE].long() * SIZE + places % SIZE
        slots = torch.cat([slots, torch.tensor([-1])])
        impl.do_kv_cache_update(layer, *torch.randn(2, tokens + 1, KV_HEADS, WIDTH), stored, slots)
    queries = [count for count, _ in lens]
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    total = sum(queries)
    step = sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor([tokens for _, tokens in lens], dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=total,
        max_query_len=max(queries),
        block_table_tensor=table,
        slot_mapping=torch.zeros(total, dtype=torch.int64),
        causal=True,
    )
    built = backend.get_builder_cls()(None, ["layer"], speculating(speculative), torch.device("cpu"))
    built = built.build(0, step)
    q = torch.randn(total + padding, HEADS, WIDTH)
    output = torch.full((total + padding, HEADS * WIDTH), float("nan"))
    assert impl.forward(layer, q, None, None, stored, built, output) is output
    assert output[total:].isnan().all()
    keys, values = (part.float() for part in impl._parts_of(kv)[2:])
    window = layer_options.get("sliding_window")
    want = kernelhub.paged_attention.reference(
        q[:total],
        (keys * layer._k_scale if fp8 else keys).contiguous(),
        (values * layer._v_scale if fp8 else values).contiguous(),
        table,
        step.seq_lens,
        cu_seqlens_q=starts,
        window=None if window is None else window - 1,
        softcap=layer_options.get("logits_soft_cap"),
        sinks=sinks,
        scale=0.2,
    )
    return output[:total].view(total, HEADS, WIDTH), want


MIXED = ((1, 40), (5, 5), (3, 20))


class TestSteps:
    @EVERY_RELEASE
    @pytest.mark.parametrize("order", ["HND", "NHD"])
    @pytest.mark.parametrize("lens", [((1, 40), (1, 7)), MIXED], ids=["decode", "mixed"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"sliding_window": 6}, {"logits_soft_cap": 3.0}, {"sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])}],
        ids=["plain", "window", "softcap", "sinks"],
    )
    def test_a_step_is_the_reference(self, attention, order, lens, options) -> None:
        got, want = run(attention, order, lens=lens, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @EVERY_RELEASE
    @pytest.mark.parametrize("lens", [((1, 40), (1, 7)), MIXED], ids=["decode", "mixed"])
    def test_an_fp8_cache_has_its_scales(self, attention, lens) -> None:
        got, want = run(attention, kv_cache_dtype="fp8", lens=lens)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_each_option_changes_the_result(self, attention) -> None:
        plain, _ = run(attention)
        for options in ({"sliding_window": 6}, {"logits_soft_cap": 3.0}, {"sinks": torch.ones(HEADS) * 2}):
            assert not torch.allclose(run(attention, **options)[0], plain, atol=1e-3)

    def test_a_decode_step_needs_no_offsets_and_speculative_ones_do(self, attention) -> None:
        run(attention)
        run(attention, lens=((2, 40), (2, 7)))
        decode, spec = attended()
        assert (decode["ragged"], spec["ragged"]) == (False, True)
        assert spec["q_len"] == "few"

    @EVERY_RELEASE
    @pytest.mark.parametrize("options", [{}, {"sliding_window": 6}], ids=["plain", "window"])
    @pytest.mark.parametrize("order", ["HND", "NHD"])
    def test_equal_numbers_of_speculative_tokens_are_one_batch(self, attention, order, options) -> None:
        """Also where the engine pads a captured batch with sequences of no tokens, and for fewer tokens."""
        lens = ((4, 40), (4, 7), (4, 0), (4, 30))
        for number, form in ((4, lens), (2, ((2, 9), (2, 50)))):
            got, want = run(attention, order, lens=form, speculative=3, **options)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            row = attended()[-1]
            assert (row["ragged"], row["q_len"]) == (False, "few"), number
        got, want = run(attention, order, lens=((4, 40), (3, 7), (5, 9)), speculative=3, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        run(attention, order, lens=((5, 40), (5, 7)), speculative=3, **options)
        assert all(problem["ragged"] for problem in attended() if problem["q_len"] == "any")

    def test_a_run_that_measures_memory_gives_zeros(self, attention) -> None:
        impl = attention.KernelhubImpl(HEADS, WIDTH, 1.0, KV_HEADS)
        assert impl.forward(None, None, None, None, None, None, torch.ones(3, 8)).tolist() == [[0.0] * 8] * 3


class TestCaches:
    def test_a_layer_keeps_the_parts_of_its_last_cache_only(self, attention) -> None:
        impl = attention.KernelhubImpl(HEADS, WIDTH, 1.0, KV_HEADS, kv_cache_dtype="fp8")
        first, second = (attention.cache(2, torch.float8_e4m3fn, "HND").view(torch.uint8) for _ in range(2))
        parts = impl._parts_of(first)
        assert [part.dtype for part in parts] == [torch.uint8] * 2 + [torch.float8_e4m3fn] * 2
        assert impl._parts_of(first) is parts
        assert impl._parts_of(second)[0].data_ptr() == second.data_ptr() != first.data_ptr()
        attention.forget(impl)
        assert impl._parts_of(first)[0].data_ptr() == first.data_ptr()

    def test_output_and_queries_without_padding_are_taken_as_they_are(self, attention) -> None:
        got, want = run(attention, padding=0)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


WRITES = "KERNELHUB_VLLM_WRITE_KV_CACHE"
BOTH_CACHES = pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])


class TestWrites:
    """The cache is written by `write_kv_cache`; on request, and where no kernel can, by vLLM's kernel."""

    @EVERY_RELEASE
    @BOTH_CACHES
    @pytest.mark.parametrize("order", ["HND", "NHD"])
    def test_bytes_are_those_of_vllm_s_kernel(self, attention, monkeypatch, order, kv_cache_dtype) -> None:
        """Slots of padding are negative, and keys may have more rows than there are slots."""
        torch.manual_seed(0)
        fp8 = kv_cache_dtype == "fp8"
        layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
        slots = torch.tensor([5, -1, 0, 40, SIZE, -1])
        keys, values = torch.randn(9, 2, KV_HEADS, WIDTH).unbind(1)  # as they are split, not contiguous
        caches = []
        for requested in (None, "0"):
            if requested:
                monkeypatch.setenv(WRITES, requested)
                kernelhub.reload()
            impl = attention.KernelhubImpl(HEADS, WIDTH, 0.2, KV_HEADS, kv_cache_dtype=kv_cache_dtype)
            kv = attention.cache(4, torch.float8_e4m3fn if fp8 else torch.float32, order)
            stored = kv.view(torch.uint8) if fp8 else kv
            impl.do_kv_cache_update(layer, keys, values, stored, slots)
            caches.append(stored.clone() if fp8 else stored.view(torch.int32).clone())
        assert torch.equal(*caches)
        keys_of, values_of = (part.float() for part in impl._parts_of(stored)[2:])
        for token, slot in ((0, 5), (3, 40)):
            for new, cached, scale in ((keys, keys_of, 0.5), (values, values_of, 0.25)):
                got = cached[slot // SIZE, slot % SIZE] * (scale if fp8 else 1.0)
                torch.testing.assert_close(got, new[token], rtol=0.07 if fp8 else 0, atol=0.002 if fp8 else 0)
        assert [row.kernel for row in kernelhub.report().rows if row.op == "write_kv_cache"]

    @EVERY_RELEASE
    @BOTH_CACHES
    @pytest.mark.parametrize("order", ["HND", "NHD"])
    @pytest.mark.parametrize("lens", [((1, 40), (1, 7)), MIXED], ids=["decode", "mixed"])
    def test_a_step_over_what_was_written_is_the_reference(
        self, attention, monkeypatch, order, lens, kv_cache_dtype
    ) -> None:
        def refuse(*given):
            raise AssertionError("vLLM's kernel was called")

        monkeypatch.setattr(attention, "reshape_and_cache_flash", refuse)
        got, want = run(attention, order, kv_cache_dtype, lens)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @BOTH_CACHES
    def test_on_request_vllm_s_kernel_writes(self, attention, engine, caplog, kv_cache_dtype) -> None:
        caplog.set_level("INFO")
        engine(**{WRITES: "0"})
        run(attention, "HND", kv_cache_dtype)
        model = Model(attention, kv_cache_dtype)
        model.start()
        assert "writing its cache" not in caplog.text
        assert {row.op for row in kernelhub.report().rows} == {"paged_attention"}

    @BOTH_CACHES
    @pytest.mark.parametrize("lacks", ["no kernel", "no graphs"])
    def test_vllm_s_kernel_writes_what_no_kernel_can_in_a_graph(
        self, attention, monkeypatch, engine, caplog, kv_cache_dtype, lacks
    ) -> None:
        from kernelhub.dispatch.kernel import GraphLevel

        def explained(op, **facets):
            if op is not kernelhub.write_kv_cache:
                return kernelhub.explain(op, **facets)
            asked.append(facets)
            return SimpleNamespace(kernel=SimpleNamespace(graph=GraphLevel.NONE) if lacks == "no graphs" else None)

        asked = []
        caplog.set_level("INFO")
        engine()
        monkeypatch.setattr(attention, "explain", explained)
        run(attention, "HND", kv_cache_dtype)
        Model(attention, kv_cache_dtype).start()
        assert "writing its cache" not in caplog.text
        assert {row.op for row in kernelhub.report().rows} == {"paged_attention"}
        fp8 = kv_cache_dtype == "fp8"
        wanted = (torch.float32, torch.float8_e4m3fn if fp8 else torch.float32, "tensor" if fp8 else None, SIZE)
        assert {tuple(one[name] for name in ("dtype", "kv_dtype", "kv_scale", "page_size")) for one in asked} == {
            wanted
        }

    @EVERY_RELEASE
    @BOTH_CACHES
    @pytest.mark.parametrize("order", ["HND", "NHD"])
    def test_no_write_is_new_after_the_start(self, attention, engine, caplog, kv_cache_dtype, order) -> None:
        caplog.set_level("INFO")
        engine(KERNELHUB_ENGINE_SEAL="raise")
        model = Model(attention, kv_cache_dtype, order=order)
        model.start()
        assert "2 layers like model.layers.0.attn, writing its cache: one token: torch.scatter" in caplog.text
        for lens in (((1, 40), (1, 7)), MIXED, ((32, 32),)):
            model.write(sum(count for count, _ in lens))
            model.step(lens)
        model.write(0)
        assert not kernelhub.report().after_seal

    def test_a_write_that_was_not_warmed_up_is_logged_and_made(self, attention, engine, caplog) -> None:
        engine()
        kernelhub.seal()
        model = Model(attention)
        model.write(3)
        assert "since the warm-up did not cover it" in caplog.text
        assert kernelhub.report().sealed


WIDE, LATENT_WIDTH = 576, 512


@pytest.fixture
def latent(vllm):
    vllm()
    return importlib.import_module("kernelhub.compat.vllm.mla")


def latent_layer(latent, kv_cache_dtype="auto", **options):
    given = dict.fromkeys(
        ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"), None
    ) | {"attn_type": "decoder"}
    impl = latent.KernelhubMlaImpl(
        HEADS, WIDE, 0.1, 1, kv_cache_dtype=kv_cache_dtype, kv_lora_rank=LATENT_WIDTH, **given | options
    )
    fp8 = kv_cache_dtype != "auto"
    return SimpleNamespace(impl=impl, _k_scale=torch.tensor(0.5 if fp8 else 1.0))


class TestLatentAttention:
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
    @pytest.mark.parametrize("parts", [False, True], ids=["one q", "q in parts"])
    def test_decode_is_the_reference(self, latent, kv_cache_dtype, parts) -> None:
        torch.manual_seed(0)
        layer, fp8 = latent_layer(latent, kv_cache_dtype), kv_cache_dtype == "fp8"
        cache = torch.randn(9, 16, WIDE)
        stored = cache.to(torch.float8_e4m3fn) if fp8 else cache
        q = torch.randn(3, HEADS, WIDE)
        decode = SimpleNamespace(
            block_table=torch.tensor([[1, 2], [3, 4], [8, 0]], dtype=torch.int32),
            seq_lens=torch.tensor([20, 32, 0], dtype=torch.int32),
        )
        got, lse = layer.impl.forward_mqa(
            q.split([LATENT_WIDTH, WIDE - LATENT_WIDTH], dim=-1) if parts else q,
            stored.view(torch.uint8) if fp8 else stored,
            SimpleNamespace(decode=decode, causal=True),
            layer,
        )
        want = kernelhub.mla_attention.reference(
            q, stored.float() * layer._k_scale, decode.block_table, decode.seq_lens, scale=0.1
        )
        assert lse is None
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_speculative_decode_is_the_reference(self, latent) -> None:
        torch.manual_seed(0)
        layer, cache, q = latent_layer(latent), torch.randn(9, 16, WIDE), torch.randn(3, 4, HEADS, WIDE)
        decode = SimpleNamespace(
            block_table=torch.tensor([[1, 2], [3, 4], [8, 0]], dtype=torch.int32),
            seq_lens=torch.tensor([20, 32, 0], dtype=torch.int32),
        )
        metadata = SimpleNamespace(decode=decode, causal=True)
        got, _ = layer.impl.forward_mqa(q.flatten(0, 1), cache, metadata, layer)
        want = kernelhub.mla_attention.reference(q, cache, decode.block_table, decode.seq_lens, scale=0.1)
        torch.testing.assert_close(got, want.flatten(0, 1), rtol=1e-4, atol=1e-4)
        assert latent.KernelhubMlaMetadataBuilder.query_len_support.name == "UNIFORM"

    def test_what_it_cannot_do_is_an_error_before_anything_runs(self, latent) -> None:
        for name, options in {
            "ALiBi": {"alibi_slopes": [0.5]},
            "windows": {"sliding_window": 9},
            "softcap": {"logits_soft_cap": 3.0},
            "decoders": {"attn_type": "encoder_only"},
        }.items():
            with pytest.raises(NotImplementedError, match=name):
                latent_layer(latent, **options)
        layer = latent_layer(latent)
        with pytest.raises(NotImplementedError, match="causal"):
            layer.impl.forward_mqa(torch.ones(1, 4, WIDE), torch.ones(1), SimpleNamespace(causal=False), layer)

    def test_the_selection_is_kernelhub_s_with_its_reasons(self, latent) -> None:
        ask = latent.KernelhubMlaBackend.supports_combination
        hopper = SimpleNamespace(major=9, minor=0)
        for cache in ("auto", "fp8"):
            assert ask(WIDE, torch.bfloat16, cache, 64, True, False, False, False, hopper) is None
            assert ask(WIDE, torch.bfloat16, cache, 64, True, False, False, hopper) is None  # before 0.24
        assert "dense" in ask(WIDE, torch.bfloat16, "auto", 64, True, False, True, False, hopper)
        with kernelhub.use(disable=["torch", "triton", "gluon"]):
            reason = ask(WIDE, torch.bfloat16, "auto", 64, True, False, False, False, hopper)
        assert "remove it from use(disable=" in reason

    def test_blocks_are_of_64_tokens_where_a_faster_kernel_takes_no_other(self, latent) -> None:
        assert latent.KernelhubMlaBackend.get_preferred_block_size(16) == latent._preferred_block_size(16)
        chosen = {
            size: latent._selection(torch.bfloat16, torch.bfloat16, 576, size, "H200").kernel for size in (16, 64)
        }
        assert chosen[16] != chosen[64]
        assert latent._preferred_block_size(16, "H200") == 64
        assert latent._preferred_block_size(128, "H200") == 64
        assert latent._preferred_block_size(32, "A100") == 32  # the same kernel takes both
        with kernelhub.use(disable=["gluon", "flash_mla"]):
            assert latent._preferred_block_size(16, "H200") == 16

    def test_a_worker_s_start_warms_up_its_layers(self, latent, engine, caplog) -> None:
        caplog.set_level("INFO")
        layers = {}
        for index in range(2):
            layers[f"model.layers.{index}.self_attn.attn"] = layer = latent_layer(latent)
            layer.kv_cache = torch.zeros(4, 16, WIDE)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers, cudagraph_capture_sizes=[1, 2, 6]),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=8),
            model_config=SimpleNamespace(dtype=torch.float32, max_model_len=64),
        )
        latent.KernelhubMlaMetadataBuilder(None, list(layers), config, torch.device("cpu"))
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker(config, torch.device("cpu"))
        assert worker.compile_or_warm_up_model() == "times"
        assert "2 layers like model.layers.0.self_attn.attn: decode: " in caplog.text
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        for sequences in (1, 3, 8):
            decode = SimpleNamespace(
                block_table=torch.zeros(sequences, 4, dtype=torch.int32),
                seq_lens=torch.full((sequences,), 33, dtype=torch.int32),
            )
            metadata = SimpleNamespace(decode=decode, causal=True)
            layer.impl.forward_mqa(torch.randn(sequences, HEADS, WIDE), layer.kv_cache, metadata, layer)
        assert "was not covered" not in caplog.text


class TestRefusals:
    def test_what_it_cannot_do_is_an_error_before_anything_runs(self, attention) -> None:
        with pytest.raises(NotImplementedError, match="ALiBi: leave --attention-backend CUSTOM out"):
            attention.KernelhubImpl(HEADS, WIDTH, 1.0, KV_HEADS, alibi_slopes=[0.5] * HEADS)
        with pytest.raises(NotImplementedError, match="encoder_only, that of decoders alone"):
            attention.KernelhubImpl(HEADS, WIDTH, 1.0, KV_HEADS, attn_type="encoder_only")
        one = torch.ones(1)
        with pytest.raises(NotImplementedError, match="quantised output"):
            attention.KernelhubImpl(HEADS, WIDTH, 1.0).forward(None, one, one, one, one, None, one, output_scale=one)

    @pytest.mark.parametrize("module", ["attention", "mla"])
    def test_vllm_s_own_reasons_come_with_the_remedy(self, attention, module) -> None:
        backend = importlib.import_module(f"kernelhub.compat.vllm.{module}").PARTS.impl.__name__.replace(
            "Impl", "Backend"
        )
        ask = getattr(importlib.import_module(f"kernelhub.compat.vllm.{module}"), backend).validate_configuration
        assert ask(64, torch.bfloat16) == []
        *reasons, remedy = ask(64, torch.float64)
        assert reasons == ["dtype not supported"]
        assert "leave --attention-backend CUSTOM out" in remedy

    @pytest.mark.parametrize("module", ["attention", "mla"])
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
            ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
            ({"block_size": 8}, "block_size not supported"),
            ({"block_size": 24}, "block_size not supported"),
        ],
    )
    def test_caches_and_blocks_that_it_does_not_declare_are_refused(self, attention, module, options, reason) -> None:
        parts = importlib.import_module(f"kernelhub.compat.vllm.{module}")
        ask = getattr(parts, parts.PARTS.impl.__name__.replace("Impl", "Backend")).validate_configuration
        for right in ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 48}):
            assert ask(64, torch.bfloat16, **right) == []
        *reasons, remedy = ask(64, torch.bfloat16, **options)
        assert reasons == [reason]
        assert "leave --attention-backend CUSTOM out" in remedy

    @pytest.mark.parametrize(("module", "width", "latent"), [("attention", 128, False), ("mla", 576, True)])
    def test_a_cache_in_16_bits_of_another_dtype_is_refused(self, attention, module, width, latent) -> None:
        parts = importlib.import_module(f"kernelhub.compat.vllm.{module}")
        ask = getattr(parts, parts.PARTS.impl.__name__.replace("Impl", "Backend")).supports_combination
        hopper = SimpleNamespace(major=9, minor=0)

        def reason(dtype, cache):
            return ask(width, dtype, cache, 64, latent, False, False, False, hopper)

        assert reason(torch.bfloat16, "bfloat16") is reason(torch.float16, "float16") is None
        for dtype, cache in ((torch.float16, "bfloat16"), (torch.bfloat16, "float16"), (torch.float32, "bfloat16")):
            assert f"a cache of {cache} for a model of {str(dtype)[6:]}: use --kv-cache-dtype auto" in reason(
                dtype, cache
            )

    @pytest.mark.parametrize("module", ["attention", "mla"])
    def test_drafts_that_are_dropped_on_the_device_are_refused(self, attention, module) -> None:
        """Steps of equal numbers of queries on the host run as one batch, without vLLM's offsets on the device."""
        backend = importlib.import_module(f"kernelhub.compat.vllm.{module}").PARTS.impl.__name__.replace(
            "Impl", "Backend"
        )
        ask = getattr(importlib.import_module(f"kernelhub.compat.vllm.{module}"), backend).validate_configuration
        assert "query lens mismatch" in ask(64, torch.bfloat16, use_adaptive_verification=True)[0]

    def test_the_selection_is_kernelhub_s_with_its_reasons(self, attention) -> None:
        ask = attention.KernelhubBackend.supports_combination
        hopper = SimpleNamespace(major=9, minor=0)
        plain = (128, torch.bfloat16, "auto", 16, False, False, False, False)
        assert ask(*plain, hopper) is None
        assert ask(*plain, None) is None
        assert ask(*plain[:-1], hopper) is None  # as vLLM asks before 0.24
        assert "dense" in ask(128, torch.bfloat16, "auto", 16, True, False, False, False, hopper)
        with kernelhub.use(disable=["torch", "triton", "gluon"]):
            reason = ask(*plain, hopper)
            assert ask(*plain[:-1], hopper) == reason
        assert "disabled by use(disable=" in reason
        assert "triton.split_kv" in reason

    @pytest.mark.parametrize(
        ("captured", "speculative", "expected"),
        [
            (("one", "few"), 0, "UNIFORM_SINGLE_TOKEN_DECODE"),
            (("one", "few"), 3, "UNIFORM_BATCH"),
            (("one",), 3, "UNIFORM_SINGLE_TOKEN_DECODE"),
            (("one", "few"), 20, "UNIFORM_SINGLE_TOKEN_DECODE"),
            (("few",), 3, "NEVER"),
        ],
    )
    @pytest.mark.parametrize("name", ["attention", "mla"])
    def test_graphs_of_decode_where_the_selected_kernels_are_capture_safe(
        self, attention, monkeypatch, name, captured, speculative, expected
    ) -> None:
        from kernelhub.dispatch.kernel import GraphLevel

        module = importlib.import_module(f"kernelhub.compat.vllm.{name}")

        def explained(op, **facets):
            level = GraphLevel.FULL if facets["q_len"] in captured else GraphLevel.NONE
            return SimpleNamespace(kernel=SimpleNamespace(graph=level))

        monkeypatch.setattr(module, "explain", explained)
        model = SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda parallel: 32)
        config = SimpleNamespace(model_config=model, parallel_config=None, **vars(speculating(speculative)))
        spec = SimpleNamespace(dtype=torch.bfloat16, head_size=128, block_size=16, num_kv_heads=8)
        builder = module.PARTS.impl.__name__.replace("Impl", "MetadataBuilder")
        assert getattr(module, builder).get_cudagraph_support(config, spec).name == expected


UNPACKED = [item for item in os.environ.get("UNPACKED_VLLM", "").split(os.pathsep) if item]


class TestRealVllm:
    """Interfaces of released versions: those of 0.19.1 to 0.33.0 fit."""

    @pytest.fixture(params=UNPACKED or [None], ids=str)
    def root(self, request) -> Path:
        if request.param is None:
            pytest.skip("UNPACKED_VLLM names no unpacked vLLM: 3 cases")
        return Path(request.param)

    @pytest.fixture
    def newest(self) -> Path:
        """The last of them, of the release whose wrappers are in the tables."""
        if not UNPACKED:
            pytest.skip("UNPACKED_VLLM names no unpacked vLLM: 2 cases")
        return Path(UNPACKED[-1])

    def test_its_interface_fits(self, root) -> None:
        assert interface.interface(root).ok

    def test_the_backend_has_the_methods_of_its_base_classes(self, root) -> None:
        ours = Path(plugin.__file__).with_name("attention.py")
        expected = {"AttentionImpl has no do_kv_cache_update, which KernelhubImpl has"}  # its layers call it
        expected |= {  # what older releases lack, or have and `_state_form` gives
            "KernelhubBackend has no get_kv_cache_shape",
            "AttentionBackend has no supports_sliding_window, which KernelhubBackend has",
            "AttentionBackend has no supports_device_cpu_query_lens_mismatch, which KernelhubBackend has",
        }
        anything = "supports_combination", "validate_configuration"  # ours take what any release passes
        found = differences(ours, root / "v1/attention/backend.py", ours.with_name("supports.py"))
        assert {item for item in found if not any(name in item for name in anything)} <= expected
        text = (root / "model_executor/layers/attention/attention.py").read_text()
        call = (
            r"impl\.do_kv_cache_update\(\s*(#.*)?\s*attn_layer,\s*key,\s*value,\s*kv_cache,\s*layer_slot_mapping,\s*\)"
        )
        assert re.search(call, text)

    def test_its_worker_starts_as_the_plugin_follows_it(self, root) -> None:
        worker = (root / "v1/worker/gpu_worker.py").read_text()
        assert f"    def {start.START}(self)" in worker
        assert worker.index("kernel_warmup(self)") < worker.index("self.model_runner.capture_model()")
        base = (root / "v1/worker/worker_base.py").read_text()
        assert "self.vllm_config = vllm_config" in base
        names = {
            "config/compilation.py": ("static_forward_context", "cudagraph_capture_sizes"),
            "config/scheduler.py": ("max_num_batched_tokens", "max_num_seqs"),
            "config/model.py": ("max_model_len", "dtype"),
        }
        for path, fields in names.items():
            text = (root / path).read_text()
            for field in fields:
                assert re.search(rf"^    {field}: ", text, re.MULTILINE), field

    def test_its_operators_are_declared_as_the_adapters_of_cutlass_and_marlin_call_them(self, newest) -> None:
        """Schemas as they stand in the library's file, which is not loaded."""
        library = newest / "_C_stable_libtorch.abi3.so"
        if not library.exists():
            pytest.skip("the compiled library is not unpacked: 1 case")
        declared = b"".join(library.read_bytes().split())
        theirs = {name: schema for name, schema in SCHEMAS.items() if name.startswith("cutlass_")}
        assert len(theirs) >= 5
        for name, schema in (theirs | {"marlin_gemm": MARLIN}).items():
            assert "".join((name + schema).split()).encode() + b"\0" in declared, name

    def test_its_names_are_those_of_the_table(self, newest) -> None:
        from kernelhub.probes.signature import MOST_HOPS, Sources, _header
        from tests.compat import vllm_names

        for module, names in (("flashinfer", vllm_names.FLASHINFER), ("deep_gemm", vllm_names.DEEP_GEMM)):
            text = (newest / "utils" / f"{module}.py").read_text()
            for name, parameters in names.items():
                assert name in text
                if parameters in ("class", "value") or parameters.startswith(("->", "*args")) or "_fake" in name:
                    continue
                if f"\ndef {name}(" in text:
                    header = _header(Sources(), newest, ["utils", module], [name], MOST_HOPS)
                    told = [part.partition("=")[0] for part in parameters.split(", ") if part not in ("", "*")]
                    assert [*header.positional, *header.keyword_only] == told


class Model:
    """A vLLM whose layers have caches, for the start of its worker."""

    def __init__(
        self, attention, kv_cache_dtype="auto", layers=({}, {}, {"sliding_window": 6}), order="HND", speculative=0
    ) -> None:
        self.attention, self.layers = attention, {}
        fp8 = kv_cache_dtype != "auto"
        for index, options in enumerate(layers):
            impl = attention.KernelhubImpl(HEADS, WIDTH, 0.2, KV_HEADS, None, kv_cache_dtype=kv_cache_dtype, **options)
            kv = attention.cache(4, torch.float8_e4m3fn if fp8 else torch.float32, order)
            scale = torch.tensor(1.0)
            layer = SimpleNamespace(
                impl=impl, kv_cache=kv.view(torch.uint8) if fp8 else kv, _k_scale=scale, _v_scale=scale
            )
            self.layers[f"model.layers.{index}.attn"] = layer
        self.layers["model.layers.0.experts"] = SimpleNamespace()  # vLLM's context has other layers, too
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=self.layers, cudagraph_capture_sizes=[1, 2, 6]),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=8),
            model_config=SimpleNamespace(dtype=torch.float32, max_model_len=64),
            **vars(speculating(speculative)),
        )

    def start(self) -> object:
        device = torch.device("cpu")
        self.attention.KernelhubMetadataBuilder(None, list(self.layers), self.config, device)
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker(self.config, device)
        return worker.compile_or_warm_up_model()

    def write(self, tokens: int) -> None:
        """What each layer writes in a step, with a row of padding."""
        slots = torch.arange(tokens)
        for layer in self.layers.values():
            if hasattr(layer, "impl"):
                keys, values = torch.randn(tokens + 1, 2, KV_HEADS, WIDTH).unbind(1)
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def step(self, lens, columns=4) -> None:
        """A step of each layer; lens are (queries, tokens)."""
        longest = max(count for count, _ in lens)
        most = start.queries_of(self.config)
        queries = longest if longest <= most and longest * len(lens) == sum(count for count, _ in lens) else 0
        starts = torch.tensor([0, *(count for count, _ in lens)]).cumsum(0, dtype=torch.int32)
        total = int(starts[-1])
        metadata = self.attention.KernelhubMetadata(
            num_actual_tokens=total,
            max_query_len=max(count for count, _ in lens),
            query_start_loc=starts,
            seq_lens=torch.tensor([tokens for _, tokens in lens], dtype=torch.int32),
            block_table=torch.zeros(len(lens), columns, dtype=torch.int32),
            slot_mapping=torch.zeros(total, dtype=torch.int64),
            queries=queries,
            causal=True,
        )
        for layer in self.layers.values():
            if hasattr(layer, "impl"):
                layer.kv_cache.zero_()
                q = torch.randn(total, HEADS, WIDTH)
                layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, torch.empty_like(q))


@pytest.fixture
def engine(attention, monkeypatch, tmp_path):
    """Settings of a fresh process, and an unsealed one afterwards."""

    def configured(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        kernelhub.reload()

    configured()
    yield configured
    kernelhub.unseal()


class TestStart:
    """What the plugin does while vLLM starts its worker."""

    @EVERY_RELEASE
    @pytest.mark.parametrize(("kv_cache_dtype", "order"), [("auto", "HND"), ("auto", "NHD"), ("fp8", "HND")])
    def test_steps_of_serving_are_ready_when_it_has_started(self, attention, engine, caplog, kv_cache_dtype, order):
        caplog.set_level("INFO")
        model = Model(attention, kv_cache_dtype, order=order)
        assert model.start() == "times"
        assert kernelhub.report().sealed
        for lens in (((1, 40), (1, 7)), ((1, 1),), MIXED, ((2, 9), (2, 5)), ((32, 32),), ((20, 50), (1, 9))):
            model.step(lens)
        assert not kernelhub.report().after_seal
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert "2 layers like model.layers.0.attn: decode: cpp.split_kv" in caplog.text
        assert "1 layers like model.layers.2.attn: decode: cpp.split_kv" in caplog.text
        assert "kernelhub: sealed" in caplog.text

    def test_steps_of_speculative_decode_are_ready(self, attention, engine, caplog) -> None:
        caplog.set_level("INFO")
        model = Model(attention, speculative=3)
        model.start()
        for lens in (((1, 40), (1, 7)), ((4, 9), (4, 5)), ((2, 9), (2, 5), (2, 30)), ((4, 64),) * 8, MIXED):
            model.step(lens)
        assert not kernelhub.report().after_seal
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert "speculative decode: cpp.split_kv" in caplog.text

    def test_a_step_of_one_query_each_has_no_more_sequences_than_the_engine(self) -> None:
        """A worker has little memory left at its start, and parts of split-KV decode grow with the sequences."""
        limits = Limits(tokens=8192, sequences=100, context_len=9000, captured=(1, 2, 128), queries=4)
        one, few, many = MIXED_STEPS.values()
        assert limits.counts({"q_len": "one", "ragged": False}) == (1, 2, 4, 8, 16, 32, 64, 100)
        assert limits.counts(one) == (1, 2, 4, 8, 16, 32, 64, 100)
        assert max(limits.counts(few)) == 400
        assert max(limits.counts(many)) == 8192
        assert limits.counts(SPECULATIVE, 4) == (4, 8, 16, 32, 64, 128, 256, 400)

    def test_a_quarantined_kernel_is_reported_at_the_start(self, attention, engine, caplog, tmp_path) -> None:
        engine(KERNELHUB_CACHE_DIR=str(tmp_path))
        model = Model(attention, layers=({},))
        kernel = kernelhub.explain("paged_attention", device="cpu", q_len="one", q_dtype="float32").selected
        record = next(each for each in HUB.registry.candidates("paged_attention").kernels if each.name == kernel)
        wrong = Check("a case", "zeros", "", 9.0, "off by 3")
        keep(record, facts(torch.device("cpu")), Result("paged_attention", kernel, (wrong,)), now())
        HUB.forget_evidence()
        model.start()
        assert f"a quarantined kernel does not serve: {kernel} on 20" in caplog.text
        assert f"kernelhub verify paged_attention --backend {kernel}" in caplog.text

    def test_the_worker_s_start_is_wrapped_once(self, attention, engine) -> None:
        model = Model(attention, layers=({},))
        model.start()
        kernelhub.unseal()
        model.start()
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
        assert worker.started == 2
        assert not hasattr(worker.compile_or_warm_up_model.__wrapped__, "__wrapped__")

    def test_a_step_that_is_not_ready_is_an_error_in_the_log_and_runs(self, attention, engine, caplog) -> None:
        model = Model(attention, layers=({},))
        model.start()
        model.layers["model.layers.0.attn"].impl._softcap = 3.0  # another problem than that of the start
        model.step(((1, 9),))
        assert "this step waits, since the warm-up did not cover it" in caplog.text
        assert "softcap" in caplog.text
        assert kernelhub.report().sealed

    def test_it_raises_where_that_is_wanted(self, attention, engine) -> None:
        engine(KERNELHUB_ENGINE_SEAL="raise")
        model = Model(attention, layers=({},))
        model.start()
        model.layers["model.layers.0.attn"].impl._softcap = 3.0
        with pytest.raises(kernelhub.errors.NotWarmed, match="softcap"):
            model.step(((1, 9),))

    def test_nothing_is_sealed_where_that_is_off(self, attention, engine, caplog) -> None:
        engine(KERNELHUB_ENGINE_SEAL="off")
        Model(attention, layers=({},)).start()
        assert not kernelhub.report().sealed
        engine(KERNELHUB_ENGINE_SEAL="raise", KERNELHUB_ENGINE_WARMUP="0")
        Model(attention, layers=({},)).start()
        assert not kernelhub.report().sealed
        assert "KERNELHUB_ENGINE_WARMUP=0: kernels compile at the first requests" in caplog.text

    def test_another_start_of_the_worker_is_reported(self, vllm, engine, caplog) -> None:
        vllm("compile_or_warm_up_model", "start_some_other_way")
        sys.modules.pop("vllm.v1.worker.gpu_worker", None)
        attention = importlib.import_module("kernelhub.compat.vllm.attention")
        attention.KernelhubMetadataBuilder(None, [], None, torch.device("cpu"))
        assert "kernelhub does not warm up at vLLM's start" in caplog.text
        assert "compile_or_warm_up_model is missing" in caplog.text
