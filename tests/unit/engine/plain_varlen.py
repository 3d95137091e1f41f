"""What `torch.nn.attention.varlen.varlen_attn` computes with block tables, written plainly."""

import itertools

import torch


def plain_varlen(
    query: torch.Tensor,  # (T, H, D)
    key: torch.Tensor,  # (blocks, block size, KV heads, D)
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """(T, H, D). Causal: a sequence's queries are its last positions."""
    assert window_size[1] == 0
    assert num_splits == 1
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    heads_per_kv = query.shape[1] // key.shape[2]
    assert enable_gqa == (heads_per_kv > 1)
    outputs = []
    starts = cu_seq_q.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        length = int(seqused_k[i])
        assert end - start <= max_q
        assert length <= max_k
        k, v = (pool[block_table[i].long()].flatten(0, 1)[:length] for pool in (key, value))
        k, v = (x.repeat_interleave(heads_per_kv, dim=1) for x in (k, v))  # (L, H, D)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], k) * (scale or query.shape[2] ** -0.5)
        ahead = torch.arange(length) - torch.arange(length - (end - start), length).unsqueeze(1)
        hidden = ahead > 0
        if window_size[0] >= 0:
            hidden |= ahead < -window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)
