"""Wrong calls: a right call of which one argument is what its parameter does not take.

Each must be refused with the parameter's name, or with a partner's and the parameter's in the text; or be answered
right where the value can be read so. What is of a type that the signature does not name can be read in no way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import copied
from tests.fuzz.bases import Base
from tests.fuzz.operands import Arguments
from tests.fuzz.outcome import ParsedCall

Value = tuple[str, Any, bool]  # what it is, itself, whether no answer can be right


def wrong(op: str, base: Base, random: Random) -> ParsedCall | None:
    """One argument is wrong, on a first call or after a right one."""
    given = copied(base.arguments)
    destinations = CASES[op].destinations(base.arguments)
    parameters = [name for name in inspect.signature(HUB.function(op)).parameters if name != "backend"]
    name = random.choice(parameters)
    value = given.get(name)
    if name in destinations:
        shape, dtype = destinations[name]
        value = torch.empty(shape, dtype=dtype, device=_device(given))
    values = _values(op, name, value, random)
    if not values:
        return None
    label, wrong_value, never = random.choice(values)
    if name == "k_cache" and value.dtype is torch.uint8 and getattr(wrong_value, "ndim", 0) == value.ndim:
        return None  # scales lie elsewhere in pages of another size: any bits, whose sums may be beyond float32
    if name == "topk_indices" and isinstance(wrong_value, Tensor) and wrong_value.shape[-1:] > value.shape[-1:]:
        wrong_value[..., -1] = -1  # a position listed twice is found with KERNELHUB_CHECK=1 alone on a GPU
    asked = ParsedCall(base.arguments, given | {name: wrong_value}, {}, [], (name,), f"{name} is {label}")
    in_place = name in CASES[op].written and isinstance(wrong_value, Tensor)
    judged = copied(given) | {name: wrong_value.clone() if in_place else wrong_value}  # as before the call
    asked.judged = base.arguments if name in destinations else judged
    if op == "grouped_gemm" and name == "out" and getattr(wrong_value, "is_floating_point", bool)():
        asked.judged = base.arguments | {
            "out_dtype": wrong_value.dtype
        }  # the destination says it where nothing else does
    asked.written = (name,)
    asked.must_refuse = never
    asked.partners = True
    if random.random() < 0.5:
        asked.before = copied(base.arguments)
        asked.note += ", after a right call"
    else:
        asked.cold = True
    return asked


def _values(op: str, name: str, value: Any, random: Random) -> list[Value]:
    """Wrong values of a parameter, by what its annotation says and by what it is in the right call."""
    said = str(inspect.signature(HUB.function(op)).parameters[name].annotation)
    if isinstance(value, Tensor):
        return _of_tensor(value, said, random)
    if isinstance(value, list):
        return _of_list(value)
    values = [item for item in _OTHERS if not any(word in said for word in item[3])]
    found: list[Value] = [(label, make(), True) for label, make, _, _ in values]
    if "None" not in said and said not in ("Any", "Window") and value is not None:  # a Window may be None
        found.append(("None", None, True))
    if "Window" in said:
        found += [(repr(bad), bad, True) for bad in (-2, (1, 2, 3), (1.5, 2), "3", (True, 1), 2**40 + 0.5)]
    elif "Scale" in said:
        found += [("nan", float("nan"), False), ("a complex tensor", torch.ones(1, dtype=torch.complex64), True)]
    elif "int" in said and "Tensor" not in said:
        found += [(repr(bad), bad, False) for bad in (-1, 0, -(2**31), 2**40)]
    elif "float" in said and "Tensor" not in said:
        found += [(repr(bad), bad, False) for bad in (float("nan"), float("inf"), -float("inf"))]
    elif "str" in said:
        found += [(repr(bad), bad, True) for bad in ("nonsense", "", "NHD ")]
    elif "dtype" in said:
        found += [(str(bad), bad, True) for bad in (torch.int32, torch.bool, torch.complex64)]
    return found


class _Object:
    """A class of nobody."""


# What it is, what makes it, -, words of annotations that may take it.
_OTHERS: tuple[tuple[str, Callable[[], Any], None, tuple[str, ...]], ...] = (
    ("'yes'", lambda: "yes", None, ("str",)),
    ("2", lambda: 2, None, ("int", "float", "Scale", "Window")),
    ("1.5", lambda: 1.5, None, ("float", "Scale")),
    ("True", lambda: True, None, ("bool",)),
    ("a list", lambda: [1, 2], None, ("Sequence",)),
    ("a complex", lambda: 1j, None, ()),
    ("a tensor of one element", lambda: torch.ones(()), None, ("Tensor", "Scale")),
    ("an object", _Object, None, ()),
    ("bytes", lambda: b"no", None, ()),
    ("a dtype", lambda: torch.int64, None, ("dtype",)),
)


def _of_tensor(tensor: Tensor, said: str, random: Random) -> list[Value]:
    """Other types, layouts, devices, dtypes and shapes."""
    found: list[Value] = [
        ("a str", "tensor", True),
        ("a dict", {"tensor": tensor}, True),
        ("True", True, True),
        ("a list of it", [tensor], True),
        ("its values in lists", tensor.float().tolist(), True),
        ("complex", torch.zeros(tensor.shape, dtype=torch.complex64, device=tensor.device), True),
        ("on meta", tensor.to("meta"), True),
    ]
    if "float" not in said and "Scale" not in said:
        found += [("an int", 3, True), ("a float", 2.5, True)]
    if "None" not in said:
        found.append(("None", None, True))
    if tensor.is_floating_point() and tensor.itemsize > 1:
        found.append(("a tensor that requires grad", tensor.clone().requires_grad_(), True))
    if tensor.ndim and tensor.numel() and tensor.is_floating_point() and tensor.itemsize > 1:
        found += [
            ("sparse", tensor.to_sparse(), True),
            ("nested", torch.nested.nested_tensor(list(tensor.unbind())), True),
            ("jagged", torch.nested.nested_tensor(list(tensor.unbind()), layout=torch.jagged), True)
            if tensor.ndim > 1
            else ("sparse", tensor.to_sparse(), True),
        ]
    if tensor.ndim == 2 and tensor.itemsize > 1:
        found.append(("compressed rows", tensor.to_sparse_csr(), True))
    found += [(f"of dtype {str(dtype)[6:]}", _cast(tensor, dtype), False) for dtype in _DTYPES if dtype != tensor.dtype]
    found += [(f"of shape {list(other.shape)}", other, False) for other in _shapes(tensor, random)]
    if tensor.is_cuda:
        found.append(("on the CPU", tensor.cpu(), False))
    return found


_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.float().nan_to_num().to(dtype)


def _shapes(tensor: Tensor, random: Random) -> list[Tensor]:
    """One dimension more or less, longer or shorter by one, or of size 0."""
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.ndim else tensor
    made = [raw[None], raw.flatten()] if raw.ndim != 1 else [raw[None], raw[:, None]]
    for at in range(raw.ndim):
        size = raw.shape[at]
        if size:
            made += [raw.narrow(at, 0, size - 1).contiguous(), raw.narrow(at, 0, 0)]
            made.append(torch.cat([raw, raw.narrow(at, 0, 1)], at))
    made = [other for other in made if other.shape != raw.shape]
    return [other.view(tensor.dtype) if other.dtype != tensor.dtype else other for other in made]


def _of_list(value: list[Any]) -> list[Value]:
    first = value[0]
    return [
        ("a str", "tensors", True),
        ("3", 3, True),
        ("None", None, True),
        ("a list with None", [None, *value[1:]], True),
        ("a list with a float", [2.5, *value[1:]], True),
        ("empty", [], True),
        ("a list with one on meta", [first.to("meta"), *value[1:]], True),
        ("a list with one of other shape", [first[..., :-1], *value[1:]], False),
        ("a list with one of other dtype", [first.double(), *value[1:]], False),
        ("a list with a sparse one", [first.to_sparse(), *value[1:]], True),
        ("a list with one that requires grad", [_wanting_gradient(first), *value[1:]], True),
        ("shorter", value[:-1], False),
    ]


def _device(arguments: Arguments) -> torch.device:
    return next(value.device for value in _tensors(arguments))


def _tensors(arguments: Arguments) -> list[Tensor]:
    values = [part for value in arguments.values() for part in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


def _wanting_gradient(tensor: Tensor) -> Tensor:
    """A copy that requires grad; integers, which cannot, as floats of the same values."""
    return (tensor if tensor.is_floating_point() else tensor.float()).clone().requires_grad_()
