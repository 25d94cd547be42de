"""What a step of `mla_attention` asks of q, the cache, the lists and `out`, where their form is new."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import same_device
from kernelhub.ops.attention.operands import check_step_device, refuse_batch
from kernelhub.ops.attention.step_values import check_step_values
from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.call import NAME, check_lists, check_topk, destination_of, recheck, refuse
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.operands import check_operand
from kernelhub.ops.values import checks_devices


def check_listed(sparse: bool, topk_indices: Tensor | None) -> None:
    """A plan is for all tokens of a sequence or for those that are listed."""
    if (topk_indices is not None) != sparse:
        form = "is missing" if sparse else "is given"
        refuse("topk_indices", f"{form}, unlike when the plan was prepared", "prepare a plan for this form")


class StepOperands:
    """Operands of a step's runs: checked where their form is new.

    Attributes:
        known: the form of q and the cache that was let through last.
        known_out: the form of q, the cache and `out` that was.
        known_listed: the form of q, the cache and the lists that was.
        known_listed_out: the form of q, the cache, the lists and `out` that was.
    """

    __slots__ = (
        "_device",
        "_num_pages",
        "_problem",
        "_serves",
        "_values",
        "known",
        "known_listed",
        "known_listed_out",
        "known_out",
    )

    def __init__(self, problem: MlaProblem, device: int, values: MlaValues, num_pages: int) -> None:
        self._problem, self._device, self._values, self._num_pages = problem, device, values, num_pages
        self._serves: Any = None
        self.known = KnownForm()
        self.known_out = KnownForm()
        self.known_listed = KnownForm()
        self.known_listed_out = KnownForm()

    def for_step(self, step: PagedStep) -> StepOperands:
        """These, if what they let through fits the step, too, or new ones."""
        serves = step.num_seqs, self._rows(step)
        if serves == self._serves:
            return self
        made = StepOperands(self._problem, self._device, self._values, self._num_pages)
        made._serves = serves
        return made

    def accept(self, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> bool:
        """Check tensors of a form that is new, and learn it, unless KERNELHUB_CHECK has each run checked whole.

        Returns:
            Whether there is anything to launch: not for no queries.

        Raises:
            InvalidArgument: one does not fit the plan, the step or the others; it is named.
        """
        self._check(step, q, kv_cache, topk_indices, out)
        if 0 in q.shape:
            return False
        if checks_devices():  # every run is checked whole
            page_size, pages = self._problem.page_size, kv_cache.shape[0]
            check_step_values(NAME, "kv_cache", page_size, step, q.shape[0], pages)
            return True
        tensors: list[Tensor] = [tensor for tensor in (q, kv_cache, topk_indices, out) if tensor is not None]
        if topk_indices is None:
            form = self.known if out is None else self.known_out
        else:
            form = self.known_listed if out is None else self.known_listed_out
        form.learn(tensors, [tensor.shape for tensor in tensors], strided=() if out is None else (len(tensors) - 1,))
        return True

    def blame(self, error: Exception, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> None:
        """Raise what is wrong with operands that made a run raise; nothing if the error is ours or they are right."""
        if not isinstance(error, KernelhubError):
            try:
                self._check(step, q, kv_cache, topk_indices, out)
            except InvalidArgument as refusal:
                raise refusal from error

    def _check(self, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> None:
        problem, values = self._problem, self._values
        check_listed(problem.sparse, topk_indices)
        recheck(problem, q, kv_cache, None, None, values)
        check_step_device(NAME, q, step.block_table)
        self._check_rows(step, q, kv_cache)
        if topk_indices is not None:
            check_operand(NAME, "topk_indices", topk_indices)
            check_topk(topk_indices, q.shape)
            same_device(NAME, "topk_indices", topk_indices, q)
            check_lists(topk_indices, step, problem.causal)
        if out is not None:
            destination_of(problem, self._device)(out, q, kv_cache, topk_indices, values, step)

    def _rows(self, step: PagedStep) -> int:
        """Rows that q has, or at least has if it is ragged."""
        if not self._problem.ragged:
            return step.num_seqs
        return step.known_q_offsets[-1] if step.known_q_offsets else 0

    def _check_rows(self, step: PagedStep, q: Tensor, kv_cache: Tensor) -> None:
        """The rows of q and the pages of the cache that a step's metadata speaks of."""
        rows, needed, ragged = q.shape[0], self._rows(step), self._problem.ragged
        if rows != needed and (not ragged or rows < needed):
            if not ragged:
                refuse_batch(q.shape, step.num_seqs, NAME)
            refuse("q", f"has {rows} rows", f"cu_seqlens_q of the step ends at {needed}")
        if kv_cache.shape[0] < self._num_pages:
            wanted = f"the plan was prepared for {self._num_pages}, and the step's block_table may name any of them"
            refuse("kv_cache", f"has {kv_cache.shape[0]} pages", wanted)
