"""A DeepEP 1.2 on a CPU, whose ranks are threads. It is as strict about what it takes as the library is.

`Buffer` has the signatures of release 1.2.1. A combine finds its rows by the handle alone, as the kernels do: by the
prefixes of ranks and channels, the tokens of the rows that came, and where each token was put for each rank.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LONGEST_S = 20.0


class World:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def exchanged(self, rank: int, given: Any) -> list[Any]:
        """What each rank gave, in order; each calls it."""
        self._given[rank] = given
        self._barrier.wait(LONGEST_S)
        found = list(self._given)
        self._barrier.wait(LONGEST_S)
        return found


class Config:
    """Of a launch; the hint is the library's, with 128 choices and 128 scales of a row."""

    def __init__(self, num_sms: int, chunk: int, most: int, *rdma: int) -> None:
        self.num_sms, self.most = num_sms, most

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        lanes = self.num_sms // 2 * num_ranks
        size = lanes * (5 * 4 + self.most * (hidden_bytes + 128 * (8 + 4 + 4)))
        return -(-size // 128) * 128


class Buffer:
    num_sms: int = 6

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        assert num_nvl_bytes > 0
        assert num_nvl_bytes % 128 == 0
        assert not low_latency_mode
        assert explicitly_destroy, "its destructor would be a barrier"
        assert group.size() in (2, 4, 8)
        self.rank, self.size, self.world, self.num_bytes = group.rank(), group.size(), group.world, num_nvl_bytes
        assert len(set(self.world.exchanged(self.rank, num_nvl_bytes))) == 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 4, 256, 6, 128)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        assert topk_idx.dtype is torch.int64
        assert topk_idx.ndim == 2
        assert topk_idx.is_contiguous()
        assert bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "it indexes its counters by them"
        local = num_experts // self.size
        in_rank = torch.stack([(topk_idx >= 0).logical_and(topk_idx // local == r).any(1) for r in range(self.size)], 1)
        experts = torch.arange(num_experts).view(-1, 1, 1)
        per_expert = (topk_idx == experts).any(2).sum(1, dtype=torch.int32)
        return in_rank.sum(0, dtype=torch.int32), None, per_expert, in_rank.contiguous(), None

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert rows.dtype is (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        assert rows.is_contiguous()
        assert rows.shape[1] * rows.itemsize % 32 == 0
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_weights.dtype is torch.float32
        assert topk_idx.shape[1] <= 32
        if scales is not None:
            assert scales.dtype is torch.float32
            assert scales.shape == (len(rows), rows.shape[1] // 128)
        self._fits(config, rows)
        channels = config.num_sms // 2
        parts = self.world.exchanged(self.rank, (rows, scales, topk_idx, topk_weights, is_token_in_rank))
        counts = torch.stack([part[4].sum(0, dtype=torch.int32) for part in parts])
        local, me = len(num_tokens_per_expert) // self.size, self.rank
        chosen = [part[4][:, me].nonzero()[:, 0] for part in parts]
        ids = torch.cat([part[2][rows_of] for part, rows_of in zip(parts, chosen, strict=True)])
        ids = torch.where((ids >= me * local) & (ids < (me + 1) * local), ids - me * local, -1)
        weights = torch.cat([part[3][rows_of] for part, rows_of in zip(parts, chosen, strict=True)])
        begins = torch.stack([_begins(part[4][:, me], channels) for part in parts])
        sent = torch.stack([_places(is_token_in_rank[:, rank], channels) for rank in range(self.size)], 1)
        kept = (
            counts.cumsum(0, dtype=torch.int32),
            torch.stack([_begins(is_token_in_rank[:, rank], channels) for rank in range(self.size)]),
            begins,
            torch.cat(chosen).int(),
            is_token_in_rank,
            sent.contiguous(),
        )
        got = torch.cat([_taken(part[0], rows_of) for part, rows_of in zip(parts, chosen, strict=True)])
        came: Any = got.view(rows.dtype)
        if scales is not None:
            came = (came, torch.cat([part[1][rows_of] for part, rows_of in zip(parts, chosen, strict=True)]))
        weights = torch.where(ids >= 0, weights, 0.0)
        per_expert = [int((ids == expert).any(1).sum()) for expert in range(local)]
        if num_worst_tokens:  # ids behind are -1, all else is as memory came
            assert num_worst_tokens >= len(ids)
            more = num_worst_tokens - len(ids)
            came = tuple(_behind(part, more) for part in came) if isinstance(came, tuple) else _behind(came, more)
            ids = torch.cat([ids, ids.new_full((more, ids.shape[1]), -1)])
            weights, per_expert = _behind(weights, more), []
            kept = (*kept[:3], torch.cat([kept[3], kept[3].new_full((more,), 12345)]), *kept[4:])
        return came, ids, weights, per_expert, kept, None

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        ranks, _, channel_begins, sources, _, places = handle
        channels = config.num_sms // 2
        assert x.dtype is torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] * x.itemsize % 16 == 0
        assert len(sources) == len(x)
        assert ranks.shape == (self.size, self.size)
        assert channel_begins.shape == (self.size, channels)
        for part in (ranks, channel_begins, sources, places):
            assert part.dtype is torch.int32
            assert part.is_contiguous()
        self._fits(config, x)
        parts = self.world.exchanged(self.rank, (x, ranks, channel_begins, sources))
        total = torch.zeros(len(places), x.shape[1])
        for token, put in enumerate(places.tolist()):
            channel = _channel(token, len(places), channels)
            for rank, place in enumerate(put):
                if place >= 0:
                    rows, of_ranks, begins, tokens = parts[rank]
                    before = int(of_ranks[self.rank - 1, rank]) if self.rank else 0
                    row = before + int(begins[self.rank, channel]) + place
                    assert int(tokens[row]) == token
                    total[token] += rows[row].float()
        places[places < 0] = -99  # the library writes there
        self.world.exchanged(self.rank, None)
        return total.bfloat16(), None, None

    def _fits(self, config: Config, rows: Tensor) -> None:
        assert config.get_nvl_buffer_size_hint(rows.shape[1] * rows.itemsize, self.size) <= self.num_bytes


def _behind(rows: Tensor, more: int) -> Tensor:
    """Rows with garbage behind them."""
    raw = rows.view(torch.uint8)
    return torch.cat([raw, raw.new_full((more, raw.shape[1]), 0xFF)]).view(rows.dtype)


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    return rows.view(torch.uint8)[index]


def _channel(token: int, tokens: int, channels: int) -> int:
    return token // max(1, -(-tokens // channels))


def _begins(chosen: Tensor, channels: int) -> Tensor:
    """How many rows earlier channels send."""
    counts = torch.zeros(channels, dtype=torch.int32)
    for token in chosen.nonzero()[:, 0].tolist():
        counts[_channel(token, len(chosen), channels)] += 1
    return counts.cumsum(0, dtype=torch.int32) - counts


def _places(chosen: Tensor, channels: int) -> Tensor:
    """Of each token the place among the rows of its channel, -1 where it is not sent."""
    made = torch.full((len(chosen),), -1, dtype=torch.int32)
    used = [0] * channels
    for token in chosen.nonzero()[:, 0].tolist():
        channel = _channel(token, len(chosen), channels)
        made[token] = used[channel]
        used[channel] += 1
    return made


def module() -> ModuleType:
    """The package, as an import finds it."""
    made = ModuleType("deep_ep")
    made.Buffer = Buffer  # type: ignore[attr-defined]
    return made
