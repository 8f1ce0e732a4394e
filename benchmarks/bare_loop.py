"""The opponent: the same Llama in a bare PyTorch loop. FROZEN: change it only to make it faster, and say so in the results.

One file, no framework: tensors ready in memory, the same architecture, initial scale, loss chunking, thread count, clipping and fused AdamW
as the trainer's run it is paired with. Prints one JSON line.

Shape legend: B rows, S tokens in a row, D model width, H query heads, K key/value heads, d head width, V vocabulary, N = B*S.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal grouped-query attention with half-split rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_Sd: Tensor, sin_Sd: Tensor) -> Tensor:
        b, s, _ = x_BSD.shape
        q, k, v = (w(x_BSD).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (t * cos_Sd + torch.cat((-t[..., self.head_dim // 2 :], t[..., : self.head_dim // 2]), -1) * sin_Sd for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """x + attention, then x + SwiGLU."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_Sd: Tensor, sin_Sd: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_Sd, sin_Sd)
        y_BSD = self.ffn_norm(x_BSD)
        return x_BSD + self.w2(F.silu(self.w1(y_BSD)) * self.w3(y_BSD))


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, sequence: int, theta: float = 5e5):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)
        d = dim // heads
        angles = torch.outer(torch.arange(sequence).float(), theta ** (-torch.arange(0, d, 2).float() / d))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos, self.sin)
        return self.norm(x_BSD)


def summed_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk: int) -> Tensor:
    """Cross-entropy summed over tokens, logits of one chunk at a time, recomputed in backward."""

    def one(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, weight_VD).float(), y, reduction="sum")

    parts = [checkpoint(one, h, y, use_reentrant=False) for h, y in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True)]
    return torch.stack(parts).sum()


def main() -> None:
    """Train for some steps; report the median step after warm-up."""
    parser = argparse.ArgumentParser()
    sizes = {"vocab": 2048, "dim": 256, "layers": 6, "heads": 8, "kv-heads": 4, "hidden": 768, "sequence": 512, "batch": 4}
    for name, value in {**sizes, "steps": 30, "warmup": 5, "threads": 1, "chunk": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = Llama(a.vocab, a.dim, a.layers, a.heads, a.kv_heads, a.hidden, a.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = torch.randint(0, a.vocab, (a.steps, a.batch, a.sequence + 1))
    wall, cpu = [], []
    for step in range(a.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        tokens_BS, labels_N = data[step, :, :-1], data[step, :, 1:].reshape(-1)
        loss = summed_loss(model(tokens_BS).flatten(0, 1), model.head.weight, labels_N, a.chunk) / labels_N.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    tokens = a.batch * a.sequence
    wall, cpu = sorted(wall[a.warmup :]), sorted(cpu[a.warmup :])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"tokens_per_s": tokens / wall[len(wall) // 2], "tokens_per_cpu_s": tokens / cpu[len(cpu) // 2], "peak_bytes": peak}
    print(json.dumps({"who": "bare", "torch": torch.__version__, **vars(a), **figures}))


if __name__ == "__main__":
    main()
