"""Cases of `attention` and `paged_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.problem import ONE, QUANTISED
from kernelhub.ops.attention.softmax_cases import AttendingCases, padded
from kernelhub.ops.case import Arguments, Case, Make
from kernelhub.ops.models.shapes import AttentionModel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTHS = tuple(
    AttentionModel(f"{width} x {value}", 4, 1, width, value)
    for width, value in ((32, 32), (72, 72), (80, 80), (96, 96), (112, 112), (192, 128), (192, 192), (256, 256))
)
TOKENS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 129)

# One way to request each feature that changes numbers, with values whose omission changes the result; beside the value
# are the arguments that both calls share.
FEATURES: dict[str, tuple[Arguments, Arguments]] = {
    "causal": ({"causal": True}, {}),
    "window_left": ({"window": (5, -1)}, {}),
    "window_left, causal": ({"window": (5, -1)}, {"causal": True}),
    "window_right": ({"window": (-1, 3)}, {}),
    "softcap": ({"softcap": 1.5}, {}),
    "softcap, causal": ({"softcap": 1.5}, {"causal": True}),
    "sinks": ({"sinks": True}, {}),
    "sinks, causal": ({"sinks": True}, {"causal": True}),
    "scale": ({"scale": 0.3}, {}),
    "scale, causal": ({"scale": 0.3}, {"causal": True}),
}
KV_SCALES = ("value", "tensor", "head")
OFF = ("ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse")  # facets that are off or on
NEUTRAL: Arguments = {"causal": False, "window": None, "softcap": None, "sinks": None}
# Sets of features for every form of a batch: of both models, and the larger sets of the first one.
ALONE: dict[str, Arguments] = {
    "causal": {"causal": True},
    "window_left": {"window": (5, -1)},
    "window_right": {"window": (-1, 3)},
    "both windows": {"window": (7, 2)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
}
TOGETHER: dict[str, Arguments] = {
    "causal, window_left": {"causal": True, "window": (5, -1)},
    "causal, both windows": {"causal": True, "window": (7, 2)},
    "causal, both windows, softcap": {"causal": True, "window": (7, 2), "softcap": 1.5},
    "causal, window_left, sinks": {"causal": True, "window": (5, -1), "sinks": True},
    "window_right, softcap": {"window": (-1, 3), "softcap": 1.5},
}


class _Attention(AttendingCases):
    """Shared by the cases of both ops."""

    generate: ClassVar[Any]
    several: ClassVar[Arguments]  # more than one query per sequence
    forms: ClassVar[dict[str, Arguments]]  # other forms of a batch
    models: ClassVar[tuple[AttentionModel, ...]] = (
        AttentionModel("small", 6, 2, 64, 64),
        AttentionModel("wide", 8, 2, 128, 128),
    )

    def make(
        self,
        inputs: Arguments,
        more: Arguments | None = None,
        model: AttentionModel | None = None,
        kv_scale: str | None = None,
        factor: float = 1.0,
        quantised: torch.dtype = FP8,
    ) -> Make:
        """Arguments from inputs of the generator and others of the op, causal unless they say otherwise."""

        def made(device: torch.device) -> Arguments:
            shape = model or self.models[0]
            kv_dtype = quantised if kv_scale else None
            arguments: Arguments = type(self).generate(shape, device=device, kv_dtype=kv_dtype, **inputs)
            arguments |= {"causal": True} | (more or {})
            if arguments.get("sinks") is True:
                arguments["sinks"] = torch.linspace(-1, 4, shape.num_q_heads, device=device, dtype=arguments["q"].dtype)
            for name in ("k_scale", "v_scale") if kv_scale else ():
                heads = shape.num_kv_heads if kv_scale == "head" else 1
                spread = factor * torch.linspace(0.5, 1.5, heads, device=device, dtype=torch.float32)
                arguments[name] = arguments[name] * (factor if kv_scale == "value" else spread)
            return arguments

        return made

    def in_common(self) -> Iterator[Case]:
        """Cases that both ops have: every feature alone, forms of scales, extreme ones."""
        for model in self.models:
            for name, (feature, both) in FEATURES.items():
                base = NEUTRAL | both
                yield Case(
                    label=f"{name}, width {model.head_dim_qk}",
                    make=self.make(self.several, base | feature, model),
                    without=self.make(self.several, base, model),
                    feature=name.partition(",")[0],
                    quick=True,
                )
            for form in KV_SCALES:
                yield Case(
                    label=f"fp8, scales by {form}, width {model.head_dim_qk}",
                    make=self.make(self.several, None, model, form),
                    without=self.make(self.several, None, model, form, 4.0),
                    feature="k_scale, v_scale",
                    quick=model is self.models[0],
                )
            for dtype in (BF16, FP16, FP32):
                e5m2 = self.make(self.several | {"dtype": dtype}, None, model, "value", quantised=E5M2)
                yield Case(label=f"e5m2, {str(dtype)[6:]}, width {model.head_dim_qk}", make=e5m2, quick=dtype is BF16)
            for dtype in (BF16, FP16, FP32):
                label = f"{str(dtype)[6:]}, width {model.head_dim_qk}"
                plain = self.make(self.several | {"dtype": dtype}, None, model)
                yield Case(label=label, make=plain, quick=dtype is BF16, repeats=True)
                lse = self.make(self.several, {"return_lse": True}, model)
                yield Case(label=f"{label}, lse", make=lse, quick=dtype is BF16)
            yield Case(
                label=f"scale of zero, width {model.head_dim_qk}", make=self.make(self.several, {"scale": 0.0}, model)
            )
            yield Case(
                label=f"scale below zero, width {model.head_dim_qk}",
                make=self.make(self.several, {"scale": -0.3}, model),
            )
            yield Case(label=f"tiny scale, width {model.head_dim_qk}", make=self._tiny(model), quick=True)
        for shape in WIDTHS:
            yield Case(label=f"width {shape.name}", make=self.make(self.several, None, shape))
        for heads, kv_heads in ((4, 4), (5, 1), (16, 2), (32, 8)):
            shape = AttentionModel(f"{heads} / {kv_heads}", heads, kv_heads, 128, 128)
            yield Case(label=f"{heads} heads on {kv_heads}", make=self.make(self.several, None, shape))
        for scale in (-0.3, 0.0):
            make = self.make(self.several, {"scale": scale, "softcap": 1.5})
            yield Case(label=f"scale {scale:g}, softcap", make=make)
        yield Case(label="tiny scale, fp8", make=self._tiny(self.models[0], "value"))
        for form, inputs in self.forms.items():
            for name in ("window_left", "softcap", "sinks"):
                make = self.make(inputs, NEUTRAL | ALONE[name] | {"return_lse": True})
                yield Case(label=f"{form}, {name}, lse", make=make)
        for form, inputs in ({"several": self.several} | self.forms).items():
            for name, features in TOGETHER.items():
                if form in ("several", "ragged", "mixed") or "both windows" in name or "sinks" in name:
                    yield Case(label=f"{form}, {name}", make=self.make(inputs, NEUTRAL | features))

    def alone(self, form: str) -> Iterator[Case]:
        """Every feature alone in another form of a batch."""
        for model in self.models:
            for name, features in ALONE.items():
                make = self.make(self.forms[form], NEUTRAL | features, model)
                yield Case(label=f"{form}, {name} alone, width {model.head_dim_qk}", make=make)

    def with_lse(self, label: str, inputs: Arguments, more: Arguments | None = None) -> Iterator[Case]:
        """A call without and with LSE."""
        yield Case(label=label, make=self.make(inputs, more))
        yield Case(label=f"{label}, lse", make=self.make(inputs, (more or {}) | {"return_lse": True}))

    def _tiny(self, model: AttentionModel, kv_scale: str | None = None) -> Make:
        """Queries too large for half precision, and a scale that makes up for it."""
        plain = self.make(self.several, {"scale": 1e-31}, model, kv_scale)

        def made(device: torch.device) -> Arguments:
            arguments = plain(device)
            return arguments | {"q": arguments["q"] * 1e30}

        return made

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        value = arguments["v"] if "v" in arguments else arguments["v_cache"]
        return {"out": ((*arguments["q"].shape[:-1], value.shape[-1]), arguments["q"].dtype)}

    def wanted(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        want, lse = self.reference(**arguments | {"return_lse": True})
        return want, lse

    def largest_value(self, arguments: Arguments) -> float:
        return largest_value(arguments)

    def strided(self, make: Make, names: tuple[str, ...]) -> Make:
        """Operands as parts of wider tensors, heads before tokens in memory."""

        def made(device: torch.device) -> Arguments:
            arguments = make(device)
            moved = {name: arguments[name].transpose(-3, -2).contiguous().transpose(-3, -2) for name in names}
            return arguments | moved

        return made


def largest_value(arguments: Arguments) -> float:
    """Largest |v| that a sequence holds, scaled."""
    value = arguments["v"] if "v" in arguments else arguments["v_cache"]
    largest = float(value.float().nan_to_num().abs().max()) if value.numel() else 0.0
    scale = (
        arguments.get("v_scale") or 1.0 if not isinstance(arguments.get("v_scale"), Tensor) else arguments["v_scale"]
    )
    return largest * (float(scale.max()) if isinstance(scale, Tensor) else scale)


class AttentionCases(_Attention):
    """Cases of `attention`."""

    op = "attention"
    generate = staticmethod(attention_inputs)
    several: ClassVar[Arguments] = {"batch": 2, "q_tokens": 24, "kv_tokens": 40}
    ragged: ClassVar[Arguments] = {"q_lens": (17, 0, 33, 1), "kv_lens": (17, 5, 50, 0)}
    forms: ClassVar[dict[str, Arguments]] = {
        "ragged": ragged,
        "one query": {"batch": 3, "q_tokens": 1, "kv_tokens": 70},
    }

    def cases(self) -> Iterator[Case]:
        yield from self.in_common()
        for form in self.forms:
            yield from self.alone(form)
        for tokens in TOKENS:
            inputs = (
                {"batch": 1, "q_tokens": tokens, "kv_tokens": tokens + 33} if tokens else {"batch": 0, "q_tokens": 4}
            )
            for model in self.models:
                label = f"{tokens} tokens, width {model.head_dim_qk}"
                yield Case(label=label, make=self.make(inputs, None, model), tokens=True, quick=tokens in (0, 1, 2, 17))
        for model in self.models:
            ragged = self.make(self.ragged, None, model)
            yield Case(label=f"ragged, width {model.head_dim_qk}", make=ragged, quick=True, repeats=True)
            yield Case(label=f"ragged and padded, width {model.head_dim_qk}", make=_padded(ragged), quick=True)
            heads_first = self.strided(self.make(self.several, None, model), ("q", "k", "v"))
            yield Case(label=f"heads first in memory, width {model.head_dim_qk}", make=heads_first, quick=True)
            more = {"return_lse": True, "causal": False}
            yield Case(label=f"ragged, lse, width {model.head_dim_qk}", make=self.make(self.ragged, more, model))
            yield Case(label=f"long, width {model.head_dim_qk}", make=self.make({"q_tokens": 300}, None, model))
        no_keys = {"q_tokens": 5, "kv_tokens": 0}
        for sinks in (None, True):
            name = ", sinks" if sinks else ""
            more_queries = {"q_tokens": 30, "kv_tokens": 9}
            yield from self.with_lse(f"more queries than keys{name}", more_queries, {"sinks": sinks})
            yield from self.with_lse(f"no keys{name}", no_keys, {"causal": False, "sinks": sinks})
        yield Case(label="few queries", make=self.make({"batch": 2, "q_tokens": 4, "kv_tokens": 130}))
        narrow = AttentionModel("two heads on 1", 2, 1, 64, 64)
        for window in (None, (5, -1)):
            make = self.make({"q_tokens": 300}, {"window": window}, narrow)
            yield Case(label=f"long, two heads{', window_left' if window else ''}", make=make)


class PagedAttentionCases(_Attention):
    """Cases of `paged_attention`."""

    op = "paged_attention"
    generate = staticmethod(paged_attention_inputs)
    several: ClassVar[Arguments] = {"seq_lens": (40, 9, 77), "q_lens": 6}
    decode: ClassVar[Arguments] = {"seq_lens": (40, 1, 77)}
    mixed: ClassVar[Arguments] = {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)}
    forms: ClassVar[dict[str, Arguments]] = {"decode": decode, "mixed": mixed}
    formats = ("q_dtype", "kv_dtype", "head_dim_qk", "head_dim_vo")
    read = (*formats, "kv_scale", "q_len", *OFF, "kv_layout")
    # Ragged steps whose bound allows kernels for few queries: sequences without queries, or without keys.
    bounded: ClassVar[dict[str, tuple[Arguments, int]]] = {
        "one query each": ({"seq_lens": (40, 9, 177, 0, 3), "q_lens": (1, 1, 0, 1, 1)}, 1),
        "few queries each": ({"seq_lens": (40, 9, 177, 30, 3, 0), "q_lens": (1, 4, 0, 2, 5, 1)}, 6),
    }

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case has no feature that is not served, and its formats, as far as quick cases have them.

        Of quantised keys the cases in 16 bits count, too: empty sequences, strides and counts of them have no others.
        """
        width, own = ((each.head_dim_qk, each.head_dim_vo) for each in (served, of_case))
        if width != own and width in {(model.head_dim_qk, model.head_dim_vo) for model in self.models}:
            return False
        if of_case.q_dtype not in (served.q_dtype, "bfloat16") or (of_case.q_len == ONE) != (served.q_len == ONE):
            return False
        stored = of_case.kv_dtype, of_case.kv_scale
        if of_case.kv_dtype in QUANTISED and stored != (served.kv_dtype, served.kv_scale):
            return False
        asked = [name for name in OFF if getattr(of_case, name)]
        return all(getattr(served, name) for name in asked) and of_case.kv_layout in ("NHD", served.kv_layout)

    def cases(self) -> Iterator[Case]:
        yield from self.in_common()
        yield from self.alone("mixed")
        decode, mixed = self.decode, self.mixed
        for model in self.models:
            width = f"width {model.head_dim_qk}"
            for name in ("softcap", "sinks", "scale", "window_left"):
                yield Case(
                    label=f"decode, {name}, {width}",
                    make=self.make(decode, FEATURES[name][0], model),
                    without=self.make(decode, {}, model),
                    feature=name,
                    quick=True,
                )
            for form in KV_SCALES:
                yield Case(
                    label=f"decode, fp8, scales by {form}, {width}",
                    make=self.make(decode, None, model, form),
                    without=self.make(decode, None, model, form, 4.0),
                    feature="k_scale, v_scale",
                )
            for page_size in (1, 3, 16, 32, 64, 128, 256):
                paged = {"page_size": page_size, "spare_pages": 1}
                yield Case(label=f"pages of {page_size}, {width}", make=self.make(decode | paged, None, model))
                yield Case(
                    label=f"pages of {page_size}, HND, {width}",
                    make=self.make(decode | paged | {"kv_layout": "HND"}, None, model),
                )
            yield Case(label=f"decode, {width}", make=self.make(decode, None, model), quick=True, repeats=True)
            yield Case(label=f"decode, lse, {width}", make=self.make(decode, {"return_lse": True}, model))
            yield Case(label=f"mixed, {width}", make=self.make(mixed, None, model), quick=True, repeats=True)
            yield Case(label=f"mixed and padded, {width}", make=padded(self.make(mixed, None, model)), quick=True)
            heads_first = self.strided(self.make(decode, None, model), ("k_cache", "v_cache"))
            yield Case(label=f"heads first in memory, {width}", make=heads_first)
            yield Case(label=f"mixed, HND, {width}", make=self.make(mixed | {"kv_layout": "HND"}, None, model))
            yield Case(label=f"empty sequences, {width}", make=self.make({"seq_lens": (0, 30, 0)}, None, model))
            long = {"seq_lens": (700, 300), "page_size": 64}
            yield Case(label=f"long, {width}", make=self.make(long, None, model), quick=True)
            for count in (0, 1, 2, 3, 8, 17, 33):
                lens = tuple(5 + 7 * place % 60 for place in range(count))
                label = f"{count} sequences, {width}"
                yield Case(
                    label=label,
                    make=self.make({"seq_lens": lens}, None, model),
                    tokens=True,
                    quick=count in (0, 1, 2, 3),
                )
            for tokens in (2, 3, 16, 17, 64, 65):
                inputs = {"seq_lens": (tokens + 30, tokens + 4), "q_lens": tokens}
                yield Case(label=f"{tokens} tokens each, {width}", make=self.make(inputs, None, model), tokens=True)
        for form in KV_SCALES:
            yield Case(label=f"mixed, fp8, scales by {form}", make=self.make(mixed, {"causal": False}, None, form))
        for dtype, inputs in ((BF16, decode), (FP16, mixed), (FP32, self.several)):
            e5m2 = self.make(inputs | {"dtype": dtype}, {"causal": False}, None, "head", quantised=E5M2)
            yield Case(label=f"e5m2, {str(dtype)[6:]}, scales by head", make=e5m2)
        two_widths = AttentionModel("two widths", 6, 2, 192, 128)
        yield Case(
            label="mixed, e5m2, width 192 x 128", make=self.make(mixed, None, two_widths, "value", quantised=E5M2)
        )
        for dtype in (FP16, FP32):
            yield Case(label=f"decode, {str(dtype)[6:]}", make=self.make(decode | {"dtype": dtype}))
        for shape in (WIDTHS[0], WIDTHS[-1]):
            yield Case(label=f"decode, width {shape.name}", make=self.make(decode, None, shape))
        for page_size in (3, 16):
            hnd: Arguments = {"page_size": page_size, "kv_layout": "HND"}
            yield Case(label=f"mixed, pages of {page_size}, HND", make=self.make(mixed | hnd, {"causal": False}))
        yield Case(label="prefill, as many queries each", make=self.make({"seq_lens": (40, 64), "q_lens": 24}))
        yield Case(label="empty sequences, lse", make=self.make({"seq_lens": (0, 30, 0)}, {"return_lse": True}))
        yield from self.with_lse("empty sequences, sinks", {"seq_lens": (0, 30, 0)}, {"sinks": True})
        ragged: Arguments = {"seq_lens": (0, 30, 0, 9), "q_lens": (2, 4, 100, 1)}
        for name in ("window_left", "causal", "sinks"):
            yield from self.with_lse(f"ragged, empty sequences, {name}", ragged, NEUTRAL | ALONE[name])
        yield from self.few_ragged()
        few_heads = AttentionModel("4 heads on 1", 4, 1, 64, 64)
        for name in ("causal", "window_left", "sinks"):
            make = self.make({"seq_lens": (700, 300), "page_size": 64}, NEUTRAL | ALONE[name], few_heads)
            yield Case(label=f"long, 4 heads on 1, {name}", make=make)
        shared = AttentionModel("3 heads on 1", 6, 2, 128, 128)
        yield Case(
            label="decode, 3 heads on 1, width 128", make=self.make(decode, None, shared), quick=True, repeats=True
        )

    def few_ragged(self) -> Iterator[Case]:
        """Ragged steps of one query or few, most with more rows of q than queries."""
        for form, (inputs, most) in self.bounded.items():
            bound = {"max_seqlen_q": most}
            for model in self.models:
                label, make = f"ragged, {form}, width {model.head_dim_qk}", self.make(inputs, bound, model)
                yield Case(label=label, make=make, quick=True, repeats=True)
                yield Case(label=f"{label}, padded", make=padded(make))
            for name in ("causal", "window_left", "softcap", "sinks"):
                more = NEUTRAL | ALONE[name] | bound | {"return_lse": True}
                yield Case(label=f"ragged, {form}, {name}, lse", make=padded(self.make(inputs, more)))
            together = NEUTRAL | TOGETHER["causal, window_left, sinks"] | bound
            yield Case(label=f"ragged, {form}, causal, window_left, sinks", make=self.make(inputs, together))
            for scale in KV_SCALES:
                make = padded(self.make(inputs, bound, None, scale))
                yield Case(label=f"ragged, {form}, fp8, scales by {scale}", make=make)
            hnd = self.make(inputs | {"kv_layout": "HND", "dtype": FP16}, bound)
            yield Case(label=f"ragged, {form}, float16, HND", make=hnd)


def _padded(make: Make) -> Make:
    """A ragged call with three more queries and 70 more keys, which belong to no sequence."""
    more_queries = padded(make)

    def made(device: torch.device) -> Arguments:
        arguments = more_queries(device)
        longer = {name: arguments[name] for name in ("k", "v")}
        nans = {name: torch.full_like(tensor[:1], torch.nan).expand(70, -1, -1) for name, tensor in longer.items()}
        return arguments | {name: torch.cat([tensor, nans[name]]) for name, tensor in longer.items()}

    return made
