"""CUTLASS's attention of FlashInfer keeps the contracts of the ops, with a model that has the library's conventions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.cases import largest_value as largest_of_attention
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import MLA, AttentionModel
from tests.backends.fake import flashinfer_cutlass as fake
from tests.backends.test_flashinfer import Latent, OnFake
from tests.contract.attention import DenseContract, split

RAGGED, LATENT = "flashinfer.cutlass_ragged", "flashinfer.mla_cutlass"
SCALE = MLA["deepseek-v3"].scale
PLAN = fake._plan
YARN = (1 + 0.1 * math.log(40)) ** 2  # what DeepSeek-V3 multiplies the factor of scores by, for 128K tokens


class TestRagged(OnFake, DenseContract):
    kernel = RAGGED


class TestPrefill(OnFake):
    def check(self, arguments: dict[str, Any], got: torch.Tensor) -> None:
        args, kwargs = split(arguments)
        want = kernelhub.attention.reference(*args, **kwargs)
        agreement = compare_out(got, want, largest_of_attention(arguments))
        assert agreement.ok, str(agreement)

    @pytest.mark.parametrize("causal", [False, True])
    def test_tables_are_as_large_as_the_tiles_are_many(self, causal) -> None:
        """The library's own hold 131072, and what does not fit is written behind them."""
        model = AttentionModel("many tiles", 256, 256, 64, 64)
        lengths = (*[1] * 520, 300)
        arguments = attention_inputs(model, q_lens=lengths, kv_lens=lengths) | {"causal": causal}
        assert sum(-(-length // 256) for length in lengths) * 256 > 131072
        self.check(arguments, kernelhub.attention(**arguments, backend=RAGGED))

    def test_keys_of_sequences_without_queries_are_left_out(self) -> None:
        model = AttentionModel("gaps", 4, 2, 192, 128)
        for causal in (False, True):
            arguments = attention_inputs(model, q_lens=(3, 0, 40, 2, 0), kv_lens=(0, 9, 30, 50, 7)) | {"causal": causal}
            out = torch.full((45, 4, 128), torch.nan, dtype=torch.bfloat16)
            assert kernelhub.attention(**arguments, backend=RAGGED, out=out) is out
            self.check(arguments, out)
            self.check(arguments, kernelhub.attention(**arguments, backend=RAGGED))

    def test_queries_that_see_nothing_have_an_lse_of_minus_infinity(self) -> None:
        arguments = attention_inputs(AttentionModel("blind", 2, 2, 64, 64), q_lens=(5, 3, 2), kv_lens=(2, 0, 300))
        arguments["causal"] = True
        out, lse = kernelhub.attention(**arguments, backend=RAGGED, return_lse=True)
        seen = torch.tensor([False] * 3 + [True] * 2 + [False] * 3 + [True] * 2)
        assert torch.equal(lse.isneginf(), ~seen.expand(2, -1))
        assert torch.equal((out == 0).all(2).all(1), ~seen)
        assert lse[:, seen].isfinite().all()

    def test_tokens_of_no_sequence_are_left_as_they_are(self) -> None:
        arguments = attention_inputs(AttentionModel("packed", 4, 4, 128, 128), q_lens=(3, 40), kv_lens=(9, 50))
        want = kernelhub.attention(**arguments, backend=RAGGED)
        longer = arguments | {"q": torch.cat([arguments["q"], arguments["q"][:4]])}
        out = torch.full((47, 4, 128), 7.0, dtype=torch.bfloat16)
        kernelhub.attention(**longer, out=out, backend=RAGGED)
        assert (out[-4:] == 7.0).all()
        assert torch.equal(out[:-4], want)
        assert torch.equal(kernelhub.attention(**longer, backend=RAGGED)[:-4], want)

    def test_what_follows_the_last_sequence_may_be_anything(self) -> None:
        arguments = attention_inputs(AttentionModel("packed", 4, 4, 128, 128), q_lens=(3, 40), kv_lens=(9, 50))
        want = kernelhub.attention(**arguments, backend=RAGGED)
        for name in ("k", "v"):
            arguments[name] = torch.cat([arguments[name], torch.full_like(arguments[name][:5], torch.nan)])
        assert torch.equal(kernelhub.attention(**arguments, backend=RAGGED), want)

    def test_a_result_that_is_returned_has_no_more_elements_than_it_shows(self) -> None:
        arguments = attention_inputs(AttentionModel("batch", 2, 2, 64, 64), batch=2, q_tokens=20, kv_tokens=30)
        out = kernelhub.attention(**arguments, backend=RAGGED)
        assert out.is_contiguous()
        assert out.shape == arguments["q"].shape
        out += 1  # it is nobody else's
        assert torch.equal(out, kernelhub.attention(**arguments, backend=RAGGED) + 1)

    def test_a_sequence_whose_results_an_int_cannot_count_is_refused_before_a_launch(self, monkeypatch) -> None:
        from kernelhub.backends.flashinfer.cutlass import ragged

        monkeypatch.setattr(ragged, "_MOST_ELEMENTS", 40 * 4 * 128)
        model = AttentionModel("long", 4, 4, 128, 128)
        assert (
            kernelhub.attention(**attention_inputs(model, q_lens=(39, 39), kv_lens=(39, 50)), backend=RAGGED)
            is not None
        )
        arguments = attention_inputs(model, q_lens=(3, 40), kv_lens=(9, 50))
        with pytest.raises(InvalidArgument, match="at most 39 queries of a sequence at once") as told:
            kernelhub.attention(**arguments, backend=RAGGED)
        assert told.value.parameter == "q"

    def test_layers_of_a_step_share_a_plan_made_from_lengths_on_the_host(self, monkeypatch) -> None:
        plans = []
        monkeypatch.setattr(fake, "_plan", lambda *args: plans.append(args) or PLAN(*args))
        arguments = attention_inputs(AttentionModel("packed", 4, 4, 128, 128), q_lens=(3, 40), kv_lens=(9, 50))
        args, kwargs = split(arguments)
        plan = kernelhub.attention.prepare(*args, backend=RAGGED, **kwargs)
        assert plan.reads_lengths
        assert plan.graph.name == "NONE"
        offsets = [kwargs[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        step = plan.begin(*offsets, cu_seqlens_q_cpu=offsets[0], cu_seqlens_k_cpu=offsets[1])
        assert len(plans) == 1
        for _ in range(3):
            self.check(arguments, step.run(*args))
        assert len(plans) == 1

    def test_what_it_takes_of_the_device_is_reported(self) -> None:
        args, kwargs = split(attention_inputs(AttentionModel("packed", 4, 4, 192, 128), q_lens=(3,), kv_lens=(9,)))
        plan = kernelhub.attention.prepare(*args, backend=RAGGED, **kwargs)
        tiles = 12 * (512 // 256 + 2) * 4
        assert plan.adapter.workspace_bytes(2, 512, 512) == (2 * 512 + 128) * 4 * 128 * 2 + tiles + (32 << 20)

    @pytest.mark.parametrize(
        "facets",
        [
            {"head_dim_qk": 256, "head_dim_vo": 256},
            {"head_dim_qk": 192, "head_dim_vo": 192},
            {"q_dtype": "float32", "kv_dtype": "float32"},
            {"window_left": True},
            {"softcap": True},
            {"sinks": True},
        ],
        ids=str,
    )
    def test_what_it_does_not_do_is_refused(self, facets) -> None:
        facets = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim_qk": 128} | facets
        assert kernelhub.explain("attention", device="cpu", backend=RAGGED, **facets).selected is None


class TestLatent(Latent):
    kernel = LATENT
    page_sizes = (1, 3, 16, 64, 256)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_both_halves(self, dtype) -> None:
        arguments = self.case(seq_lens=(40, 129, 0))
        for name in ("q", "kv_cache"):
            arguments[name] = arguments[name].to(dtype)
        self.check(self.run(arguments), arguments)

    @pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1, 1e-4, SCALE * YARN, -SCALE, SCALE / 8])
    def test_the_scale_may_have_any_sign(self, scale) -> None:
        """Queries are as long as they would be in a model that has this factor."""
        arguments = self.case(seq_lens=(400, 9)) | {"scale": scale}
        if scale:
            arguments["q"] = (arguments["q"].float() * (SCALE / scale)).to(arguments["q"].dtype)
        self.check(self.run(arguments), arguments)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("deviation", [1.0, 2.0, 4.0])
    def test_rounding_q_once_more_stays_within_the_contract_for_scores_up_to_some_20(self, deviation, dtype) -> None:
        from kernelhub.backends.flashinfer.cutlass.latent import factor_of_q

        arguments = self.case(seq_lens=(500, 3, 130)) | {"scale": SCALE * YARN}
        for name in ("q", "kv_cache"):
            arguments[name] = arguments[name].to(dtype)
        arguments["q"] = arguments["q"] * (deviation / 2 / YARN)  # of inputs it is 2
        assert factor_of_q(arguments["scale"]) == pytest.approx(YARN)
        self.check(self.run(arguments), arguments)

    @pytest.mark.parametrize("power", [-12, -1, 0, 1, 5])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_power_of_two_in_the_scale_rounds_nothing(self, sign, power) -> None:
        arguments = self.case(seq_lens=(40, 9))
        want = self.run(arguments)
        moved = arguments | {"q": arguments["q"] * (sign * 2.0**-power), "scale": sign * SCALE * 2.0**power}
        assert torch.equal(self.run(moved), want)
        told_by_float32 = float(torch.tensor(moved["scale"], dtype=torch.float32))
        assert torch.equal(self.run(moved | {"scale": told_by_float32}), want)

    def test_pages_that_lie_apart_are_read_where_they_are(self) -> None:
        arguments = self.case(seq_lens=(40, 90), page_size=16)
        cache = arguments["kv_cache"]
        layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
        layers[:, 1] = cache
        fake.LATENT_CALLS.clear()
        self.check(self.run(arguments | {"kv_cache": layers[:, 1]}), arguments)
        ((read, _),) = fake.LATENT_CALLS
        assert read.data_ptr() == layers[:, 1].data_ptr(), "a cache is not copied"

    def test_what_the_table_holds_behind_a_sequence_may_be_anything(self) -> None:
        arguments = self.case(seq_lens=(40, 0, 200), page_size=16)
        want = self.run(arguments)
        table, lengths = arguments["block_table"], arguments["seq_lens"]
        behind = torch.arange(table.shape[1]) * 16 >= lengths[:, None]
        for foreign in (-1, 1 << 30, -(1 << 31)):
            assert torch.equal(self.run(arguments | {"block_table": table.masked_fill(behind, foreign)}), want)

    def test_metadata_may_have_any_strides(self) -> None:
        arguments = self.case(seq_lens=(40, 0, 200, 128), page_size=64)
        want = self.run(arguments)
        table, lengths = arguments["block_table"], arguments["seq_lens"]
        columns = {"block_table": table.t().contiguous().t(), "seq_lens": lengths.repeat_interleave(2)[::2]}
        assert not columns["block_table"].is_contiguous()
        for name, tensor in columns.items():
            assert torch.equal(self.run(arguments | {name: tensor}), want)

    def test_a_cache_or_table_of_no_pages_gives_zeros(self) -> None:
        arguments = self.case(seq_lens=(0, 0))
        nothing = {"kv_cache": arguments["kv_cache"][:0]}, {"block_table": arguments["block_table"][:, :0]}
        for change in nothing:
            assert not self.run(arguments | change).any()

    @pytest.mark.parametrize(
        "facets",
        [
            {"lse": True},
            {"q_dtype": "float32", "kv_dtype": "float32"},
            {"kv_dtype": "float8_e4m3fn", "kv_scale": "value"},
            {"sinks": True},
            {"ragged": True, "q_len": "any"},
            {"sparse": True},
            {"q_len": "few"},
            {"num_heads": 64},
            {"num_heads": 256},
            {"head_dim": 320, "value_dim": 256},
        ],
        ids=str,
    )
    def test_what_it_does_not_do_is_refused(self, facets) -> None:
        assert kernelhub.explain("mla_attention", device="cpu", backend=self.kernel, **facets).selected is None


def test_the_library_s_model_would_show_what_the_adapters_avoid() -> None:
    """Each of the library's silent errors, as the model of it tells them."""
    q = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    table = torch.empty(4, dtype=torch.int32)
    plan = (torch.empty(2, dtype=torch.int32), table, table.clone(), table.clone())
    fake._plan(ends, ends, *plan, 256, 2, 1, False)
    given: dict[str, Any] = {"plan_info": plan, "max_qo_len": 3, "sm_scale": 0.1}
    with pytest.raises(AssertionError, match="rows before the result"):
        fake.fmha_varlen(q, q, q, ends, ends, out=torch.empty_like(q), **given)
    with pytest.raises(AssertionError, match="memory behind the table"):
        fake._plan(ends, ends, plan[0], *(entries[:1] for entries in plan[1:]), 256, 2, 1, False)
