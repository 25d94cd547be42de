"""How far logits may be from the reference, and why. `topk_indices` is exact.

With size(t, s) = |k_scale[s]| sum_h |weights[t, h]| |q[t, h]| . |k[s]|, absolute values element by element:

* A sum of n terms in float32, in any order and with each product rounded, is off by at most (n + 1) 2^-24 of the sum of
  the terms' sizes. A score is such a sum of D terms, a logit of H scores times weights, then times a scale: no logit
  is off by more than (D + H + 4) 2^-24 size(t, s). A relu makes no error larger.
* Tensor cores of sm_89 and newer multiply float8 with sums that keep 13 bits below the largest of the 32 products of an
  instruction and the sum so far. Each of the 33 loses less than 2^-13 of the largest, which for bell-shaped numbers is
  less than 8 times their mean: together less than 2^-10 of the sum of the products' sizes, and the sums so far,
  D / 32 of them and none larger than that, less than D 2^-18 of it. For D up to 128 that makes 2^-9; it is
  (2^-10 + D 2^-17) in general.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error_allowed(num_heads: int, head_dim: int, *, float8_products: bool) -> float:
    """The factor of size(t, s).

    Args:
        num_heads: of the indexer.
        head_dim: width of a head.
        float8_products: q and k are float8 and on a GPU, whose tensor cores may multiply them as they are.
    """
    exact = (num_heads + head_dim + 4) * 2.0**-24
    return exact + (2.0**-10 + head_dim * 2.0**-17 if float8_products else 0.0)


def sizes(q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor) -> Tensor:
    """size(t, s) of `mqa_logits`, [T, S] in float64."""
    mixed = torch.einsum("th,thd->td", weights.double().abs(), q.double().abs())
    size = mixed @ k.double().abs().T
    return size if k_scale is None else size * k_scale.double().abs()


def most_wrong(got: Tensor, want: Tensor, size: Tensor, allowed: float) -> str | None:
    """What is wrong with logits, as a sentence, or None: -inf exactly where it belongs, the rest within the bound."""
    unseen = want == -torch.inf
    if not torch.equal(got == -torch.inf, unseen):
        return f"-inf differs at {int(((got == -torch.inf) != unseen).sum())} places"
    error = torch.where(unseen, 0.0, (got.double() - torch.where(unseen, 0.0, want)).abs())
    excess = error - allowed * size
    if not bool((excess <= 0).all()):  # NaN is no agreement
        worst = int(excess.nan_to_num(nan=torch.inf).argmax())
        return (
            f"off by {float(error.flatten()[worst]):.3g} where {allowed * float(size.flatten()[worst]):.3g} is allowed"
        )
    return None
