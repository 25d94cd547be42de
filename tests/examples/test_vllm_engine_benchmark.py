"""benchmarks/vllm_engine.py without vLLM: its reference, its figures of known steps, its tables."""

from __future__ import annotations

import fcntl
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("vllm_engine")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("vllm_engine", None)


@pytest.mark.parametrize("packed", [True, False], ids=["cache since 0.26", "cache before 0.26"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
def test_its_reference_is_the_op_s(bench, options, packed) -> None:
    torch.manual_seed(0)
    heads, kv_heads, width, size = 4, 2, 32, 8
    parts = torch.randn(2, 9, size, kv_heads, width)
    cache = torch.cat([*parts], dim=-1).transpose(1, 2) if packed else parts.transpose(0, 1)
    keys, values = bench._halves(cache, width)
    table = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 8]], dtype=torch.int32)
    lens, starts = torch.tensor([20, 9, 17], dtype=torch.int32), torch.tensor([0, 5, 6, 23], dtype=torch.int32)
    q = torch.randn(23, heads, width)
    got = bench.float64_attention(q, keys, values, table, lens.tolist(), starts.tolist(), scale=0.2, **options)
    window = options.get("window")
    more = options | ({} if window is None else {"window": window - 1})
    want = kernelhub.paged_attention.reference(q, *parts, table, lens, cu_seqlens_q=starts, scale=0.2, **more)
    torch.testing.assert_close(got, want.double(), rtol=1e-4, atol=1e-5)


def test_its_reference_of_a_float8_cache_is_the_op_s(bench) -> None:
    torch.manual_seed(0)
    parts = torch.randn(2, 9, 8, 2, 32).to(torch.float8_e4m3fn)
    table, lens = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    q, layer = torch.randn(2, 4, 32), SimpleNamespace(_k_scale=torch.tensor(0.3), _v_scale=torch.tensor(0.7))
    stored = parts.view(torch.uint8)  # as vLLM has it
    scales = bench.cache_scales(layer, stored)
    got = bench.float64_attention(q, *stored, table, [20, 9], [0, 1, 2], scale=0.2, cache_scales=scales)
    want = kernelhub.paged_attention.reference(q[:, None], *parts, table, lens, scale=0.2, k_scale=0.3, v_scale=0.7)
    torch.testing.assert_close(got, want[:, 0].double(), rtol=1e-4, atol=1e-5)
    assert bench.cache_scales(layer, parts.bfloat16()) is None


def test_its_reference_of_latents_is_the_op_s(bench) -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(3, 4, 576), torch.randn(5, 16, 576)
    table = torch.tensor([[1, 2], [4, 3], [0, 0]], dtype=torch.int32)
    lens = torch.tensor([20, 32, 3], dtype=torch.int32)
    parts = cache[:, :, None], cache[:, :, None, :512]
    got = bench.float64_attention(q, *parts, table, lens.tolist(), list(range(4)), scale=0.1)
    want = kernelhub.mla_attention.reference(q, cache, table, lens, scale=0.1)
    torch.testing.assert_close(got, want.double(), rtol=1e-4, atol=1e-5)


def test_decode_figures_count_steps_that_serve_every_request(bench) -> None:
    prompts = [(0.5, 1, 1), (0.5, 2, 2)]
    decode = [(0.001 * at, 2, 2) for at in range(1, 13)]
    found = bench.decode_figures(prompts + decode, 2)
    assert found["steps"] == 14
    assert (found["step_ms_p50"], found["step_ms_p99"]) == (6.5, 10.0)  # without the first ones and the last two
    assert found["tokens_per_s_whole"] == round(27 / (1.0 + 0.078), 1)
    assert "step_ms_p50" not in bench.decode_figures(prompts, 2)


def test_weights_do_not_depend_on_their_order(bench) -> None:
    class Model(torch.nn.Module):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(
                    name, torch.nn.Parameter(torch.zeros(5) if "norm" in name else torch.zeros(9, 7))
                )

    one, other = Model(["up", "norm", "down", "sinks"]), Model(["sinks", "down", "norm", "up"])
    bench.draw_weights(one)
    bench.draw_weights(other)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name))
    assert torch.equal(one.norm, torch.ones(5))
    assert 0.01 < one.up.std() < 0.03 < 0.5 < one.sinks.std()


def test_tables_compare_runs_of_one_model(bench, tmp_path, capsys) -> None:
    def row(model: str, best: list[int]) -> dict[str, Any]:
        return {
            "start_s": 9.5,
            "options": {"model": model},
            "errors_of_kernelhub": ["this step waits"] if best[0] == 9 else [],
            "tokens": {"best": best, "logprobs": [-1.0, -2.0, -3.5, float(-best[0])]},
            "speed": {
                "decode": [{"batch": 2, "tokens": 8, "steps": 4, "tokens_per_s_whole": 7.5}],
                "prefill": [{"batch": 1, "tokens": 64, "s": 0.25}],
            },
            "stress": [{"load": "1000 steps of 8", "preempted": 3, "same_share": 1.0}],
        }

    runs = {"a": row("m", [1, 2, 3, 4]), "b": row("m", [1, 2, 3, 5]), "c": row("n", [9, 2, 3, 5])}
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    bench.main(["--out", str(tmp_path / "runs.json"), "--show"])
    printed = capsys.readouterr().out
    assert "a, b: {'same_best_share': 0.75, 'logprob_max': 0.0, 'logprob_mean': 0.0}" in printed
    assert "a, c" not in printed
    assert "errors: ['this step waits']" in printed
    assert "prompts 1 x 64: 0.25 s" in printed


def test_greedy_log_probabilities_are_compared_up_to_the_first_other_token(bench) -> None:
    plain = {"best": [1, 2], "logprobs": [-1.0, -2.0]}
    one = plain | {"greedy": [[5, 6, 7], [8, 9, 1]], "greedy_logprobs": [[-0.1, -0.2, -0.3], [-0.5, -0.5, -0.5]]}
    other = plain | {"greedy": [[5, 4, 7], [8, 9, 1]], "greedy_logprobs": [[-0.15, -9.0, -9.0], [-0.5, -0.5, -0.25]]}
    found = bench.agreement(one, other)
    assert found["same_greedy_share"] == round(5 / 6, 5)
    assert found["greedy_logprob_max"] == 0.25
    assert found["greedy_logprob_mean"] == round((0.05 + 0.25) / 4, 5)
    assert "same_greedy_share" not in bench.agreement(plain, one)


@pytest.mark.parametrize("wrong", [False, True])
def test_caches_by_both_writers_are_compared_byte_by_byte(bench, monkeypatch, wrong) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "_graph_us", lambda call: 64.0)

    class Impl:
        num_heads, num_kv_heads, head_size, _writes = 4, 2, 32, False

        def _parts_of(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*cache.transpose(1, 2).split(32, dim=-1),) * 2

        def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: torch.Tensor) -> None:
            tokens = len(slots)
            kernelhub.write_kv_cache(keys[:tokens], values[:tokens], *self._parts_of(cache)[2:], slots)
            if self._writes and wrong:
                cache[0, 0, 0, 0] += 1

    layers = [SimpleNamespace(impl=Impl(), kv_cache=torch.zeros(9, 2, 16, 64, dtype=torch.bfloat16)) for _ in range(2)]
    row = bench._writes_of(SimpleNamespace(layers=layers), 16)
    assert (row["same_bytes"], row["padded"], row["vllm, graph us"]) == (not wrong, 2, 32.0)
    assert row["written_share"] > 0.15
    assert row["kernelhub, host us"] > 0


def test_waits_and_compilations_of_the_layers_are_found(bench, monkeypatch) -> None:
    """By a fake of torch's sync debug mode: a layer that reads a length from the device waits for it."""
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: mode.__setitem__(0, new))
    served: list[str] = []

    class Impl:
        def forward(self, step: str) -> str:
            if step == "reads lengths" and mode[0] == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            if step == "compiles":
                hook = knobs.jit_post_compile_hook
                hook(fn=SimpleNamespace(module="kernelhub.backends", name="decode"))
            served.append(step)
            return step

    class KernelhubMetadataBuilder:
        def build(self) -> None:
            served.append("build")

    module = ModuleType("their_backend")
    for kind in (Impl, KernelhubMetadataBuilder):
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)
    knobs = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "their_backend", module)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=knobs)))
    layer = Impl()
    steps = iter([["plain", "reads lengths"], ["plain"], ["compiles"]])

    def generate(prompts: list[str], count: int) -> None:
        KernelhubMetadataBuilder().build()
        for step in next(steps):
            assert layer.forward(step) == step

    engine = SimpleNamespace(
        layers=[SimpleNamespace(impl=layer)], prompt=lambda length, seed: str(seed), generate=generate
    )
    found = bench.watch(engine, SimpleNamespace())
    assert [wait.partition(":")[0] for wait in found["waits"]] == ["forward"]
    assert found["watched_calls"] == {"forward": 2, "build": 1}
    assert found["compiled"] == ["kernelhub.backends.decode"]
    assert found["host"]["forward"]["decode of 1"]["calls"] == 1
    assert served.count("reads lengths") == 1
    assert knobs.jit_post_compile_hook is None
    assert Impl().forward("plain") == "plain"
    assert mode == ["default"]


@pytest.mark.parametrize("b_format", ["nvfp4", "mxfp4"])
def test_float4_weights_are_stored_as_kernelhub_reads_them(bench, b_format) -> None:
    float4 = importlib.import_module("float4_weights")
    drawn: dict[str, torch.Tensor] = {}

    def draw(name: str, weight: torch.Tensor) -> None:
        bench.draw_weight(name, weight)
        drawn[name] = weight

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            group = 16 if b_format == "nvfp4" else 32
            kind = torch.float8_e4m3fn if b_format == "nvfp4" else torch.uint8
            sizes = {"weight_packed": ((96, 64), torch.uint8), "weight_scale": ((96, 128 // group), kind)}
            if b_format == "nvfp4":
                sizes |= dict.fromkeys(["weight_global_scale", "input_global_scale"], ((3,), torch.float32))
            for name, (size, dtype) in sizes.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False))

    model = torch.nn.Module()
    model.qkv_proj, model.norm, model.attn = Layer(), torch.nn.LayerNorm(8), torch.nn.Module()
    model.attn.k_scale = torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)
    float4.fill(model, draw)
    layer = model.qkv_proj
    assert set(drawn) == {"qkv_proj.weight", "norm.weight", "norm.bias"}
    assert float(model.attn.k_scale) == -1.0
    if b_format == "nvfp4":
        assert torch.equal(layer.input_global_scale, torch.ones(3))
        factor = 1 / layer.weight_global_scale.max()
        got = kernelhub.dequantize_nvfp4(
            layer.weight_packed, layer.weight_scale, factor.reshape(1), out_dtype=torch.float32
        )
    else:
        got = kernelhub.dequantize_mxfp4(layer.weight_packed, layer.weight_scale, out_dtype=torch.float32)
    want = drawn["qkv_proj.weight"].float()
    assert (got - want).norm() < 0.13 * want.norm()
    assert (got - want).abs().max() < 0.25 * want.abs().max()


def test_commands_take_turns(bench, tmp_path) -> None:
    folder = tmp_path / "turns"
    with bench.turn(None), bench.turn(f"{folder}:1:{time.time() + 60}"):
        assert [path.suffix for path in folder.glob("*.started")] == [".started"]
        with pytest.raises(BlockingIOError), (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    began = time.monotonic()
    with bench.turn(f"{folder}:99:{time.time() + 0.3}"), bench.turn(f"{folder}-other:never:{time.time()}"):
        assert 0.2 < time.monotonic() - began < 30


def test_the_classes_that_serve_quantised_layers_are_counted(bench) -> None:
    model = torch.nn.Module()
    model.one, model.other, model.plain = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    model.one.scheme = SimpleNamespace(kernel=pytest)
    model.other.quant_method = SimpleNamespace(fp8_linear=Path())
    assert bench.linear_kernels([model]) == {"module": 1, type(Path()).__name__: 1}


def test_the_recorded_runs_are_shown_without_those_of_other_benchmarks(bench) -> None:
    recorded = json.loads((Path(bench.__file__).parent / "results" / "vllm_h200.json").read_text())
    shown = bench.show(recorded).splitlines()
    named = [line.partition(" | ")[0] for line in shown[1:] if not line.startswith(" ")]
    assert named[0] == "first machine: llama8b-CUSTOM-first"
    assert not any("nano-vllm" in name for name in named)
