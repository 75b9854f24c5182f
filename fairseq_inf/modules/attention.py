"""What both kinds of self-attention share."""

import torch
import torch.nn.functional as F
from torch import nn

# B rows, T queries, P keys, H heads, d head width, e = H d


class Attention(nn.Module):
    """A kind of attention has the linear maps `query`, `key_value` and `output`."""

    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, dim // num_heads, dropout

    def queries(self, x):
        """B x T x e -> B x H x T x d"""
        return self.query(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def project(self, context):
        """Keys and values of vectors.  B x P x e -> 2 of B x H x P x d"""
        return self._split(self.key_value(context))

    def _split(self, projected):
        shape = (*projected.shape[:2], 2, self.num_heads, self.head_dim)
        return projected.view(shape).permute(2, 0, 3, 1, 4)

    def keep(self, x, keys, values, column):
        """Write the key and the value of x: B x 1 x e into keys, values: B x H x P x d, in place,
        at `column`: an int, or B of them."""
        key, value = self.key_value(x).view(-1, 2, self.num_heads, self.head_dim).unbind(1)
        if isinstance(column, int):
            keys[:, :, column], values[:, :, column] = key, value
        else:
            row = torch.arange(len(x), device=x.device)
            keys[row, :, column], values[row, :, column] = key, value

    def by_content(self, query, vectors, visible):
        """What queries (B x H x T x d) find in vectors (B x P x e) where `visible` (B x P) is
        true, regardless of positions.  A constant for the gradient but for the vectors.
        -> B x T x e, heads side by side"""
        b, h, t, d = query.shape
        bias = self.key_value.bias
        projected = F.linear(
            vectors, self.key_value.weight.detach(), None if bias is None else bias.detach()
        )
        key, value = self._split(projected)
        out = F.scaled_dot_product_attention(
            query.detach(), key, value, attn_mask=visible[:, None, None].expand(b, h, t, -1)
        )
        return out.transpose(1, 2).reshape(b, t, h * d)
