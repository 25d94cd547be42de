"""kernelhub as an attention backend of SGLang, against an SGLang of the same interface in plain torch.

That the interface is the real one is checked on released wheels: tests/providers/sglang.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.compat.sglang import plugin

REGISTRY = """
ATTENTION_BACKENDS = {}
def register_attention_backend(name):
    def decorator(fn):
        ATTENTION_BACKENDS[name] = fn
        return fn
    return decorator
"""
CHOICES = """
ATTENTION_BACKEND_CHOICES = ["triton", "flashinfer"]
"""
BASE = """
class AttentionBackend:
    needs_cpu_seq_lens: bool = True
    def init_forward_metadata(self, forward_batch): ...
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
    def init_forward_metadata_in_graph(self, forward_batch): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...
    def get_cuda_graph_seq_len_fill_value(self): ...
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        one = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return one(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...
"""
POOL = """
class KVWriteLoc:
    def __init__(self, loc):
        self.loc = loc
    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc)
class MHATokenToKVPool:
    kv_cache_layout = "nhd"
    is_quantized_kv_cache = False
    def __init__(self, slots, heads, width, dtype):
        import torch
        self.dtype = dtype
        poison = 200.0 if dtype is torch.float8_e4m3fn else float("nan")
        self.k_buffer, self.v_buffer = (torch.full((slots, heads, width), poison).to(dtype) for _ in range(2))
    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for new, buffer, scale in ((cache_k, self.k_buffer, k_scale), (cache_v, self.v_buffer, v_scale)):
            if new.dtype != self.dtype and scale is not None:
                new.div_(scale)
            buffer[loc_info.loc] = new.to(self.dtype)
    def get_key_buffer(self, layer_id):
        assert layer_id == 3
        return self.k_buffer
    def get_value_buffer(self, layer_id):
        return self.v_buffer
"""
BATCH = """
from enum import IntEnum, auto
class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    DLLM_EXTEND = auto()
    PREBUILT = auto()
    def is_decode(self): return self == ForwardMode.DECODE
    def is_idle(self): return self == ForwardMode.IDLE
    def is_extend(self): return self in (1, 3, 5, 7)
    def is_target_verify(self): return self == ForwardMode.TARGET_VERIFY
    def is_draft_extend_v2(self): return self == ForwardMode.DRAFT_EXTEND_V2
    def is_dllm_extend(self): return self == ForwardMode.DLLM_EXTEND
class ForwardBatch:
    forward_mode = None
    req_pool_indices = None
    seq_lens = None
    seq_lens_cpu = None
    extend_seq_lens = None
    extend_seq_lens_cpu = None
    attn_cp_metadata = None
    out_cache_loc = None
    def __init__(self, **fields):
        self.__dict__.update(fields)
"""
LAYER = """
from enum import Enum
import torch
class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"
class RadixAttention(torch.nn.Module):
    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
        sliding_window_size=-1, is_cross_attention=False, pos_encoding_mode="NONE", logit_capping_method="tanh",
        attn_type=AttentionType.DECODER, use_irope=False,
    ):
        super().__init__()
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = num_kv_heads
        self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = logit_cap
        self.logit_capping_method = logit_capping_method
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention = is_cross_attention
        self.attn_type = attn_type
        self.use_irope = use_irope
        self.pos_encoding_mode = pos_encoding_mode
        self.xai_temperature_len = -1
        self.k_scale = None
        self.v_scale = None
"""
CONTEXT = """
from types import SimpleNamespace
PARALLEL = SimpleNamespace(dcp_enabled=False)
DECODE = SimpleNamespace(bs=[1, 2, 6])
EXEC = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=DECODE)))
SCHEDULE = SimpleNamespace(chunked_prefill_size=32, max_prefill_tokens=48)
def get_parallel():
    return PARALLEL
def get_exec():
    return EXEC
def get_schedule():
    return SCHEDULE
"""
RUNNER = """
from types import SimpleNamespace
class ModelRunner:
    def __init__(self, model_config, max_running_requests, **parts):
        self.model_config = model_config
        self.max_running_requests = max_running_requests
        self.kv_index_translator = SimpleNamespace(is_translating=False)
        self.__dict__.update(parts)
        self.graphs = 0
    def init_cuda_graphs(self, capture_decode_cuda_graph=True):
        self.graphs += 1
        return "graphs"
"""
FILES = {
    "srt/layers/attention/attention_registry.py": REGISTRY,
    "srt/arg_groups/choices.py": CHOICES,
    "srt/layers/attention/base_attn_backend.py": BASE,
    "srt/mem_cache/memory_pool.py": POOL,
    "srt/model_executor/forward_batch_info.py": BATCH,
    "srt/layers/radix_attention.py": LAYER,
    "srt/runtime_context.py": CONTEXT,
    "srt/model_executor/model_runner.py": RUNNER,
}
# As releases before 0.5.22 make a location, and where those before 0.5.20 have the list of names. Releases before
# 0.5.19 have no unified pool.
FOR_BATCH = """
    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc)"""
RELEASES = {
    "0.5.23": FILES,
    "0.5.20": FILES | {"srt/mem_cache/memory_pool.py": POOL.replace(FOR_BATCH, "\n    loc = None")},
}
TRANSLATOR = "        self.kv_index_translator = SimpleNamespace(is_translating=False)\n"
RELEASES["0.5.17"] = {name: text for name, text in RELEASES["0.5.20"].items() if text is not CHOICES} | {
    "srt/server_args.py": CHOICES,
    "srt/model_executor/model_runner.py": RUNNER.replace(TRANSLATOR, ""),
}
REGISTRY_MODULE = "sglang.srt.layers.attention.attention_registry"
HEADS, KV_HEADS, WIDTH, LAYER_ID = 4, 2, 32, 3
LONGEST, REQUESTS = 64, 5


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put an SGLang on the path, some of its text changed."""

    def install(old: str = "", new: str = "", release: str = "0.5.23") -> Path:
        files = RELEASES[release]
        assert not old or any(old in text for text in files.values())
        for name, text in files.items():
            path = tmp_path / "sglang" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents:
                if folder.name:
                    (tmp_path / folder / "__init__.py").touch()
            path.write_text(text.replace(old, new) if old else text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path / "sglang"

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        for name in ("attention", "start"):
            sys.modules.pop(f"kernelhub.compat.sglang.{name}", None)

    forget()
    yield install
    forget()


@pytest.fixture
def attention(sglang, request):
    """The backend, beside an SGLang of a release."""
    sglang(release=getattr(request, "param", "0.5.23"))
    return importlib.import_module("kernelhub.compat.sglang.attention")


class TestRegistration:
    def test_the_entry_point_is_declared_and_loads(self) -> None:
        text = (Path(kernelhub.__file__).parents[1] / "pyproject.toml").read_text()
        point = '[project.entry-points."sglang.srt.plugins"]\nkernelhub = "kernelhub.compat.sglang.plugin:register"'
        assert point in text
        loaded = metadata.EntryPoint("kernelhub", "kernelhub.compat.sglang.plugin:register", "sglang.srt.plugins")
        assert loaded.load() is plugin.register

    @pytest.mark.parametrize("release", RELEASES)
    def test_kernelhub_becomes_a_backend_that_can_be_chosen(self, sglang, release) -> None:
        sglang(release=release)
        plugin.register()
        plugin.register()  # SGLang's processes may be forked with it
        registry = importlib.import_module(REGISTRY_MODULE)
        holder = "sglang.srt.server_args" if release == "0.5.17" else "sglang.srt.arg_groups.choices"
        choices = importlib.import_module(holder).ATTENTION_BACKEND_CHOICES
        assert list(registry.ATTENTION_BACKENDS) == ["kernelhub"]
        assert choices == ["triton", "flashinfer", "kernelhub"]
        assert "kernelhub.compat.sglang.attention" not in sys.modules
        made = registry.ATTENTION_BACKENDS["kernelhub"](runner())
        base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
        assert isinstance(made, base.AttentionBackend)

    def test_another_backend_of_its_name_stays(self, sglang, caplog) -> None:
        sglang()
        registry = importlib.import_module(REGISTRY_MODULE)
        registry.ATTENTION_BACKENDS["kernelhub"] = "theirs"
        plugin.register()
        assert registry.ATTENTION_BACKENDS == {"kernelhub": "theirs"}
        assert "already named kernelhub" in caplog.text

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("def register_attention_backend(name)", "def register_attention_backend(fn)", "where name was"),
            (
                "def init_forward_metadata_out_graph",
                "def init_forward_metadata_replay",
                "without init_forward_metadata",
            ),
            ("init_cuda_graph_state(self, max_bs,", "init_cuda_graph_state(self, most,", "where max_bs was"),
            ("cache_k, cache_v, k_scale=None", "cache_v, cache_k, k_scale=None", "where cache_k was"),
            ("class KVWriteLoc", "class Loc", "does not define KVWriteLoc"),
            ("    extend_seq_lens_cpu = None\n", "", "does not define ForwardBatch.extend_seq_lens_cpu"),
            ("        self.logit_cap = logit_cap\n", "", "does not define RadixAttention.self.logit_cap"),
            ("ATTENTION_BACKEND_CHOICES", "CHOICES", "does not define ATTENTION_BACKEND_CHOICES"),
            ("def init_cuda_graphs", "def capture", "ModelRunner without init_cuda_graphs"),
            ("self.max_running_requests = ", "self.most = ", "does not define ModelRunner.self.max_running_requests"),
        ],
    )
    def test_another_interface_is_left_alone_with_release_reason_and_remedy(
        self, sglang, caplog, tmp_path, old, new, reason
    ) -> None:
        folder = tmp_path / "sglang-0.9.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.1\n")
        sglang(old, new)
        plugin.register()
        assert "attention backend of SGLang 0.9.1: " in caplog.text
        assert reason in caplog.text
        assert "supports SGLang 0.5.17 to 0.5.23: install one of these, or leave --attention-backend" in caplog.text
        assert REGISTRY_MODULE not in sys.modules

    def test_without_sglang_nothing_happens(self, caplog) -> None:
        if importlib.util.find_spec("sglang") is not None:
            pytest.skip("SGLang is installed: 1 case")
        plugin.register()
        assert "sglang is not installed" in caplog.text


def runner(page: int = 16, dtype: torch.dtype = torch.float32, **changed):
    """What a backend reads of SGLang's ModelRunner; requests own their pages in no order, row 0 is padding."""
    pool = sys.modules.get("sglang.srt.mem_cache.memory_pool") or importlib.import_module(
        "sglang.srt.mem_cache.memory_pool"
    )
    pages = LONGEST // page
    owned = torch.randperm(REQUESTS * pages, generator=torch.Generator().manual_seed(1)).view(REQUESTS, pages) + 1
    slots = (owned[:, :, None] * page + torch.arange(page)).view(REQUESTS, LONGEST)
    table = torch.cat([torch.zeros(1, LONGEST, dtype=torch.int64), slots]).to(torch.int32)
    made = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner(
        SimpleNamespace(dtype=torch.float32, context_len=LONGEST),
        8,
        model=torch.nn.Module(),
        page_size=page,
        use_mla_backend=False,
        is_hybrid_swa=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool.MHATokenToKVPool((REQUESTS * pages + 1) * page, KV_HEADS, WIDTH, dtype),
    )
    made.__dict__.update(changed)
    return made


def batch(model, mode: str, lens, rows=None, on_host: bool = True):
    """A step; lens are (queries, tokens) of each sequence, rows their requests in the token table."""
    info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    rows = list(range(len(lens), 0, -1)) if rows is None else rows
    table = model.req_to_token_pool.req_to_token
    tokens = torch.tensor([tokens for _, tokens in lens])
    counts = [count for count, _ in lens]
    extends = mode in ("EXTEND", "MIXED")
    return info.ForwardBatch(
        forward_mode=info.ForwardMode[mode],
        req_pool_indices=torch.tensor(rows),
        seq_lens=tokens,
        seq_lens_cpu=tokens if on_host else None,
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32) if extends else None,
        extend_seq_lens_cpu=counts if extends and on_host else None,
        out_cache_loc=torch.cat(
            [table[row, end - count : end] for row, (count, end) in zip(rows, lens, strict=True)]
        ).long(),
    )


def layer_of(scales=None, **options):
    made = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention(
        HEADS, WIDTH, 0.2, KV_HEADS, LAYER_ID, **options
    )
    if scales is not None:
        made.k_scale, made.v_scale = (torch.tensor(scale) for scale in scales)
    return made


def fill(model, step, layer) -> None:
    """The keys and values of earlier steps, in the pool."""
    kv, table = model.token_to_kv_pool, model.req_to_token_pool.req_to_token
    for row, end in zip(step.req_pool_indices.tolist(), step.seq_lens.tolist(), strict=True):
        slots = table[row, :end].long()
        where = importlib.import_module("sglang.srt.mem_cache.memory_pool").KVWriteLoc(slots)
        kv.set_kv_buffer(layer, where, *torch.randn(2, end, KV_HEADS, WIDTH), layer.k_scale, layer.v_scale)


def reference(model, step, layer, q, lens, sinks=None):
    """The same step by the op's reference over the pool as it is after it, in pages of one slot."""
    kv, table = model.token_to_kv_pool, model.req_to_token_pool.req_to_token
    scales = [1.0 if scale is None else scale for scale in (layer.k_scale, layer.v_scale)]
    counts = torch.tensor([0, *[count for count, _ in lens]])
    return kernelhub.paged_attention.reference(
        q.view(-1, HEADS, WIDTH),
        (kv.k_buffer.float() * scales[0])[:, None].contiguous(),
        (kv.v_buffer.float() * scales[1])[:, None].contiguous(),
        table[step.req_pool_indices].contiguous(),
        step.seq_lens.to(torch.int32),
        cu_seqlens_q=counts.cumsum(0, dtype=torch.int32),
        window=None if layer.sliding_window_size < 0 else layer.sliding_window_size,
        softcap=layer.logit_cap or None,
        sinks=sinks,
        scale=0.2,
    )


DECODE = ((1, 40), (1, 7), (1, 16))
MIXED = ((1, 40), (5, 5), (3, 20))


def run(attention, mode="DECODE", lens=DECODE, page=16, padding=0, fp8=None, sinks=None, on_host=True, **options):
    """A step of one layer through the backend, and the same by the reference."""
    torch.manual_seed(0)
    model = runner(page, fp8 or torch.float32)
    layer = layer_of((0.5, 0.25) if fp8 else None, **options)
    backend = attention.KernelhubAttnBackend(model)
    step = batch(model, mode, lens, on_host=on_host)
    fill(model, step, layer)
    total = sum(count for count, _ in lens)
    qkv = torch.randn(total + padding, (HEADS + 2 * KV_HEADS) * WIDTH)  # its parts are strided, as in a model
    q, k, v = qkv.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
    k, v = (x[:total].view(-1, KV_HEADS, WIDTH) for x in (k, v))
    backend.init_forward_metadata(step)
    more = {} if sinks is None else {"sinks": sinks}
    got = backend.forward(q, k, v, layer, step, **more)
    assert got.shape == q.shape
    assert not got[total:].any()
    return got[:total].view(total, HEADS, WIDTH), reference(model, step, layer, q[:total].contiguous(), lens, sinks)


class TestSteps:
    @pytest.mark.parametrize("attention", ["0.5.23", "0.5.17"], indirect=True)
    @pytest.mark.parametrize("page", [1, 16])
    @pytest.mark.parametrize(("mode", "lens"), [("DECODE", DECODE), ("EXTEND", ((7, 7), (20, 33))), ("MIXED", MIXED)])
    @pytest.mark.parametrize(
        "options",
        [{}, {"sliding_window_size": 5}, {"logit_cap": 3.0}, {"sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])}],
        ids=["plain", "window", "softcap", "sinks"],
    )
    def test_a_step_is_the_reference(self, attention, page, mode, lens, options) -> None:
        got, want = run(attention, mode, lens, page, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("mode", "lens"), [("DECODE", DECODE), ("MIXED", MIXED)])
    @pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_a_float8_cache_has_its_scales(self, attention, mode, lens, fp8) -> None:
        got, want = run(attention, mode, lens, fp8=fp8)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(("mode", "lens"), [("DECODE", DECODE), ("MIXED", MIXED)])
    def test_lengths_that_are_on_the_device_alone_are_enough(self, attention, mode, lens) -> None:
        got, want = run(attention, mode, lens, on_host=False)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_rows_of_padding_are_zeros(self, attention) -> None:
        got, want = run(attention, "MIXED", MIXED, padding=3)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_each_option_changes_the_result(self, attention) -> None:
        plain, _ = run(attention)
        for options in ({"sliding_window_size": 5}, {"logit_cap": 3.0}, {"sinks": torch.ones(HEADS) * 2}):
            assert not torch.allclose(run(attention, **options)[0], plain, atol=1e-3)

    def test_a_layer_that_shares_another_s_cache_writes_nothing(self, attention) -> None:
        model, layer = runner(), layer_of()
        step = batch(model, "DECODE", DECODE)
        fill(model, step, layer)
        before = model.token_to_kv_pool.k_buffer.clone()
        backend = attention.KernelhubAttnBackend(model)
        backend.init_forward_metadata(step)
        backend.forward(torch.randn(3, HEADS * WIDTH), None, None, layer, step)
        k, v = torch.randn(2, 3, KV_HEADS, WIDTH)
        backend.forward(torch.randn(3, HEADS * WIDTH), k, v, layer, step, save_kv_cache=False)
        assert torch.equal(before.isnan(), model.token_to_kv_pool.k_buffer.isnan())
        assert torch.equal(before.nan_to_num(), model.token_to_kv_pool.k_buffer.nan_to_num())

    def test_a_rank_that_idles_has_no_metadata(self, attention) -> None:
        model = runner()
        backend = attention.KernelhubAttnBackend(model)
        backend.init_forward_metadata(batch(model, "DECODE", DECODE))
        assert backend.forward_metadata is not None
        idle = batch(model, "DECODE", DECODE)
        idle.forward_mode = type(idle.forward_mode).IDLE
        backend.init_forward_metadata(idle)
        assert backend.forward_metadata is None


class TestGraphs:
    def test_steps_of_decode_are_put_into_tensors_that_stay(self, attention) -> None:
        model, layer = runner(), layer_of()
        backend = attention.KernelhubAttnBackend(model)
        backend.init_cuda_graph_state(4, 4)
        fill_value = backend.get_cuda_graph_seq_len_fill_value()
        blank = batch(model, "DECODE", [(1, fill_value)] * 4, rows=[0] * 4)
        backend.init_forward_metadata_out_graph(blank, in_capture=True)
        captured = backend.forward_metadata
        at = captured.block_table.data_ptr(), captured.seq_lens.data_ptr()
        assert captured.block_table.shape == (4, LONGEST // 16)
        assert captured.captured
        for lens in (DECODE, ((1, 64), (1, 3), (1, 30))):  # the second has more pages than the first
            padded = batch(model, "DECODE", (*lens, (1, fill_value)), rows=[3, 1, 2, 0])
            fill(model, padded, layer)
            backend.init_forward_metadata_out_graph(padded)
            step = backend.forward_metadata
            assert (step.block_table.data_ptr(), step.seq_lens.data_ptr()) == at
            assert not step.captured
            q = torch.randn(4, HEADS * WIDTH)
            backend.forward_metadata = replace(captured, captured=False)  # a replay reads what was captured
            got = backend.forward(q, None, None, layer, padded).view(4, HEADS, WIDTH)
            want = reference(model, padded, layer, q, (*lens, (1, fill_value)))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_a_kernel_that_may_not_be_captured_is_an_error_that_names_it(self, attention, monkeypatch) -> None:
        from kernelhub.dispatch.kernel import GraphLevel

        model, layer = runner(), layer_of()
        backend = attention.KernelhubAttnBackend(model)
        backend.init_cuda_graph_state(4, 4)
        step = batch(model, "DECODE", DECODE)
        fill(model, step, layer)
        plan = SimpleNamespace(kernel="some.kernel", graph=GraphLevel.NONE)
        real = attention.paged_attention

        def call(*args, **kwargs):
            return real(*args, **kwargs)

        call.prepare = lambda *args: plan
        monkeypatch.setattr(attention, "paged_attention", call)
        backend.init_forward_metadata_out_graph(step)
        backend.forward(torch.randn(3, HEADS * WIDTH), None, None, layer, step)  # it may be replayed
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        with pytest.raises(NotImplementedError, match=r"some\.kernel may not be captured .* KERNELHUB_DISABLE"):
            backend.forward(torch.randn(3, HEADS * WIDTH), None, None, layer, step)

    def test_graphs_of_prefill_are_refused(self, attention) -> None:
        model = runner()
        backend = attention.KernelhubAttnBackend(model)
        backend.init_cuda_graph_state(4, 4)
        with pytest.raises(NotImplementedError, match="cuda-graph-backend-prefill"):
            backend.init_forward_metadata_out_graph(batch(model, "EXTEND", MIXED), in_capture=True)


class OtherPool:
    dtype = torch.bfloat16


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"use_mla_backend": True}, "latent"),
            ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
            ({"token_to_kv_pool": OtherPool()}, "not OtherPool;"),
            ({"token_to_kv_pool": OtherPool(), "is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
            ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified pool"),
        ],
    )
    def test_a_server_that_it_is_not_for(self, attention, changed, reason) -> None:
        with pytest.raises(NotImplementedError, match=reason):
            attention.KernelhubAttnBackend(runner(**changed))

    def test_a_refusal_has_the_remedy(self, attention) -> None:
        with pytest.raises(NotImplementedError, match="latent attention; leave --attention-backend kernelhub out"):
            attention.KernelhubAttnBackend(runner(use_mla_backend=True))

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("kv_cache_layout", "hnd", "not hnd"),
            ("is_quantized_kv_cache", True, "scales of blocks"),
            ("dtype", torch.int8, "not support a cache of torch.int8.*fp8_e4m3 or fp8_e5m2"),
        ],
    )
    def test_a_pool_that_it_cannot_read(self, attention, name, value, reason) -> None:
        model = runner()
        setattr(model.token_to_kv_pool, name, value)
        with pytest.raises(NotImplementedError, match=reason):
            attention.KernelhubAttnBackend(model)

    def test_context_parallelism(self, attention, monkeypatch) -> None:
        model = runner()
        backend = attention.KernelhubAttnBackend(model)
        step = batch(model, "EXTEND", MIXED)
        step.attn_cp_metadata = object()
        with pytest.raises(NotImplementedError, match="not support context parallelism"):
            backend.init_forward_metadata(step)
        monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"].PARALLEL, "dcp_enabled", True)
        with pytest.raises(NotImplementedError, match="context parallelism of decode"):
            attention.KernelhubAttnBackend(model)

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("TARGET_VERIFY", "speculative"),
            ("DRAFT_EXTEND_V2", "speculative"),
            ("DLLM_EXTEND", "diffusion"),
            ("PREBUILT", "not support steps of mode"),
        ],
    )
    def test_a_step_that_it_has_nothing_for(self, attention, mode, reason) -> None:
        model = runner()
        backend = attention.KernelhubAttnBackend(model)
        with pytest.raises(NotImplementedError, match=reason):
            backend.init_forward_metadata(batch(model, mode, DECODE))

    @pytest.mark.parametrize(
        ("options", "more", "reason"),
        [
            ({"is_cross_attention": True}, {}, "supports decoders"),
            ({"attn_type": "encoder_only"}, {}, "supports decoders"),
            ({"use_irope": True}, {}, "chunks"),
            ({"pos_encoding_mode": "ALIBI"}, {}, "positions"),
            ({"logit_cap": 3.0, "logit_capping_method": "other"}, {}, "by tanh"),
            ({}, {"k_rope": torch.ones(1)}, "not support k_rope"),
        ],
    )
    def test_a_layer_that_it_has_nothing_for(self, attention, options, more, reason) -> None:
        model, layer = runner(), layer_of(**options)
        backend = attention.KernelhubAttnBackend(model)
        step = batch(model, "DECODE", DECODE)
        backend.init_forward_metadata(step)
        before = model.token_to_kv_pool.k_buffer.clone()
        with pytest.raises(NotImplementedError, match=reason):
            backend.forward(torch.randn(3, HEADS * WIDTH), *torch.randn(2, 3, KV_HEADS, WIDTH), layer, step, **more)
        assert torch.equal(before.isnan(), model.token_to_kv_pool.k_buffer.isnan())


class Block(torch.nn.Module):
    """A block of a model of SGLang's, with what the start reads of it."""

    def __init__(self, sinks=None, scales=None, **options) -> None:
        super().__init__()
        self.sinks = sinks
        self.attn = layer_of(scales, **options)


@pytest.fixture
def engine(monkeypatch):
    """Settings of a fresh process, and an unsealed one afterwards."""

    def configured(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        kernelhub.reload()

    configured()
    yield configured
    kernelhub.unseal()


def started(attention, *blocks: Block, page: int = 16, dtype: torch.dtype = torch.float32):
    """A runner that has started with these blocks, and its backend; the pool is empty, as SGLang's is then."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(blocks)
    runs = runner(page, dtype, model=model)
    for buffer in (runs.token_to_kv_pool.k_buffer, runs.token_to_kv_pool.v_buffer):
        buffer.zero_()
    backend = attention.KernelhubAttnBackend(runs)
    assert runs.init_cuda_graphs() == "graphs"
    return runs, backend


def serve(runs, backend, block: Block, mode: str, lens) -> None:
    """A step of a block's layer, its queries strided as a model's are."""
    step = batch(runs, mode, lens, rows=[1 + row % REQUESTS for row in range(len(lens))])
    backend.init_forward_metadata(step)
    total = sum(count for count, _ in lens)
    q = torch.randn(total, (HEADS + 2 * KV_HEADS) * WIDTH)[:, : HEADS * WIDTH]
    backend.forward(q, None, None, block.attn, step, sinks=block.sinks)


class TestStart:
    """What the plugin does while SGLang starts a model runner."""

    @pytest.mark.parametrize("attention", RELEASES, indirect=True)
    @pytest.mark.parametrize(
        ("page", "dtype"),
        [(16, torch.float32), (1, torch.float32), (16, torch.float8_e4m3fn), (16, torch.float8_e5m2)],
    )
    def test_steps_of_serving_are_ready_when_it_has_started(self, attention, engine, caplog, page, dtype) -> None:
        caplog.set_level("INFO")
        scales = (0.5, 0.25) if dtype.itemsize == 1 else None
        blocks = [Block(scales=scales), Block(scales=scales), Block(scales=scales, sliding_window_size=5)]
        blocks.append(Block(torch.ones(HEADS), scales))
        runs, backend = started(attention, *blocks, page=page, dtype=dtype)
        assert kernelhub.report().sealed
        for block in blocks:
            for mode, lens in (
                *(("DECODE", ((1, 40),) * count) for count in (1, 3, 6, 8)),
                ("EXTEND", ((32, 32),)),
                ("EXTEND", ((7, 7), (20, 33))),
                ("MIXED", (*MIXED, (30, 64))),
                ("EXTEND", ((2, 9), (2, 5))),
            ):
                serve(runs, backend, block, mode, lens)
        assert not kernelhub.report().after_seal
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        for kind in ("2 layers like layers.0.attn", "1 layers like layers.2.attn", "1 layers like layers.3.attn"):
            assert f"{kind}: decode: cpp.split_kv" in caplog.text
        assert "kernelhub: sealed" in caplog.text
        assert "for PagedAttentionProblem" not in caplog.text  # a line for each selection

    def test_graphs_are_captured_after_the_warm_up_and_before_the_seal(self, attention, engine, monkeypatch) -> None:
        seen = []

        def warm() -> bool:
            return bool(kernelhub.paged_attention.op.ready())

        runner_class = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner

        def capture(self, capture_decode_cuda_graph=True):
            seen.append((warm(), kernelhub.report().sealed, capture_decode_cuda_graph))

        monkeypatch.setattr(runner_class, "init_cuda_graphs", capture)
        model = torch.nn.Module()
        model.layer = Block()
        runs = runner(model=model)
        for _ in range(2):  # with overlapped batches a runner has several backends
            attention.KernelhubAttnBackend(runs)
        runs.init_cuda_graphs(capture_decode_cuda_graph=False)
        assert seen == [(True, False, False)]
        assert kernelhub.report().sealed
        runs.init_cuda_graphs()  # another start in the same process
        assert seen[1:] == [(True, False, True)]

    def test_a_step_that_is_not_ready_is_an_error_in_the_log_and_runs(self, attention, engine, caplog) -> None:
        block = Block()
        runs, backend = started(attention, block)
        block.attn.logit_cap = 3.0  # another problem than that of the start
        serve(runs, backend, block, "DECODE", DECODE)
        assert "this step waits, since the warm-up did not cover it" in caplog.text
        assert "softcap" in caplog.text
        assert kernelhub.report().sealed

    def test_it_raises_where_that_is_wanted(self, attention, engine) -> None:
        engine(KERNELHUB_ENGINE_SEAL="raise")
        block = Block()
        runs, backend = started(attention, block)
        block.attn.logit_cap = 3.0
        with pytest.raises(kernelhub.errors.NotWarmed, match="softcap"):
            serve(runs, backend, block, "DECODE", DECODE)

    def test_nothing_is_sealed_where_that_is_off(self, attention, engine, caplog) -> None:
        engine(KERNELHUB_ENGINE_SEAL="off")
        started(attention, Block())
        assert not kernelhub.report().sealed
        engine(KERNELHUB_ENGINE_SEAL="raise", KERNELHUB_ENGINE_WARMUP="0")
        started(attention, Block())
        assert not kernelhub.report().sealed
        assert "KERNELHUB_ENGINE_WARMUP=0: kernels compile at the first requests" in caplog.text

    def test_a_layer_that_is_not_supported_ends_the_start(self, attention, engine) -> None:
        with pytest.raises(NotImplementedError, match="supports decoders"):
            started(attention, Block(is_cross_attention=True))

    @pytest.mark.parametrize("warms", ["1", "0"])
    def test_layers_that_no_kernel_supports_end_the_start(self, attention, engine, warms) -> None:
        engine(KERNELHUB_ENGINE_WARMUP=warms, KERNELHUB_DISABLE="cpp,torch,triton")
        with pytest.raises(kernelhub.errors.NoKernel) as error:
            started(attention, Block(), Block())
        told = ("no kernel for 2 layers like layers.0.attn, step 'decode': select another attention backend of SGLang",)
        told += ("cpp.split_kv", "remove it from KERNELHUB_DISABLE=cpp,torch,triton")
        assert all(part in str(error.value) for part in told), str(error.value)

    def test_without_chunks_a_prompt_is_one_step(self, attention, engine) -> None:
        context = sys.modules["sglang.srt.runtime_context"]
        start = sys.modules["kernelhub.compat.sglang.start"]
        assert start.limits_of(runner()) == (40, 8, LONGEST, (1, 2, 6), 1)
        context.SCHEDULE.chunked_prefill_size, context.DECODE.bs = -1, None
        assert start.limits_of(runner()) == (LONGEST + 8, 8, LONGEST, (), 1)
