"""Where the attention of a few rows falls, page by page, and how spread out it is: for signals, not for answers."""

from __future__ import annotations

import torch

from plugins.attend.cpu import attend_rows, gather_blocks, gather_pages
from plugins.attend.params import AttendParams


def page_shares(params: AttendParams, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of attention [pages of the sequence] fp32 and the entropy, one fp32 number, of all rows in `params`.

    params: of one sequence; its rows may be any, `out` is overwritten and no score is raised. hidden [rows] int64: how
    many of the newest page tokens each row does not see. Weights are softmax(scale * q.k + bias) over pages and blocks,
    as in `plugins.attend.params`; a share is their sum over the page, the mean over rows and query heads. Entropy is
    - sum w ln w, in units of the log of how many things the row and head can read (0 where that is one), its mean.
    """
    pages, blocks = gather_pages(params, 0), gather_blocks(params, 0)
    rows, kv_heads = params.q.shape[0], params.pages.shape[1]
    weights = attend_rows(params, (0, rows), hidden, (pages, blocks))
    lens = params.tables.page_lens
    page_of = torch.arange(lens.shape[0], device=lens.device).repeat_interleave(lens)
    by_token = weights.pages.mean(dim=(0, 1))
    shares = by_token.new_zeros(lens.shape[0]).index_add_(0, page_of, by_token)
    entropy = torch.special.entr(weights.pages).sum(dim=-1)
    num_read = (pages.page.shape[0] - hidden).float().expand(kv_heads, rows).clone()
    if blocks is not None and weights.blocks is not None:
        entropy.index_add_(0, blocks.head, torch.special.entr(weights.blocks).sum(dim=-1))
        filled = blocks.bias.isfinite().sum(dim=1).float()
        num_read.index_add_(0, blocks.head, filled[:, None].expand(-1, rows))
    most = num_read.clamp_(min=1.0).log()[..., None]
    entropy = entropy.view(kv_heads, rows, -1) / most.clamp(min=torch.finfo(torch.float32).tiny)
    return shares, torch.where(most > 0, entropy, 0.0).mean()
