"""A cuDNN frontend in torch: it keeps what a graph is told, holds it against rules of the real one, and runs it.

Of pages it multiplies all that tiles reach, what is masked by weights of zero: so NaN there is met, as in cuDNN 9.19.
"""

from __future__ import annotations

from pathlib import Path

_SOURCE = '''
"""Fake cudnn."""
import types
import torch

BUILT = []
data_type = types.SimpleNamespace(
    BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32, INT32=torch.int32, INT64=torch.int64
)
diagonal_alignment = types.SimpleNamespace(BOTTOM_RIGHT="bottom right")
heur_mode = types.SimpleNamespace(A="A")


def backend_version():
    return {backend}


def create_handle():
    return object()


def set_stream(handle, stream):
    raise AssertionError("there are no streams on a CPU")


class Tensor:
    def __init__(self, name=None, dim=None, stride=None, data_type=None, uid=None):
        self.name, self.dim, self.stride, self.data_type, self.uid, self.at = name, dim, stride, data_type, uid, None

    def set_output(self, flag):
        return self

    def set_data_type(self, kind):
        self.data_type = kind
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_ragged_offset(self, at):
        assert at.dim == (self.dim[0] + 1, 1, 1, 1)
        self.at = at
        return self


class pygraph:
    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type is compute_data_type is torch.float32 and handle is not None
        self.ready = 0

    def tensor(self, name, dim, stride, data_type, uid):
        return Tensor(name, dim, stride, data_type, uid)

    def sdpa(self, name, q, k, v, attn_scale, generate_stats, use_padding_mask, seq_len_q, seq_len_kv,
             diagonal_alignment=None, diagonal_band_left_bound=None, diagonal_band_right_bound=None,
             paged_attention_k_table=None, paged_attention_v_table=None, paged_attention_max_seq_len_kv=None):
        self.tables = (paged_attention_k_table, paged_attention_v_table)
        most = k.dim[2]
        if paged_attention_k_table is not None:
            most, (pages, heads, page_size, _) = paged_attention_max_seq_len_kv, k.dim
            assert page_size & (page_size - 1) == 0, "block size needs to be non-zero and a power of 2"
            assert v.dim[:3] == k.dim[:3] and k.at is v.at is None and pages > 0
            for table in self.tables:
                assert table.dim == (q.dim[0], 1, -(-most // page_size), 1) and table.data_type is torch.int32
        else:
            assert paged_attention_v_table is paged_attention_max_seq_len_kv is None
        assert use_padding_mask and attn_scale > 0 and most >= q.dim[2]
        assert (diagonal_alignment is None) == (diagonal_band_left_bound is diagonal_band_right_bound is None)
        self.q, self.k, self.v, self.scale, self.lens = q, k, v, attn_scale, (seq_len_q, seq_len_kv)
        self.left, self.right = diagonal_band_left_bound, diagonal_band_right_bound
        self.out, self.lse = Tensor(), Tensor() if generate_stats else None
        return self.out, self.lse

    def validate(self):
        self.ready = 1

    def build_operation_graph(self):
        assert self.ready == 1

    def create_execution_plans(self, heuristics):
        assert heuristics == ["A"]

    def check_support(self):
        pass

    def build_plans(self):
        self.ready = 2
        BUILT.append((self.q.dim, self.k.dim, self.q.stride, self.k.stride))

    def get_workspace_size(self):
        return 16

    def execute(self, tensor_dict, workspace=None, handle=None):
        given = tensor_dict
        assert self.ready == 2 and workspace.numel() >= 16

        def rows(tensor, i, tokens):
            """[tokens, heads, width] of a sequence."""
            data = given[tensor.uid]
            assert data.dtype is tensor.data_type, (tensor.name, data.dtype)
            assert given[tensor.at.uid].dtype is tensor.at.data_type
            start = int(given[tensor.at.uid][i])
            _, heads, most, width = tensor.dim
            assert tokens <= most
            return data.as_strided(
                (tokens, heads, width), (tensor.stride[2], tensor.stride[1], 1), data.storage_offset() + start
            )

        def keys(tensor, table, i, tokens):
            """[tokens, heads, width] of a sequence; of pages all that tiles of 128 tokens reach."""
            if table is None:
                return rows(tensor, i, tokens).float()
            data, (pages, heads, page_size, width) = given[tensor.uid], tensor.dim
            assert data.dtype is tensor.data_type, (tensor.name, data.dtype)
            assert all(step > 0 and step % 8 == 0 for step in tensor.stride[:3]) and tensor.stride[3] == 1
            assert data.data_ptr() % 16 == 0
            listed = given[table.uid]
            assert listed.dtype is torch.int32 and listed.is_contiguous()
            assert listed.numel() == table.dim[0] * table.dim[2]
            listed = listed.view(table.dim[0], -1)[i, : -(-tokens // 128) * max(1, 128 // page_size)]
            assert (listed >= 0).all() and (listed < pages).all()
            pool = data.as_strided(tensor.dim, tensor.stride, data.storage_offset())
            return pool[listed.long()].transpose(1, 2).reshape(-1, heads, width).float()

        for i in range(self.q.dim[0]):
            nq, nk = (int(given[lens.uid][i]) for lens in self.lens)
            if not nq:
                continue
            out = rows(self.out, i, nq)
            if not nk:
                out.fill_(torch.nan)
                if self.lse:
                    rows(self.lse, i, nq).fill_(torch.nan)
                continue
            q = rows(self.q, i, nq).float()
            k, v = (keys(tensor, table, i, nk) for tensor, table in zip((self.k, self.v), self.tables))
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.scale
            place = torch.arange(len(k)) - torch.arange(nq)[:, None] - (nk - nq)
            seen = (torch.arange(len(k)) < nk).expand(nq, -1)
            if self.right is not None:
                seen = seen & (place <= self.right)
            if self.left is not None:
                seen = seen & (place > -self.left)
            scores = scores.masked_fill(~seen, -torch.inf)
            lse = scores.logsumexp(2)
            weights = (scores - lse[..., None]).exp().masked_fill(lse[..., None] == -torch.inf, 0.0)
            out.copy_(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
            if self.lse:
                rows(self.lse, i, nq).copy_(lse.T[..., None])
'''


def write(root: Path, *, backend: int = 91900, version: str = "1.32.0") -> Path:
    """Make the package in a folder, which belongs on `sys.path`."""
    package = root / "cudnn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_SOURCE.replace("{backend}", str(backend)))
    metadata = root / f"nvidia_cudnn_frontend-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cudnn-frontend\nVersion: {version}\n")
    return root
