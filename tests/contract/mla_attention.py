"""What every kernel of `mla_attention` must do beside the op's cases. Subclass `MlaContract` and name the kernel.

Inputs are poisoned: caches hold NaN wherever no sequence is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MlaModel
from kernelhub.testing import OpContract
from tests.conftest import DEVICE, HAS_GPU

FP8 = torch.float8_e4m3fn
METADATA = ("block_table", "seq_lens")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a test below, by what is unusual about it; `widths` are those of the latent and the rotary part."""

    label: str
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    heads: int = 5
    widths: tuple[int, int] = (64, 16)
    dtype: torch.dtype = torch.bfloat16
    kv_scale: str | None = None
    causal: bool = True
    sinks: bool = False

    def __str__(self) -> str:
        return self.label

    def arguments(self, device: str) -> dict[str, Any]:
        """The call's arguments."""
        model = MlaModel(self.label, self.heads, *self.widths)
        inputs = {"seq_lens": (40, 1, 77), "page_size": 16, "dtype": self.dtype} | self.inputs
        made = mla_attention_inputs(model, kv_dtype=None if self.kv_scale is None else FP8, device=device, **inputs)
        if not self.causal:
            made["causal"] = False
        if self.sinks:
            made["sinks"] = torch.linspace(-1, 4, self.heads, device=device, dtype=self.dtype)
        if self.kv_scale == "tensor":
            made["kv_scale"] = torch.tensor([made["kv_scale"] * 0.75], device=device)
        return made


DECODE: dict[str, Any] = {}
UNIFORM = {"seq_lens": (40, 5, 77), "q_lens": 4}
RAGGED = {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)}
PLAIN, SEVERAL = Case("plain"), Case("several queries", UNIFORM)
SPARSE = Case("sparse", UNIFORM | {"topk": 9})
STRIDED = (PLAIN, SEVERAL, SPARSE, dataclasses.replace(SPARSE, label="sparse, scaled by a number", kv_scale="value"))


class MlaContract(OpContract):
    """The contract of one kernel.

    Attributes:
        fewest_cases: of the op's, that its record supports.
        widths: for a kernel of one shape, in the place of those of a call below.
        page_size: likewise.
        heads: likewise.
        lists_all: for a kernel of listed tokens: a call that lists none lists all of them.
        kv_scale: for a kernel of float8 alone: how the scale of a call below arrives that has none.
    """

    op = "mla_attention"
    device = DEVICE
    most_elements = None if HAS_GPU else 150_000  # without DeepSeek's latents
    fewest_cases: ClassVar[int]
    widths: ClassVar[tuple[int, int] | None] = None
    page_size: ClassVar[int | None] = None
    heads: ClassVar[int | None] = None
    lists_all: ClassVar[bool] = False
    kv_scale: ClassVar[str | None] = None

    @classmethod
    def record(cls) -> Kernel:
        _ = HUB.settings
        return next(k for k in HUB.registry.candidates("mla_attention").kernels if k.name == cls.kernel)

    @classmethod
    def inputs(cls, case: Case) -> dict[str, Any]:
        more = {name: case.inputs[name] for name in ("max_seqlen_q",) if name in case.inputs}
        rest = {name: value for name, value in case.inputs.items() if name not in more}
        rest |= {} if cls.page_size is None else {"page_size": cls.page_size}
        shape = {"widths": cls.widths or case.widths, "heads": cls.heads or case.heads}
        shape["kv_scale"] = case.kv_scale or cls.kv_scale
        made = dataclasses.replace(case, inputs=rest, **shape).arguments(cls.device) | more
        if cls.lists_all and "topk_indices" not in made:
            every = torch.arange(int(made["seq_lens"].max()), dtype=torch.int32, device=cls.device)
            made["topk_indices"] = every.expand(*made["q"].shape[:-2], -1)
        return made

    @classmethod
    def takes(cls, arguments: dict[str, Any]) -> bool:
        return bool(cls.selection(arguments).selected == cls.kernel)

    @classmethod
    def taken(cls, *wanted: Case) -> list[dict[str, Any]]:
        """The arguments of those cases that the record takes."""
        made = [arguments for arguments in map(cls.inputs, wanted) if cls.takes(arguments)]
        if not made:
            pytest.skip(f"{cls.kernel} takes none of {', '.join(map(str, wanted))}")
        return made

    @classmethod
    def selection(cls, arguments: dict[str, Any]) -> Any:
        return kernelhub.mla_attention.explain(**arguments, backend=cls.kernel)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.mla_attention(**(arguments | more), backend=self.kernel)

    def check(self, got: Any, arguments: dict[str, Any]) -> None:
        """Compare a result, with or without LSE, with the reference in float64."""
        reference = kernelhub.mla_attention.reference
        want, want_lse = reference(**arguments, return_lse=True, compute_dtype=torch.float64)
        out, lse = got if isinstance(got, tuple) else (got, None)
        assert out.shape == want.shape
        agreement = compare_out(out, want, largest_value(arguments))
        assert agreement.ok, str(agreement)
        if lse is not None:
            assert lse.shape == want_lse.shape
            assert lse.dtype is torch.float32
            assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    def test_takes_enough_cases(self) -> None:
        assert len(self.accepted_cases()) >= self.fewest_cases

    def test_without_out_and_lse_the_result_is_the_same(self) -> None:
        for arguments in self.taken(PLAIN, SEVERAL, Case("ragged", RAGGED), SPARSE):
            out = self.run(arguments)
            assert out.is_contiguous()
            assert torch.equal(out, self.run(arguments, return_lse=True)[0])
            self.check(out, arguments)

    def test_every_feature_changes_the_result(self) -> None:
        (arguments,) = self.taken(SEVERAL)
        plain = self.run(arguments)
        sparse = self.inputs(dataclasses.replace(SEVERAL, inputs=UNIFORM | {"topk": 9}))["topk_indices"]
        sinks = torch.linspace(-1, 4, arguments["q"].shape[-2], device=self.device)
        for change in ({"causal": False}, {"topk_indices": sparse}, {"sinks": sinks}, {"scale": 0.3}):
            if not self.takes(arguments | change):
                continue
            changed = self.run(arguments | change)
            assert (changed - plain).abs().max() > 0.05, f"{list(change)} changes nothing"
            self.check(changed, arguments | change)

    def test_the_scale_of_an_fp8_cache_scales_scores_and_values(self) -> None:
        for kv_scale in ("value", "tensor"):
            (arguments,) = self.taken(dataclasses.replace(SEVERAL, kv_scale=kv_scale))
            for factor in (0.5, 3.0):
                scaled = arguments | {"kv_scale": arguments["kv_scale"] * factor}
                self.check(self.run(scaled), scaled)

    def test_the_scale_may_have_any_sign(self) -> None:
        for made in self.taken(SEVERAL, dataclasses.replace(SEVERAL, kv_scale="value")):
            for scale in (-0.3, 0.0, 1):
                arguments = made | {"scale": scale}
                self.check(self.run(arguments), arguments)

    def test_queries_may_be_larger_than_half_precision_holds(self) -> None:
        for arguments in self.taken(SEVERAL, dataclasses.replace(SEVERAL, kv_scale="value")):
            arguments["q"] = arguments["q"] * 1e30
            arguments["scale"] = 1e-31
            self.check(self.run(arguments), arguments)

    def test_positions_that_a_query_does_not_see_are_passed_over(self) -> None:
        (arguments,) = self.taken(Case("sparse", UNIFORM | {"topk": 30}))
        want = self.run(arguments)
        listed = arguments["topk_indices"]
        nothing = torch.full_like(listed, -1)
        lengths = arguments["seq_lens"].view(-1, 1, 1)
        foreign = torch.cat([listed, lengths.expand_as(listed), nothing - 7, nothing + (1 << 30)], 2)
        self.check(self.run(arguments | {"topk_indices": foreign}), arguments)
        shuffled = listed.flip(2)
        assert (self.run(arguments | {"topk_indices": shuffled}) - want).abs().max() <= 2.0**-6
        later = listed.clone()
        later[:, 0] = torch.where(listed[:, 0] < 0, lengths[:, 0] - 1, listed[:, 0])  # later than the first of four
        self.check(self.run(arguments | {"topk_indices": later}), arguments)

    def test_all_positions_are_the_whole_sequence(self) -> None:
        self.taken(Case("sparse", UNIFORM | {"topk": 30}))
        for form in (DECODE, UNIFORM, RAGGED):
            arguments = self.inputs(Case("dense", form))
            every = torch.arange(80, dtype=torch.int32, device=self.device).expand(*arguments["q"].shape[:-2], 80)
            got = self.run(arguments | {"topk_indices": every}, return_lse=True)
            self.check(got, arguments)

    @pytest.mark.parametrize("strided", STRIDED, ids=str)
    def test_operands_may_have_any_strides(self, strided: Case) -> None:
        """A test for each case: a kernel may be compiled three times for one, which takes 10 s each for the slowest."""
        (arguments,) = self.taken(strided)
        want, want_lse = self.run(arguments, return_lse=True)
        for layout in (_sliced, _transposed, _spread, _moved):
            moved = arguments | {name: layout(arguments[name]) for name in ("q", "kv_cache", "block_table")}
            if "topk_indices" in moved:
                moved["topk_indices"] = layout(moved["topk_indices"])
            out = layout(torch.full_like(want, torch.nan))
            got, lse = self.run(moved, out=out, return_lse=True)
            assert got is out
            self.check((out, lse), arguments)
            new = self.run(moved)
            assert new.is_contiguous()
            assert torch.equal(new, out)
        headed = arguments | {"kv_cache": arguments["kv_cache"].unsqueeze(2)}
        assert torch.equal(self.run(headed), want)
        assert torch.equal(self.run(headed, return_lse=True)[1], want_lse)

    def test_tables_hold_anything_behind_a_sequence(self) -> None:
        (arguments,) = self.taken(Case("empty and not", {"seq_lens": (40, 0, 77)}))
        want, table = self.run(arguments), arguments["block_table"]
        for garbage in (2**31 - 1, -(2**31)):
            filled = torch.where(table < 0, garbage, table).T.contiguous().T
            assert torch.equal(self.run(arguments | {"block_table": filled}), want)

    def test_no_tokens_give_an_empty_result(self) -> None:
        (arguments,) = self.taken(PLAIN)
        for name in ("q", *METADATA, "topk_indices"):
            if name in arguments:
                arguments[name] = arguments[name][:0]
        heads = arguments["q"].shape[-2]
        out, lse = self.run(arguments, return_lse=True)
        assert (tuple(out.shape), tuple(lse.shape)) == ((0, heads, arguments["value_dim"]), (heads, 0))

    def test_tokens_past_the_last_offset_are_left_alone(self) -> None:
        for arguments in self.taken(*(Case("ragged", RAGGED | {"topk": topk}) for topk in (None, 9))):
            want = self.run(arguments)
            longer = {
                name: torch.cat([arguments[name], arguments[name][:3]])
                for name in ("q", "topk_indices")
                if name in arguments
            }
            out = torch.full((len(want) + 3, *want.shape[1:]), -777.0, dtype=want.dtype, device=self.device)
            self.run(arguments | longer, out=out)
            assert (out[-3:] == -777.0).all()
            self.check(out[:-3], arguments)

    def test_writes_nothing_past_its_output(self) -> None:
        (arguments,) = self.taken(PLAIN)
        want = self.run(arguments)
        guarded = torch.full((want.shape[0] + 2, *want.shape[1:]), -777.0, dtype=want.dtype, device=self.device)
        self.run(arguments, out=guarded[1:-1])
        assert torch.equal(guarded[1:-1], want)
        assert (guarded[0] == -777.0).all()
        assert (guarded[-1] == -777.0).all()

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        rich = Case("rich", RAGGED | {"topk": 9}, sinks=True)
        for arguments in self.taken(PLAIN, rich, dataclasses.replace(rich, kv_scale="value")):
            want, want_lse = self.run(arguments, return_lse=True)
            plan = kernelhub.mla_attention.prepare(**arguments, return_lse=True, backend=self.kernel)
            assert plan.kernel == self.kernel
            operands = [arguments[name] for name in ("q", "kv_cache", *METADATA)]
            offsets, listed = arguments.get("cu_seqlens_q"), arguments.get("topk_indices")
            for got, wanted in zip(plan.run(*operands, offsets, topk_indices=listed), (want, want_lse), strict=True):
                assert torch.equal(got, wanted)
            step = plan.begin(*operands[2:], offsets)
            out = torch.full_like(want, torch.nan)
            got, lse = step.run(*operands[:2], listed, out=out)
            assert got is out
            assert torch.equal(out, want)
            assert torch.equal(lse, want_lse)

    def test_a_plan_refuses_what_it_is_not_for(self) -> None:
        (arguments,) = self.taken(PLAIN)
        plan = kernelhub.mla_attention.prepare(**arguments, backend=self.kernel)
        step = plan.begin(*(arguments[name] for name in METADATA))
        q, kv_cache = arguments["q"], arguments["kv_cache"]
        listed = arguments.get("topk_indices")
        other = () if listed is not None else (torch.zeros(3, 4, dtype=torch.int32, device=self.device),)
        for wrong, parameter in (
            ((q[..., :-1], kv_cache), "q"),
            ((q[:, 1:], kv_cache), "q"),
            ((q.float(), kv_cache), "q"),
            ((q, kv_cache[..., :-1]), "kv_cache"),
            ((q, kv_cache[:, 1:]), "kv_cache"),
            ((q, kv_cache.float()), "kv_cache"),
            ((q, kv_cache, *other), "topk_indices"),
        ):
            if listed is not None and parameter != "topk_indices":
                wrong = (*wrong, listed)
            with pytest.raises(InvalidArgument) as caught:
                step.run(*wrong)
            assert caught.value.parameter == parameter

    def test_the_same_call_gives_the_same_bits(self) -> None:
        assert self.record().deterministic or not self.claims_determinism
        if self.record().deterministic:
            (arguments,) = self.taken(Case("long", {"seq_lens": (700, 300), "page_size": 64}, sinks=True))
            first = self.run(arguments)
            assert all(torch.equal(self.run(arguments), first) for _ in range(3))

    claims_determinism: ClassVar[bool] = False


def largest_value(arguments: dict[str, Any]) -> float:
    """Largest element of a latent, scaled."""
    latents = arguments["kv_cache"][..., : arguments["value_dim"]].float().nan_to_num()
    return float(latents.abs().max()) * float(arguments.get("kv_scale", 1.0))


def _sliced(tensor: Tensor) -> Tensor:
    """A part of a wider tensor."""
    wide = tensor.new_zeros((*tensor.shape[:-2], tensor.shape[-2] + 3, tensor.shape[-1]))
    wide[..., 1:-2, :] = tensor
    return wide[..., 1:-2, :]


def _transposed(tensor: Tensor) -> Tensor:
    """The last dimension but one outermost in memory."""
    return tensor.transpose(0, -2).contiguous().transpose(0, -2)


def _spread(tensor: Tensor) -> Tensor:
    """Every second element of a row."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _moved(tensor: Tensor) -> Tensor:
    """Without gaps, one element past an aligned address."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    longer = raw.new_zeros(raw.numel() + 1)
    longer[1:] = raw.flatten()
    return longer[1:].view(tensor.dtype).view(tensor.shape)
