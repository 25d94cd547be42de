"""The engine of examples/serve.py: continuous batching over a paged KV cache, with decode steps in CUDA graphs."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from serve_model import Model
from torch import Tensor

import kernelhub

PAGE = 16  # tokens of a page of the KV cache
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # decode steps that are captured on a GPU


@dataclasses.dataclass(eq=False)
class Request:
    """One completion: `ids` are the prompt and what was generated; `computed` of them are in the cache."""

    ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    generated: int = 0
    aborted: bool = False
    number: int = 0  # in the process that serves HTTP
    results: queue.SimpleQueue[tuple[int | None, str]] = dataclasses.field(default_factory=queue.SimpleQueue)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests an engine can run: tokens of a sequence, and the vocabulary."""

    max_len: int
    vocab: int

    def check(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            ValueError: why.
        """
        if not request.ids:
            raise ValueError("the prompt is empty")
        if len(request.ids) + request.max_tokens > self.max_len:
            long = f"{len(request.ids)} tokens of prompt and {request.max_tokens} to generate"
            raise ValueError(f"{long} are more than the {self.max_len} that a sequence may have")
        if bad := [token for token in request.ids if not 0 <= token < self.vocab]:
            raise ValueError(f"token {bad[0]} is none of 0 to {self.vocab - 1}")


Made = list[tuple[Request, int | None, str]]  # requests with their new token, and why they ended


def hand_out(made: Made) -> None:
    """Results for clients that are threads of this process; these then take Python's time for a while."""
    for request, token, reason in made:
        request.results.put((token, reason))


def slots_of(pages: Tensor, positions: Tensor) -> Tensor:
    """Where tokens are written in these pages of the cache: -1, nowhere, for page 0."""
    return (pages * PAGE + positions % PAGE).where(pages > 0, -1)


class Engine:
    """Continuous batching: each step computes one token of every running sequence, and a part of new prompts."""

    def __init__(
        self, model: Model, *, num_pages: int, max_seqs: int = 64, max_tokens: int = 2048, max_len: int = 2048
    ) -> None:
        config, self.device = model.config, model.embed.device
        self.model, self.max_seqs, self.max_tokens = model, max_seqs, max(max_tokens, max_seqs)
        self.max_len = min(max_len, config.max_len, (num_pages - 1) * PAGE)
        self.limits = Limits(self.max_len, config.vocab)
        self.columns = -(-self.max_len // PAGE)
        shape = (num_pages, PAGE, config.kv_heads, config.head_dim)
        new: dict[str, Any] = {"device": self.device, "dtype": model.embed.dtype}
        self.caches = [(torch.zeros(shape, **new), torch.zeros(shape, **new)) for _ in range(config.layers)]
        self.free = list(range(1, num_pages))  # page 0 is of no sequence
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # the oldest first
        self.ready = threading.Condition()
        self.generated, self.preempted, self.rate = 0, 0, 0.0
        self.graphs: dict[int, Callable[[], Tensor]] = {}
        self.made: Made = []  # results that the clients have not been given
        self.deliver = hand_out
        # Tokens, lengths and pages of a step's sequences: one copy from the host brings them.
        ints: dict[str, Any] = {"dtype": torch.int32}
        size = self.max_seqs * (2 + self.columns)
        self.staged = torch.zeros(size, **ints, pin_memory=self.device.type == "cuda")
        self.given = torch.zeros(size, **ints, device=self.device)
        self.rows: list[tuple[list[int], int]] = [([], 0)] * self.max_seqs  # whose pages, how many, are in a row
        q = torch.zeros(1, config.heads, config.head_dim, **new)
        _, lens, table = self._parts(self.given, 1)
        starts = torch.tensor([0, 1], **ints, device=self.device)
        self.decode = kernelhub.paged_attention.prepare(q, *self.caches[0], table, lens)
        self.mixed = kernelhub.paged_attention.prepare(q, *self.caches[0], table, lens, starts)

    def start(self) -> None:
        """Warm up and verify, capture decode steps, seal."""
        counts = sorted({*(1 << n for n in range(self.max_tokens.bit_length())), self.max_tokens, self.max_seqs})
        counts = [count for count in counts if count <= self.max_tokens]

        def steps() -> None:
            self._rehearse(counts)

        done = kernelhub.warmup(
            [self.decode, self.mixed, steps],
            token_counts=counts,
            max_context_len=self.max_len,
            device=self.device,
            progress=True,
        )
        if not done.ok:
            raise SystemExit(f"the warm-up failed:\n{done}")
        if self.device.type == "cuda":
            for size in [size for size in GRAPHS if size <= self.max_seqs]:
                self.graphs[size] = self._captured(size)
        kernelhub.seal()

    @torch.inference_mode()
    def _rehearse(self, counts: list[int]) -> None:
        """Steps of all sizes, and of one token fewer, over the unused page."""
        one = Request([0], 1), 1
        for count in sorted({*counts, *(count - 1 for count in counts if count > 2)}):
            if count <= self.max_seqs:
                self._run([one] * count)
            self._run([(Request([0] * count, 1), min(count, self.max_len))])
            if count > 1 and self.max_seqs > 1:
                self._run([one, (Request([0] * count, 1), min(count - 1, self.max_len))])

    def _parts(self, flat: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, lengths and the block table of so many sequences."""
        tokens, lens, table = flat.split([self.max_seqs, self.max_seqs, self.max_seqs * self.columns])
        return tokens[:size], lens[:size], table.view(self.max_seqs, self.columns)[:size]

    def _decode(self, size: int, lens_cpu: list[int] | None) -> Tensor:
        """Logits of a decode step of so many sequences; those of length 0 are padding."""
        tokens, lens, table = self._parts(self.given, size)
        step = self.decode.begin(table, lens, seq_lens_cpu=lens_cpu)
        positions = (lens - 1).clamp(min=0).long()
        pages = table.gather(1, positions[:, None] // PAGE)[:, 0].where(lens > 0, 0)
        return self.model.forward(tokens.long(), positions, slots_of(pages, positions), self.caches, step.run)

    def _captured(self, size: int) -> Callable[[], Tensor]:
        """A decode step of so many sequences as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            logits = self._decode(size, None)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run.
        """
        self.limits.check(request)
        with self.ready:
            self.waiting.append(request)
            self.ready.notify()

    def abort(self, request: Request) -> None:
        """End a request at the next step."""
        request.aborted = True

    def _room(self, request: Request, tokens: int) -> bool:
        """Pages for so many more tokens of a request; the youngest requests give theirs up."""
        wanted = -(-(request.computed + tokens) // PAGE) - len(request.pages)
        while wanted > len(self.free):
            victim = next(reversed(self.running), request)
            if victim is request:
                return False
            self._release(victim)
            del self.running[victim]
            self.waiting.appendleft(victim)  # restart later: prompt and generated tokens are its new prompt
            self.preempted += 1
        request.pages += [self.free.pop() for _ in range(wanted)]
        return True

    def _release(self, request: Request) -> None:
        self.free += request.pages
        request.pages, request.computed = [], 0

    def _schedule(self) -> list[tuple[Request, int]]:
        """The requests of a step with their new tokens: running ones first, then prompts as far as there is room."""
        for request in [request for request in (*self.running, *self.waiting) if request.aborted]:
            self._finish(request, "abort")
        left, batch = self.max_tokens, []
        for request in list(self.running):
            tokens = min(len(request.ids) - request.computed, left)
            if request in self.running and tokens and self._room(request, tokens):
                batch.append((request, tokens))
                left -= tokens
        batch = [item for item in batch if item[0] in self.running]  # a later request may have taken its pages
        while self.waiting and left and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            tokens = min(len(request.ids), left)
            if -(-len(request.ids) // PAGE) > len(self.free):
                break
            self.waiting.popleft()
            self.running[request] = None
            self._room(request, tokens)
            batch.append((request, tokens))
            left -= tokens
        return batch

    def _finish(self, request: Request, reason: str, token: int | None = None) -> None:
        self._release(request)
        if request in self.running:
            del self.running[request]
        else:
            self.waiting.remove(request)
        self.made.append((request, token, reason))

    def _publish(self) -> None:
        """Give the clients their results."""
        if self.made:
            self.deliver(self.made)
            self.made = []

    def _run(self, batch: list[tuple[Request, int]]) -> Tensor:
        """Logits of the last new token of each request."""
        count, tokens, lens, starts = len(batch), [], [], [0]
        staged_tokens, staged_lens, staged_table = self._parts(self.staged, self.max_seqs)
        for row, (request, new) in enumerate(batch):
            tokens += request.ids[request.computed : request.computed + new]
            lens.append(request.computed + new)
            starts.append(starts[-1] + new)
            pages, (held, known) = request.pages, self.rows[row]
            if held is not pages or known < len(pages):  # else the row has them already
                new_from = known if held is pages else 0
                staged_table[row, new_from : len(pages)] = torch.tensor(pages[new_from:], dtype=torch.int32)
                staged_table[row, len(pages) : known] = 0
                self.rows[row] = pages, len(pages)
        size = count
        if decode := len(tokens) == count:
            size = next((size for size in self.graphs if size >= count), count)
            staged_tokens[:count] = torch.tensor(tokens)
        staged_lens[:count] = torch.tensor(lens)
        staged_lens[count:size] = 0
        used = self.max_seqs * 2 + size * self.columns
        self.given[:used].copy_(self.staged[:used], non_blocking=True)
        if decode:
            return self.graphs[size]()[:count] if size in self.graphs else self._decode(count, lens)
        ends = torch.tensor(starts)
        row_of = torch.repeat_interleave(ends.diff())
        positions = torch.arange(len(tokens)) + (torch.tensor(lens) - ends[1:])[row_of]
        row_of, positions, ids = torch.stack([row_of, positions, torch.tensor(tokens)]).to(self.device)
        _, lengths, table = self._parts(self.given, count)
        slots = slots_of(table[row_of, positions // PAGE], positions)
        offsets = ends.int().to(self.device)
        step = self.mixed.begin(table, lengths, offsets, seq_lens_cpu=lens, cu_seqlens_q_cpu=starts)
        return self.model.forward(ids, positions, slots, self.caches, step.run, offsets[1:].long() - 1)

    @torch.inference_mode()
    def step(self) -> int:
        """Compute one step; the number of tokens that it generated."""
        with self.ready:
            batch = self._schedule()
        if not batch:
            self._publish()
            return 0
        logits = self._run(batch)
        self._publish()  # while the GPU works
        picked = logits.argmax(-1)
        if any(request.temperature > 0 for request, _ in batch):
            heat = torch.tensor([request.temperature for request, _ in batch]).to(self.device)
            drawn = torch.multinomial((logits.float() / heat.clamp(min=1e-5)[:, None]).softmax(-1), 1)[:, 0]
            picked = torch.where(heat > 0, drawn, picked)
        chosen = picked.tolist()
        made = 0
        with self.ready:
            for (request, count), token in zip(batch, chosen, strict=True):
                request.computed += count
                if request.computed < len(request.ids):
                    continue  # only part of its prompt is processed
                request.ids.append(token)
                request.generated += 1
                made += 1
                if token in self.model.config.eos and not request.ignore_eos:
                    self._finish(request, "stop", token)
                elif request.generated == request.max_tokens:
                    self._finish(request, "length", token)
                else:
                    self.made.append((request, token, ""))
        self.generated += made
        if self.device.type == "cpu" or not self.running:
            self._publish()
        return made

    def serve(self) -> None:
        """Run steps for ever; wait while there is nothing to do."""
        marks: deque[tuple[float, int]] = deque()
        while True:
            with self.ready:
                while not self.waiting and not self.running:
                    self.rate = 0.0
                    marks.clear()
                    self.ready.wait()
            try:
                marks.append((time.monotonic(), self.step()))
            except Exception as error:
                with self.ready:
                    for request in (*self.running, *self.waiting):
                        self._finish(request, f"error: {error}")
                self._publish()
                continue
            while marks[-1][0] - marks[0][0] > 2.0:
                marks.popleft()
            if len(marks) > 1:
                self.rate = sum(made for _, made in list(marks)[1:]) / (marks[-1][0] - marks[0][0])

    def kernels(self) -> list[dict[str, str]]:
        """Which kernel serves which layers, and why."""
        config, rows = self.model.config, []
        every = f"0 to {config.layers - 1}"
        for name, plan in (("attention, decode", self.decode), ("attention, mixed with prefill", self.mixed)):
            graph = "in CUDA graphs" if plan is self.decode and self.graphs else "eager"
            rows.append({"layers": every, "part": name, "kernel": plan.kernel, "runs": graph})
        ran = {row.op: row.kernel for row in kernelhub.report().rows}
        parts = ("route_experts", "fused_moe") if config.experts else ("silu_and_mul_quant",)
        for op in ("write_kv_cache", "rms_norm_quant", *parts):
            rows.append({"layers": every, "part": op, "kernel": ran.get(op, "not yet"), "runs": ""})
        return rows

    def stats(self) -> dict[str, Any]:
        """What the page shows."""
        counts = {"running": len(self.running), "waiting": len(self.waiting), "free_pages": len(self.free)}
        late = [str(work) for work in kernelhub.report().after_seal]
        sums = {"tokens": self.generated, "tokens_per_s": round(self.rate, 1), "preempted": self.preempted}
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return {"device": device, **counts, **sums, "compiled_after_seal": late, "layers": self.kernels()}
