"""The reference of latent attention against other ways to say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MLA, MlaModel

SMALL = MlaModel("small", 3, 32, 16, qk_nope_head_dim=24)
FORMS: dict[str, dict[str, Any]] = {
    "decode": {"seq_lens": (40, 1, 0, 77)},
    "uniform": {"seq_lens": (40, 5, 77), "q_lens": 4},
    "ragged": {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)},
}


def inputs(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(SMALL, **{"dtype": torch.float32, "page_size": 16} | changes)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_paged_attention_with_one_kv_head(form, sinks, dtype) -> None:
    arguments = inputs(**form)
    shared = {"sinks": torch.linspace(-1, 2, 3) if sinks else None, "return_lse": True, "compute_dtype": dtype}
    got = kernelhub.mla_attention.reference(**arguments, **shared)
    keys = arguments.pop("kv_cache").unsqueeze(2)
    q, value_dim = arguments.pop("q"), arguments.pop("value_dim")
    want = kernelhub.paged_attention.reference(q, keys, keys[..., :value_dim], **arguments, **shared)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-12)


def test_float32_is_near_float64() -> None:
    for form in FORMS.values():
        arguments = inputs(**form, topk=20)
        single = kernelhub.mla_attention.reference(**arguments)
        double = kernelhub.mla_attention.reference(**arguments, compute_dtype=torch.float64)
        assert (single - double).abs().max() < 1e-5


def test_absorption_changes_nothing() -> None:
    """Queries and output that went through the up-projections are attention over keys and values that did."""
    random = torch.Generator().manual_seed(0)
    tokens, heads, nope, rope, latent, value = 20, 3, 24, 16, 32, 10

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q_nope, q_rope, kv_c, k_rope = draw(1, heads, nope), draw(1, heads, rope), draw(tokens, latent), draw(tokens, rope)
    w_uk, w_uv = draw(heads, latent, nope) / latent**0.5, draw(heads, latent, value) / latent**0.5
    scale = (nope + rope) ** -0.5
    keys = kernelhub.concat_mla_k.reference(torch.einsum("tl,hln->thn", kv_c, w_uk), k_rope)
    values = torch.einsum("tl,hlv->thv", kv_c, w_uv)
    scores = torch.einsum("qhd,thd->hqt", torch.cat([q_nope, q_rope], 2), keys) * scale
    want = torch.einsum("hqt,thv->qhv", scores.softmax(2), values)

    absorbed = torch.cat([torch.einsum("qhn,hln->qhl", q_nope, w_uk), q_rope], 2)
    cache = torch.zeros(2, 16, latent + rope, dtype=torch.float64)
    cache = kernelhub.write_mla_cache.reference(kv_c, k_rope, cache, torch.arange(tokens))
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    latents = kernelhub.mla_attention.reference(
        absorbed, cache, table, length, scale=scale, value_dim=latent, compute_dtype=torch.float64
    )
    torch.testing.assert_close(torch.einsum("qhl,hlv->qhv", latents, w_uv), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_listed_positions_are_attended_to_alone(form) -> None:
    arguments = inputs(**form, topk=6)
    got = kernelhub.mla_attention.reference(**arguments, compute_dtype=torch.float64)
    rows, listed = arguments["q"].flatten(0, -3).double(), arguments["topk_indices"].reshape(-1, 6)
    owners = [i for i, n in enumerate(_queries(form)) for _ in range(n)]
    for row, (owner, positions) in enumerate(zip(owners, listed, strict=True)):
        positions = positions[positions >= 0].long()
        if len(positions):
            pages = arguments["block_table"][owner, positions // 16].long()
            keys = arguments["kv_cache"][pages, positions % 16].double()
            want = torch.softmax(rows[row] @ keys.T * arguments["scale"], 1) @ keys[:, :32]
        else:
            want = torch.zeros(3, 32, dtype=torch.float64)
        torch.testing.assert_close(got.flatten(0, -3)[row], want, rtol=0, atol=1e-12)


def _queries(form: dict[str, Any]) -> list[int]:
    q_lens = form.get("q_lens", 1)
    return [q_lens] * len(form["seq_lens"]) if isinstance(q_lens, int) else list(q_lens)


def test_the_scale_of_a_model_is_that_of_its_heads_before_absorption() -> None:
    assert MLA["deepseek-v3"].scale == 192**-0.5
    assert MLA["glm-5"].scale == 256**-0.5
