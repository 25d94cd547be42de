"""From a call of `fused_moe` to its Triton launches: sort, multiply, multiply, add up.

Nothing is read back from the device, and grids depend on the number of tokens alone, so a call can be captured.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.pairs import count_kernel
from kernelhub.backends.shared.repeated_experts import RepeatedExperts
from kernelhub.backends.shared.sorted_sizes import (
    COUNTED_AT_ONCE,
    PIECE,
    PIECE_OF_FEW,
    bins_of,
    most_tiles,
    size_of_counts,
    tokens_of_a_round,
)
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.fp4 import by_ptx, left_of
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.moe import candidates
from kernelhub.backends.triton.moe.activations import NO_FORM, NOTHING, Activations, Formed, Join
from kernelhub.backends.triton.moe.matmul import experts_kernel
from kernelhub.backends.triton.moe.reduction import reduce_kernel
from kernelhub.backends.triton.moe.sorting import sort_kernel
from kernelhub.backends.triton.moe.tiles import ExpertTiles, choose, rows_of_a_tile
from kernelhub.backends.triton.moe.tuned import TUNED, Tiles
from kernelhub.backends.triton.planes import wide, words
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.dispatch.configuration import DEFAULT, Configurable, Configuration, look_up
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FOUR_BIT_FORMATS,
    FP8_BLOCK_GATE_UP,
    FP8_BLOCK_UE8M0,
    FP8_FORMATS,
    MXFP8,
    NVFP4,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.weights import Matrix

if triton.knobs.runtime.interpret:
    interpreter.repair()

# The most pairs that every program counts for itself: 8 passes, against the launch of another kernel; but not beyond
# what takes tiles of 16 rows, so that no size of a class of tiles compiles a kernel.
_COUNTED_ALONE = 8192
_FEWEST_ROWS = 16
# Rows of a tile up to which the first product stores planes for the second: gpt-oss 120B's 32 tokens take 560.7 us on
# an H200, 562.7 with a launch between. Codes of float8 are made by a launch: a second product that makes codes of what
# it reads does so for each tile of columns, and layers of Qwen3 30B and DeepSeek V3.2 took 1.1 to 1.5 times as long
# (benchmarks/results/experts_launches_h200.json).
_PLANES_ROWS = 16
_REDUCED_AT_ONCE = 1024
_MOST_ROUNDS = 1024  # numbers of tokens, kept per adapter


class _Round(NamedTuple):
    """What of a round follows from its number of tokens, so that a call looks it up.

    Attributes:
        first, second: launchers of the products, for weights that are read as bytes and as words.
        sorter: a launcher.
        pieces: programs of the sort.
        counted: another launch counts the pairs of every expert in each piece before they are sorted. Else the launch
            that sorts them brings the tokens into the form of the first product, too.
        taken: the second product takes what the first stores as it is.
        results: sizes of what the sort writes, which share an allocation: pairs, experts of tiles, rows, counts.
        programs: of the first product, the second and the sum.
    """

    first: tuple[Launcher, Launcher]
    second: tuple[Launcher, Launcher]
    sorter: Launcher
    pieces: int
    counted: bool
    taken: bool
    results: tuple[int, int, int, int]
    programs: tuple[int, int, int]


class Experts(RepeatedExperts, Configurable):
    """Sorted on the device, both products by one kernel, sums in a fixed order."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._native = has_float8(problem.device)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        # What experts add may be beyond float16 where their sum is not.
        self._added_dtype = torch.float32 if problem.dtype == "float16" else self._dtype
        self._sorters: dict[tuple[int, bool], Launcher] = {}
        self._products: dict[tuple[Tiles, bool], tuple[Launcher, Launcher]] = {}
        self._measured = [entry for entry in TUNED if entry.fits(problem)]
        self._given: Mapping[int, Configuration] = {}
        self._defaults: dict[int, ExpertTiles] = {}
        self._rounds: dict[int, _Round] = {}
        choices = {"TOP_K": problem.top_k, "EXPERTS": problem.num_experts, "HAS_MAP": problem.expert_map}
        self._choices = choices
        self._bins = bins_of(problem.num_experts)
        self._counts = {**choices, "EXPERTS_PAD": self._bins}
        self._count = Launcher(count_kernel, {**self._counts, "PIECE": PIECE}, num_warps=8, num_stages=1)
        self._tokens, self._inner = (
            Activations(problem, width, self._native) for width in (problem.hidden_size, problem.intermediate_size)
        )
        self._join = Join(problem, self._native) if problem.activation_dtype == FP8_BLOCK_GATE_UP else None
        # What is rounded more than once is float32 between.
        named = problem.activation_dtype in (FP8_BLOCK_GATE_UP, MXFP8, NVFP4)
        self._inner_dtype = torch.float32 if named else self._dtype
        self._rounded = named
        self._reduce = Launcher(
            reduce_kernel,
            {"N": problem.hidden_size, **choices, "HAS_RESIDUAL": problem.residual, "BLOCK_N": _REDUCED_AT_ONCE},
            num_warps=4,
            num_stages=1,
        )

    def tiles(self, num_tokens: int) -> str:
        return str(self._choice(self._round(num_tokens)))

    def workspace_bytes(self, num_tokens: int) -> int:
        problem, step = self.problem, self._round(num_tokens)
        pairs, item = step * problem.top_k, self._added_dtype.itemsize
        inner = problem.intermediate_size * (1 if self._join is None else 2)
        total = pairs * (problem.hidden_size * item + inner * self._inner_dtype.itemsize)
        rows, tiles = self._bounds(pairs, self._choice(step).first.block_m)
        total += 4 * (rows + tiles + 1 + self._size_of_counts(pairs))
        return total + self._tokens.bytes_of(step) + self._inner.bytes_of(pairs)

    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        """First other tiles of the first product, then, with the best of them, of the second.

        Where gate and up are columns of one product, both have the tiles of the second.
        """
        if stage > (1 if self._join is None else 0):
            return ()
        if stage == 0 and self._join is None:
            return candidates.of_first(self.problem, num_tokens)
        first = self._choice(num_tokens).first if best is None else candidates.read(best)[0]
        return candidates.of_second(self.problem, first)

    def configure(self, measured: Mapping[int, Configuration]) -> None:
        for configuration in measured.values():
            candidates.read(configuration)
        self._given = measured
        self._rounds.clear()
        self._repeated.clear()

    def _choice(self, num_tokens: int) -> ExpertTiles:
        """The tiles of one round: as configured, else what `choose` gives, defaults made once."""
        if self._given:
            found = look_up(self._given, num_tokens)
            if found.configuration is not None and found.source != DEFAULT:
                return ExpertTiles(*candidates.read(found.configuration), found.source)
        if self._measured:
            return choose(self.problem, num_tokens, self._measured)
        block_m = rows_of_a_tile(num_tokens * self.problem.top_k, self.problem.num_experts)
        choice = self._defaults.get(block_m)
        if choice is None:
            choice = self._defaults[block_m] = choose(self.problem, num_tokens, ())
        return choice

    def _round_of(self, num_tokens: int) -> _Round:
        made = self._rounds.get(num_tokens)
        if made is None:
            if len(self._rounds) >= _MOST_ROUNDS:
                self._rounds.clear()
            made = self._rounds[num_tokens] = self._new_round(num_tokens)
        return made

    def _new_round(self, num_tokens: int) -> _Round:
        problem, choice = self.problem, self._choice(num_tokens)
        pairs, block_m = num_tokens * problem.top_k, choice.first.block_m
        counted = self._is_counted(pairs)
        piece = PIECE if counted else PIECE_OF_FEW
        sorter = self._sorters.get((block_m, counted))
        if sorter is None:
            static = {
                **self._counts,
                "HAS_COUNTS": counted,
                "BLOCK_M": block_m,
                "PIECE": piece,
                "BLOCK": COUNTED_AT_ONCE,
                **(NO_FORM if counted else self._tokens.form),
            }
            sorter = Launcher(sort_kernel, static, num_warps=piece // 32, num_stages=1)
            self._sorters[block_m, counted] = sorter
        on_input = problem.apply_router_weight_on_input
        # Gate and up that are quantised before they are joined are columns of one product.
        first_tiles = choice.first if self._join is None else choice.second
        launchers = []
        for tiles, first, where in (
            (first_tiles, True, "input" * on_input),
            (choice.second, False, "" if on_input else "output"),
        ):
            made = self._products.get((tiles, first))
            if made is None:
                made = (self._product(tiles, first, where, False), self._product(tiles, first, where, True))
                self._products[tiles, first] = made
            launchers.append(made)
        most_rows, most_tiles = self._bounds(pairs, block_m)
        programs = (
            most_tiles * -(-self._columns // first_tiles.block_n),
            most_tiles * -(-problem.hidden_size // choice.second.block_n),
            num_tokens * -(-problem.hidden_size // _REDUCED_AT_ONCE),
        )
        results = (most_rows, most_tiles, 1, self._size_of_counts(pairs))
        taken = self._stores_planes(choice.second)
        return _Round(launchers[0], launchers[1], sorter, -(-pairs // piece), counted, taken, results, programs)

    def _launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        """One round."""
        problem, pairs = self.problem, topk_ids.numel()
        round_ = self._round_of(x.shape[0])
        table, residual = values.expert_map, values.residual
        sizes = (pairs, 0 if table is None else table.numel())
        ids = (topk_ids, table)
        strides = (*topk_ids.stride(), 0 if table is None else table.stride(0))
        formed = NOTHING if round_.counted else self._tokens.formed(x, values.a1_scale)
        rows = self._sort(ids, sizes, strides, round_, formed)
        a, a_scale = formed.made or self._tokens(x, values.a1_scale)
        inner = x.new_empty((pairs, self._columns), dtype=self._inner_dtype)
        first, second, reduced = round_.programs
        self._multiply(round_.first, first, a, a_scale, w13, rows, topk_weights, values, inner)
        if round_.taken:
            a, a_scale = inner, values.a2_scale
        elif self._join is None:
            a, a_scale = self._inner(inner, values.a2_scale)
        else:
            a, a_scale = self._join(inner, values.alpha, values.limit)
        added = x.new_empty((pairs, problem.hidden_size), dtype=self._added_dtype)
        self._multiply(round_.second, second, a, a_scale, w2, rows, topk_weights, values, added)
        of_residual = (0, 0) if residual is None else residual.stride()
        of_out = out.stride()
        aligned = not (out.data_ptr() | (0 if residual is None else residual.data_ptr())) & 15
        self._reduce(
            reduced,
            (x.get_device(), of_residual, of_out) if aligned else None,
            added,
            *ids,
            residual,
            out,
            *sizes,
            *strides,
            *of_residual,
            *of_out,
        )

    def _sort(
        self,
        ids: tuple[Tensor, Tensor | None],
        sizes: tuple[int, int],
        strides: tuple[int, ...],
        round_: _Round,
        formed: Formed,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs sorted by expert, the expert of each tile, and how many rows there are, on the device.

        `formed` is made along with them.
        """
        topk_ids, pieces = ids[0], round_.pieces
        memory = topk_ids.new_empty(sum(round_.results))
        pairs, experts, num_rows, counts = memory.split_with_sizes(round_.results)
        device, numbers = topk_ids.get_device(), (sizes[1], *strides)
        if round_.counted:
            self._count(pieces, (device,), *ids, counts, sizes[0], *numbers)
        round_.sorter(
            pieces + formed.programs,
            None if formed.variant is None else (device, formed.variant),
            *ids,
            counts if round_.counted else None,
            pairs,
            experts,
            num_rows,
            *formed.operands,
            sizes[0],
            pieces,
            *numbers,
            *formed.sizes,
        )
        return pairs, experts, num_rows

    def _multiply(
        self,
        products: tuple[Launcher, Launcher],
        programs: int,
        a: Tensor,
        a_scale: Tensor | None,
        matrix: Matrix,
        rows: tuple[Tensor, Tensor, Tensor],
        router: Tensor,
        values: Values,
        out: Tensor,
    ) -> None:
        """One product of all experts."""
        weight, scale, channels, bias = matrix
        of_weight: tuple[int, ...] = weight.stride()
        aligned, in_words = not weight.data_ptr() & 15, False
        if self.problem.weights in FOUR_BIT_FORMATS:
            weight = weight.view(torch.uint8)
            in_words = wide(weight)
            if in_words:
                weight, of_weight = words(weight)
        pairs, most_tiles = out.shape[0], rows[1].shape[0]
        if weight.dtype is torch.float8_e4m3fn and not (self._native and self.problem.fp8_activations):
            weight = weight.view(torch.uint8)
        if scale is not None and scale.dtype is torch.float8_e4m3fn:
            scale = scale.view(torch.uint8)
        of_a = a.stride()
        of_scale = (0, 0, 0) if scale is None else scale.stride()
        of_channels = (0, 0) if channels is None else channels.stride()
        of_bias = (0, 0) if bias is None else bias.stride()
        variant: Hashable = None
        if aligned and not (a.data_ptr() | out.data_ptr()) & 15:
            bias_dtype = None if bias is None else bias.dtype
            variant = (a.get_device(), of_a, of_weight, of_scale, of_channels[0], of_bias[0], bias_dtype)
        products[in_words](
            programs,
            variant,
            a,
            a_scale,
            weight,
            scale,
            channels,
            bias,
            router,
            *rows,
            out,
            pairs,
            most_tiles,
            values.alpha,
            values.limit,
            *of_a,
            *of_weight,
            *of_scale,
            *of_channels,
            *of_bias,
            *router.stride(),
        )

    @property
    def _columns(self) -> int:
        """Of the first product's result: what joins gate and up, or both."""
        return self.problem.intermediate_size * (1 if self._join is None else 2)

    def _product(self, tiles: Tiles, first: bool, where: str, in_words: bool) -> Launcher:
        problem, gated = self.problem, first and self._join is None
        quantized = problem.fp8_activations
        native_products = quantized and self._native
        decoded = "fp8" if problem.weights in FP8_FORMATS else problem.weights
        ptx = by_ptx(problem.device.vendor, problem.dtype, problem.weights)
        return Launcher(
            experts_kernel,
            {
                "N": self._columns if first else problem.hidden_size,
                "K": problem.hidden_size if first else problem.intermediate_size,
                "TOP_K": problem.top_k,
                "DIVISOR": problem.top_k if first else 1,
                "WEIGHTS": PLAIN if native_products else decoded,
                "GATED": gated,
                "ACTIVATION": problem.activation,
                "A_SCALE": self._scales_of_activations(),
                "BLOCK_SCALED": problem.weights in BLOCK_FORMATS,
                "E8M0": problem.weights == FP8_BLOCK_UE8M0,
                "HAS_CHANNELS": problem.weights in ("fp8_tensor", "fp8_channel", NVFP4),
                "HAS_BIAS": problem.w13_bias if first else problem.w2_bias,
                "ROUTER": where,
                "FP8": quantized,
                "PLANES": first and self._stores_planes(tiles),
                "NATIVE": self._native,
                "PTX": ptx,
                "WIDE": in_words,
                "LEFT": left_of(problem.weights, problem.dtype, ptx),
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "BLOCK_K": tiles.block_k,
                "GROUP_M": tiles.group_m,
            },
            tiles.num_warps,
            tiles.num_stages,
        )

    def _stores_planes(self, tiles: Tiles) -> bool:
        """Whether the first product stores its result as the planes that the second reads."""
        whole = not self._rounded and self.problem.intermediate_size % 4 == 0
        return whole and self.problem.weights in FOUR_BIT_FORMATS and tiles.block_m <= _PLANES_ROWS

    def _scales_of_activations(self) -> str:
        problem = self.problem
        if problem.static_scales:
            return "one"
        if not problem.fp8_activations:
            return ""
        return "group" if problem.activation_groups else "row"

    def _round(self, num_tokens: int) -> int:
        """Tokens at a time."""
        row_bytes = self.problem.top_k * self.problem.hidden_size * self._added_dtype.itemsize
        return tokens_of_a_round(num_tokens, row_bytes)

    def _is_counted(self, pairs: int) -> bool:
        """Whether another launch counts the pairs of every expert."""
        return pairs > min(_COUNTED_ALONE, _FEWEST_ROWS * self.problem.num_experts)

    def _size_of_counts(self, pairs: int) -> int:
        """Of the counts of every piece."""
        return size_of_counts(pairs, self._bins) if self._is_counted(pairs) else 0

    def _bounds(self, pairs: int, block_m: int) -> tuple[int, int]:
        """The most rows and tiles that pairs can come to, however they are spread."""
        tiles = most_tiles(pairs, self.problem.num_experts, block_m)
        return tiles * block_m, tiles
