"""Train a LLaMA in plain PyTorch on the CPU, as its users write it: the baseline for Lockstep.

    python peer.py 15m --threads 2 --steps 8 --mode eager

Prints one JSON line: the seconds of every step, the median tokens per second without the first two steps, peak memory.

On a machine that reports AMX but does not permit it, `--mode bf16` dies of an illegal instruction in oneDNN; set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 there.
"""

import argparse
import json
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DROPPED_STEPS = 4096, 2
SIZES = {
    "15m": dict(dim=288, layers=6, heads=6, hidden=768, batch=8, seq=256),
    "90m": dict(dim=768, layers=12, heads=12, hidden=2048, batch=2, seq=512),
}


def rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, dim = x.shape
        h = self.attn_norm(x)
        q, k, v = (p(h).view(batch, seq, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(batch, seq, dim))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, dim, layers, heads, hidden, seq):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        head_dim = dim // heads
        angles = torch.outer(torch.arange(seq), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.view(-1))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("size", choices=SIZES)
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--steps", type=int, default=8)
    args.add_argument("--mode", choices=["eager", "compile", "bf16"], default="eager")
    args = args.parse_args()
    if args.steps <= DROPPED_STEPS:
        raise SystemExit(f"--steps must be above {DROPPED_STEPS}, the steps that are not counted")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = dict(SIZES[args.size])
    batch, seq = shape.pop("batch"), shape["seq"]

    model = Llama(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model) if args.mode == "compile" else model
    data = torch.randint(0, VOCAB, (args.steps, batch, seq + 1))

    seconds, losses = [], []
    for rows in data:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.mode == "bf16"):
            loss = step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)

    print(json.dumps({
        "program": f"torch {args.mode}", "version": torch.__version__, "size": args.size, "threads": args.threads,
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_step": batch * seq,
        "step_seconds": [round(s, 4) for s in seconds],
        "tokens_per_second": round(batch * seq / statistics.median(seconds[DROPPED_STEPS:]), 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "losses": [round(x, 4) for x in losses],
    }))


if __name__ == "__main__":
    main()
