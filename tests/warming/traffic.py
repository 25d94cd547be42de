"""Traffic of a model's server: steps of random sequences, each layer's calls as an engine would make them.

Batches are drawn here and not by `calls_of`: any numbers of sequences and lengths within what was said to be served.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.load import load_attribute
from kernelhub.ops.models.calls import MAKERS
from kernelhub.ops.models.problems import Need, problems_of
from kernelhub.ops.serving import Batch, Calls, Values
from kernelhub.warming.ready import _run, _taken

_QUERIES_ARE_SHORT = 16


class Server:
    """A model served on a device, within bounds.

    Args:
        model: its name.
        device: where.
        max_tokens: most new tokens of a step.
        max_len: longest sequence.
        setting: as of `problems_of`.
    """

    def __init__(self, model: str, device: str, max_tokens: int, max_len: int, **setting: Any) -> None:
        self.max_tokens, self.max_len = max_tokens, max_len
        self.layers: list[tuple[Need, Any, Calls]] = []
        values = Values(torch.device(device), filled=False, cache_bytes=1 << 22)
        for need in problems_of(model, **setting):
            problem = need.problem(torch.device(device))
            for sizes in need.sizes or ((),):
                make: Callable[..., Calls] = load_attribute(MAKERS[need.op], 60.0)
                self.layers.append((need, problem, make(problem, dict(sizes), values)))

    def call(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        """A random layer's call in a random step."""
        need, problem, calls = chance.choice(self.layers)
        batch = self.batch(chance, problem, decode=need.op == "paged_mqa_logits" or self._one(problem))
        if need.op in ("attention", "linear_attention"):
            batch = Batch(batch.q_lens, batch.q_lens, batch.max_kv_len, batch.max_q_len)
        arguments = calls(batch)
        if "x" in arguments and arguments["x"].shape[0] % 2 and "quantize" in need.op:
            arguments["x"] = arguments["x"].clone()
        return need.op, arguments

    def batch(self, chance: random.Random, problem: Any, decode: bool) -> Batch:
        tokens = chance.choice((1, chance.randint(1, self.max_tokens), self.max_tokens))
        if decode:
            q_lens = [1] * tokens
        else:
            q_lens, left = [], tokens
            while left:
                short = chance.random() < 0.5
                q_lens.append(chance.randint(1, min(left, 3 if short else left)))
                left -= q_lens[-1]
        longest = max(q_lens)
        kv_lens = [chance.randint(length, max(length, self.max_len)) for length in q_lens]
        said = chance.choice((None, longest, longest + chance.randint(0, 3)))
        return Batch(tuple(q_lens), tuple(kv_lens), self.max_len, said)

    def run(self, chance: random.Random) -> None:
        """Make a random call, directly or by a plan; a kernel that reads lengths on the host by a plan with them."""
        op, arguments = self.call(chance)
        function = HUB.function(op)
        plan = function.prepare(**arguments)
        if plan.syncs:
            step = plan.begin(**_taken(plan.begin, arguments))
            step.run(**_taken(step.run, arguments))
        elif chance.random() < 0.3:
            _run(plan, arguments)
        else:
            function(**arguments)

    @staticmethod
    def _one(problem: Any) -> bool:
        return getattr(problem, "q_len", None) == "one" and not problem.ragged
