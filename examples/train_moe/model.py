"""A small transformer whose layers have experts in the place of the MLP; one rank has all of them, or its share.

Numbers are float32. What goes into the experts and what comes out of them is bf16, because that is what travels.
"""

import torch
from torch import nn
from torch.nn import functional

DIGITS, LENGTH = 10, 6  # a sequence: 6 digits, a separator, the same digits in reverse
VOCABULARY, SEPARATOR = DIGITS + 1, DIGITS
MAX_TOKENS = 2 * LENGTH
HIDDEN, HEADS, LAYERS = 128, 4, 2
EXPERTS, TOPK, EXPERT_HIDDEN = 8, 2, 128
BALANCE = 0.01  # weight of the loss that keeps the experts equally busy


class MoE(nn.Module):
    """parallel: an ExpertParallel, or None: this process has all experts. The seed gives both the same weights."""

    def __init__(self, parallel=None):
        super().__init__()
        self.parallel = parallel
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        own = slice(None) if parallel is None else parallel.own_experts
        self.up = nn.Parameter((torch.randn(EXPERTS, HIDDEN, EXPERT_HIDDEN) / HIDDEN**0.5)[own].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, EXPERT_HIDDEN, HIDDEN) / EXPERT_HIDDEN**0.5)[own].clone())
        self.balance = None

    def route(self, x):
        """topk_idx [num_tokens, TOPK] int64, topk_weights float32, and the probabilities of all experts."""
        probabilities = self.router(x).softmax(-1)
        topk_weights, topk_idx = probabilities.topk(TOPK)
        return topk_idx, topk_weights / topk_weights.sum(-1, keepdim=True), probabilities

    def forward(self, x):
        """x [num_tokens, HIDDEN], as what it returns. self.balance: this rank's part of the loss for uneven experts."""
        topk_idx, topk_weights, probabilities = self.route(x)
        self.balance = self.balance_loss(topk_idx, probabilities)
        if self.parallel is None:
            return self.own_experts(x.bfloat16(), topk_idx, topk_weights).float()
        recv_x, recv_topk_idx, recv_topk_weights, handle = self.parallel.dispatch(x.bfloat16(), topk_idx, topk_weights)
        y = self.own_experts(recv_x, recv_topk_idx, recv_topk_weights)
        return self.parallel.combine(y, handle).float()

    def own_experts(self, x, topk_idx, topk_weights):
        """Each token's sum over those of its experts that are here. topk_idx counts them from 0 on; -1 is another's."""
        rows = x.float()
        total = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            token, choice = (topk_idx == expert).nonzero(as_tuple=True)
            y = functional.gelu(rows[token] @ self.up[expert]) @ self.down[expert]
            total = total.index_add(0, token, y * topk_weights[token, choice, None])
        return total.bfloat16()

    def packed_experts(self, x):
        """x [experts here, rows, HIDDEN]: each expert on rows of its own, as low-latency dispatch packs them."""
        return (functional.gelu(x.float() @ self.up) @ self.down).bfloat16()

    def balance_loss(self, topk_idx, probabilities):
        """Least if all experts get as many tokens. Counts are of the tokens of all ranks."""
        counts = torch.bincount(topk_idx.flatten(), minlength=EXPERTS).float()
        if self.parallel is not None:
            self.parallel.sum(counts)
        num_tokens = counts.sum() / TOPK
        return EXPERTS * (counts / counts.sum() * probabilities.sum(0) / num_tokens).sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, past=None):
        """x [batch, tokens, HIDDEN]. past: a list of the keys and values before, which these are added to."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(parts, dim=2) for parts in zip(*past, strict=True))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, parallel):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.moe_norm, self.moe = nn.LayerNorm(HIDDEN), MoE(parallel)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x).flatten(0, 1)).view_as(x)


class Transformer(nn.Module):
    def __init__(self, parallel=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(MAX_TOKENS, HIDDEN)
        self.layers = nn.ModuleList(Layer(parallel) for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, DIGITS)

    def embed(self, tokens, place=0):
        return self.tokens(tokens) + self.places.weight[place : place + tokens.shape[1]]

    def forward(self, tokens):
        """tokens [batch, tokens] int64 -> scores [batch, tokens, DIGITS]"""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

    def loss(self, sequences, num_sequences):
        """This process's part of the loss of num_sequences: that of the reversed digits, and of the balance."""
        scores = self(sequences[:, :-1])[:, LENGTH:]
        wanted = sequences[:, LENGTH + 1 :]
        loss = functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum") / (
            num_sequences * LENGTH
        )
        return loss + BALANCE * sum(layer.moe.balance for layer in self.layers)


def sequences_of(step, num_sequences):
    """Sequences [num_sequences, 2 * LENGTH + 1] of one step; the same on all ranks."""
    digits = torch.randint(DIGITS, (num_sequences, LENGTH), generator=torch.Generator().manual_seed(step))
    separator = torch.full((num_sequences, 1), SEPARATOR)
    return torch.cat([digits, separator, digits.flip(1)], dim=1)
