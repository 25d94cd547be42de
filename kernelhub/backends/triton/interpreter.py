"""Corrects Triton's interpreter for bfloat16 and float8.

With TRITON_INTERPRET=1, Triton 3.6 to 3.9 holds bfloat16 and float8 values as raw integer bits and then
computes on the bits: `tl.dot` of bfloat16 is off by orders of magnitude, fp32 -> bfloat16 truncates, fp32 ->
float8 loses carries, and no error is given. `repair()` replaces the operations that touch such values by ones
that decode to float32, compute, and round to nearest even; float8 saturates, as the conversions of GPUs do.
`tl.maximum` and `tl.minimum` of NaN and a number give the number, as they do there.
Functions that a kernel calls do not make the interpreter replace Triton's language once more at each call, which took a
fifth of a launch, and a shape is looked at once, not for every value of it or pair of values, which took two fifths.
Operands of one type, and numbers beside a value, are not asked how their types are promoted: a third of the rest.
It also lets `range()` take a loaded bound under numpy 2.4, and masks be spread out from a scalar: Triton 3.9 makes
those integers, and then refuses them.

The adapters call it when they are imported under the interpreter. It changes nothing on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

from kernelhub.ops.precision import at_own_precision

_TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
# Types that the interpreter keeps as bits, and the largest value of those that saturate.
_RAW = {tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0, tl.float8e4b8: 240.0, tl.float8e5b16: 57344.0}

# Types beside which a number has theirs, with the range of the integers.
_INTEGERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)}
_INTEGERS |= {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
_FLOATS = {kind.name for kind in (tl.float64, tl.float32, tl.float16, tl.bfloat16)}

_PATCHED = (
    "_kernelhub_patched"  # on the tensor and modules of Triton's language while they are those of the interpreter
)

_Handle = interpreter.TensorHandle


def repair() -> None:
    """Replace the interpreter's wrong functions; a second call does nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_kernelhub_repaired", False):
        return
    builder._kernelhub_repaired = True
    _Handle.__init__ = _handle_with(_Handle.__init__)
    interpreter._patch_attr = _attribute_with(interpreter._patch_attr)
    interpreter._convert_float = _convert_float_with(interpreter._convert_float)
    builder.cast_impl = _cast_with(builder.cast_impl)
    builder.binary_op = _binary_with(builder.binary_op)
    builder.unary_op = _unary_with(builder.unary_op)
    builder.create_clampf = _clamp_with(builder.create_clampf)
    builder.create_fma = _fma_with(builder.create_fma)
    builder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, np.fmax)
    builder.create_minnumf = lambda self, one, other: self.binary_op(one, other, np.fmin)
    builder.create_dot = _dot
    builder.create_masked_load = _masked_with(builder.create_masked_load, 1)
    builder.create_masked_store = _masked_with(builder.create_masked_store, 2)
    if not hasattr(builder, "get_bf16"):  # Triton 3.6
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply = _reduce_with(operation.apply)
    interpreter._patch_lang_tensor = _patch_tensor_with(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _patch_once_with(interpreter._patch_lang)
    interpreter._get_np_dtype = _dtype_once_with(interpreter._get_np_dtype)
    tl.block_type.__init__ = _block_once_with(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_once_with(tl.tensor.__init__)
    TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize_with(TritonSemantic.binary_op_sanitize_overflow_impl)
    tl.dtype.__eq__ = _same_with(tl.dtype.__eq__)
    tl.core._unwrap_if_constexpr = _unwrap_with(tl.core._unwrap_if_constexpr)
    TritonSemantic.broadcast_impl_value = _broadcast_with(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = _promotion_with(TritonSemantic.binary_op_type_checking_impl)


def decode(bits: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Values of any float type as numpy can compute with them: raw bits become float32."""
    if dtype not in _RAW:
        return bits
    raw = _as_torch(np.ascontiguousarray(bits).view(_uint(dtype)))
    return raw.view(_TORCH_DTYPES[dtype]).to(torch.float32).numpy()


def encode(values: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Values rounded to nearest even into `dtype`, as the interpreter keeps it."""
    if dtype not in _RAW:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(values).astype(interpreter._get_np_dtype(dtype))
    exact = _as_torch(np.asarray(values)).to(torch.float32)
    if dtype in _LARGEST:
        exact = exact.clamp(-_LARGEST[dtype], _LARGEST[dtype])  # clamp keeps NaN
    return exact.to(_TORCH_DTYPES[dtype]).view(torch.uint8 if dtype in _LARGEST else torch.uint16).numpy()


def _as_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _uint(dtype: Any) -> Any:
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[dtype.primitive_bitwidth]


def _masked_with(operation: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A load or store whose mask, the argument in this place after the builder, is one of booleans."""

    def masked(self: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        if mask is not None and mask.data.dtype != np.bool_:
            mask = _Handle(mask.data.astype(np.bool_), mask.dtype)
        return operation(self, *arguments[:place], mask, *arguments[place + 1 :])

    return masked


def _convert_float_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source not in _TORCH_DTYPES or target not in _TORCH_DTYPES:
            return original(values, source, target, rounding_mode)
        return encode(decode(values, source), target).view(_uint(target)).reshape(values.shape)

    return convert


def _cast_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar in _RAW or target.scalar in _RAW:
            return _Handle(encode(decode(source.data, source.dtype.scalar), target.scalar), target.scalar)
        with np.errstate(over="ignore", invalid="ignore"):
            return original(self, source, target)

    return cast_impl


def _binary_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        dtype = left.dtype.scalar
        if left.data.dtype.kind in "iub" and dtype not in _RAW and operation is not np.fmod:
            return original(self, left, right, operation)  # of which numpy reports nothing
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if dtype not in _RAW and right.dtype.scalar not in _RAW:
                return original(self, left, right, operation)
            result = operation(decode(left.data, dtype), decode(right.data, right.dtype.scalar))
        return _Handle(result if result.dtype == np.bool_ else encode(result, dtype), dtype)

    return binary_op


def _unary_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, operand: Any, operation: Any) -> Any:
        dtype = operand.dtype.scalar
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if dtype not in _RAW:
                return original(self, operand, operation)
            return _Handle(encode(operation(decode(operand.data, dtype)), dtype), dtype)

    return unary_op


def _clamp_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_clampf(self: Any, operand: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        dtype = operand.dtype.scalar
        if dtype not in _RAW:
            return original(self, operand, low, high, propagate_nan)
        return _Handle(encode(np.clip(*(decode(item.data, dtype) for item in (operand, low, high))), dtype), dtype)

    return create_clampf


def _fma_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype not in _RAW:
            return original(self, x, y, z)
        product = decode(x.data, dtype).astype(np.float64) * decode(y.data, dtype)
        return _Handle(encode(product + decode(z.data, dtype), dtype), dtype)

    return create_fma


@at_own_precision
def _dot(self: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
    """Products in float32 as tensor cores accumulate them; float64 and integers exactly."""
    dtype = d.dtype.scalar
    wide = torch.float32 if a.dtype.scalar.is_floating() and dtype is not tl.float64 else torch.float64
    left, right = (_as_torch(decode(item.data, item.dtype.scalar)).to(wide) for item in (a, b))
    product = torch.matmul(left, right).numpy()
    if not a.dtype.scalar.is_floating():
        return _Handle(product.astype(d.data.dtype) + d.data, dtype)
    return _Handle(encode(product + decode(d.data, dtype), dtype), dtype)


def _reduce_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, operands: Any) -> Any:
        several = isinstance(operands, tuple)
        tensors = operands if several else (operands,)
        raw = [
            tensor.dtype if isinstance(tensor, tl.core.tensor) and tensor.dtype in _RAW else None for tensor in tensors
        ]
        if not any(raw):
            return original(self, operands)
        widened = tuple(
            tensor if dtype is None else _tensor_like(tensor, decode(tensor.handle.data, dtype), tl.float32)
            for tensor, dtype in zip(tensors, raw, strict=True)
        )
        results = tuple(
            _tensor_like(result, encode(result.handle.data, dtype), dtype)
            if dtype is not None and result.dtype == tl.float32
            else result
            for result, dtype in zip(original(self, widened), raw, strict=True)
        )
        return results if several else results[0]

    return apply


def _handle_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """The size of elements is compared with that of their type, without a function for it."""

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if data.itemsize != 1 and not dtype.is_ptr() and data.itemsize * 8 > dtype.primitive_bitwidth:
            original(self, data, dtype)  # raises
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return handle


def _attribute_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Triton's language is called by one function, not by three."""
    checked = tl.core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not checked:
            original(obj, name, member, builder, scope)
            return
        function, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(obj, name, call)

    return patch


def _promotion_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Two values of one type keep it, a number beside a value takes its type, and an offset leaves a pointer one.

    In quotients halves become wider, which is left to Triton.
    """

    @functools.wraps(original)
    def promoted(
        self: Any,
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if isinstance(self.builder, interpreter.InterpreterBuilder) and arithmetic_check and not div_or_mod:
            one, other = type(left), type(right)
            if one is tl.tensor and other is tl.tensor:
                kind = left.dtype
                if (
                    (allow_lhs_ptr and right.dtype.name in _INTEGERS)
                    if kind.is_ptr()
                    else kind.name == right.dtype.name
                ):
                    return self.broadcast_impl_value(left, right)
            elif one is tl.tensor and _takes(left.dtype, other, right):
                return self.broadcast_impl_value(left, self.scalar_constant(right, left.dtype))
            elif other is tl.tensor and _takes(right.dtype, one, left):
                return self.broadcast_impl_value(self.scalar_constant(left, right.dtype), right)
        return original(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return promoted


def _takes(kind: Any, of: type, number: Any) -> bool:
    """A value of this type beside this number makes the number one of its type."""
    if kind.name in _INTEGERS:
        least, most = _INTEGERS[kind.name]
        return of is int and least <= number <= most  # else Triton refuses it
    return kind.name in _FLOATS and (of is float or (of is int and -(2**31) <= number < 2**31))


def _tensor_like(tensor: Any, data: np.ndarray[Any, Any], dtype: Any) -> Any:
    shape = list(tensor.shape) if tensor.type.is_block() else None
    return tl.core.tensor(_Handle(data, dtype), dtype if shape is None else tl.block_type(dtype, shape))


def _sanitize_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Integers are checked for overflow where the check is heard: without `debug`, what it finds is dropped."""

    def sanitize(self: Any, left: Any, right: Any, operation: Any) -> None:
        if self.builder.options.debug or not isinstance(self.builder, interpreter.InterpreterBuilder):
            original(self, left, right, operation)

    return sanitize


def _patch_tensor_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(tensor, _PATCHED, True)

    return patch


def _dtype_once_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """numpy's dtype of a Triton one, which the interpreter makes a table for at each operation."""
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = original(scalar)
        return found

    return numpy_dtype


def _block_once_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """What the type of a block is made of besides its elements, which is the same for each block of their shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = _plain(shape)
        made = known.get((element_ty.name, sizes))
        if made is None:
            original(self, element_ty, shape)
            self._kernelhub_sizes = sizes
            known[element_ty.name, sizes] = vars(self).copy()
        else:
            self.__dict__.update(made)
            self.element_ty = element_ty

    return block


def _plain(shape: Any) -> tuple[int, ...]:
    return tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])


def _sizes(kind: Any) -> tuple[int, ...]:
    """The shape of a type of blocks, as numbers."""
    known: tuple[int, ...] | None = kind.__dict__.get("_kernelhub_sizes")
    return _plain(kind.shape) if known is None else known


def _tensor_once_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """The shape of a value as kernels read it, which is the same for each value of that shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = _sizes(type) if type.is_block() else ()
        made = known.get(key)
        if made is None:
            original(self, handle, type)
            known[key] = {name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")}
        else:
            self.__dict__.update(made)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    return tensor


def _broadcast_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is looked at of two values of one shape; of a number and a block only what is made of the number."""

    def filled(self: Any, number: Any, block: Any) -> Any:
        kind = block.type.with_element_ty(number.type.scalar)
        return self.tensor(self.builder.create_splat(kind, number.handle), kind)

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if not isinstance(self.builder, interpreter.InterpreterBuilder):
            return original(self, left, right)
        one, other = left.type, right.type
        if one.is_block():
            if not other.is_block():
                return left, filled(self, right, left)
            return (left, right) if _sizes(one) == _sizes(other) else original(self, left, right)
        return (filled(self, left, right), right) if other.is_block() else (left, right)

    return broadcast


def _same_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def same(self: Any, other: Any) -> Any:
        return self is other or original(self, other)

    return same


def _unwrap_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Values and numbers are no constants that wrap something, and most of what is asked about."""
    plain = {tl.tensor, int, float, bool}

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else original(value)

    return unwrap


def _patch_once_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the modules of Triton's language that a function sees, if a launch under way has not patched them."""

    def patch(function: Any) -> Any:
        seen = {module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())}
        if hasattr(tl.tensor, _PATCHED) and all(hasattr(module, _PATCHED) for module in seen):
            return interpreter._LangPatchScope()  # nothing to restore
        scope = original(function)
        for module in seen:
            scope.set_attr(module, _PATCHED, True)
        return scope

    return patch
