"""Train a LLaMA in plain PyTorch on a GPU, as its users write it: the baseline for Lockstep.

    python peer.py 300m --rows 16 --length 2048 --mode compile
    python peer.py 7b --rows 4 --recompute --states bf16
    python peer.py 7b --rows 4 --offload        # FSDP2 with CPUOffloadPolicy, fp32 states on the host

Prints one JSON line: the seconds of every step, tokens per second by the median without the first four steps, the share
of 989 TFLOP/s, peak memory.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, DROPPED_STEPS = 32000, 4
SIZES = {
    "90m": dict(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048),
    "300m": dict(dim=1024, layers=24, heads=16, kv_heads=16, hidden=2816),
    "1b": dict(dim=2048, layers=22, heads=32, kv_heads=4, hidden=5632),
    "7b": dict(dim=4096, layers=32, heads=32, kv_heads=32, hidden=11008),
}


def rope(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        linear = lambda n_in, n_out: nn.Linear(n_in, n_out, bias=False)
        self.q, self.o = linear(dim, dim), linear(dim, dim)
        self.k, self.v = linear(dim, kv_heads * self.width), linear(dim, kv_heads * self.width)
        self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

    def forward(self, x, cos, sin):
        rows, length, dim = x.shape
        h = self.attn_norm(x)
        q = self.q(h).view(rows, length, self.heads, self.width).transpose(1, 2)
        k = self.k(h).view(rows, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(h).view(rows, length, self.kv_heads, self.width).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        h = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(h.transpose(1, 2).reshape(rows, length, dim))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, dim, layers, heads, kv_heads, hidden, length, recompute):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        width = dim // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCAB), targets.view(-1))


def flops_per_token(size, length):
    s = SIZES[size]
    width = s["dim"] // s["heads"]
    block = 2 * s["dim"] ** 2 + 2 * s["dim"] * s["kv_heads"] * width + 3 * s["dim"] * s["hidden"]
    return 6 * (s["layers"] * block + VOCAB * s["dim"]) + 6 * s["layers"] * length * s["dim"]


def sharded(model):
    """Wrap the model in FSDP2 on one rank, with parameters and optimizer on the host."""
    import os
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    how = dict(
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(),
    )
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update, scaled by 2. A and B are f32, as in PEFT."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer
        (rows, cols), device = layer.weight.shape, layer.weight.device
        self.a = nn.Parameter(torch.randn(rank, cols, device=device) * 0.01)
        self.b = nn.Parameter(torch.zeros(rows, rank, device=device))

    def forward(self, x):
        hidden = F.linear(x, self.a.to(x.dtype))
        return self.layer(x) + F.linear(hidden, self.b.to(x.dtype)) * 2.0


def add_adapters(model, rank):
    """Freezes a model and gives every linear layer of its blocks an adapter."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name), rank))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("size", choices=SIZES)
    args.add_argument("--rows", type=int, default=16)
    args.add_argument("--length", type=int, default=2048)
    args.add_argument("--steps", type=int, default=12)
    args.add_argument("--mode", choices=["eager", "compile"], default="eager")
    args.add_argument("--states", choices=["fp32", "bf16"], default="fp32")
    args.add_argument("--recompute", action="store_true")
    args.add_argument("--offload", action="store_true")
    args.add_argument("--lora", type=int, default=0, metavar="RANK")
    args = args.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(**SIZES[args.size], length=args.length, recompute=args.recompute or args.offload)
    if args.states == "bf16":
        model = model.to(torch.bfloat16)
        model.cos, model.sin = model.cos.float(), model.sin.float()
    if args.lora:
        add_adapters(model, args.lora)
    if args.offload:
        model = sharded(model.cpu())
        model.cos, model.sin = model.cos.cuda(), model.sin.cuda()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model) if args.mode == "compile" else model
    tokens, targets = (torch.randint(0, VOCAB, (args.rows, args.length), device="cuda") for _ in range(2))
    seconds, losses = [], []
    autocast = args.states == "fp32" and not args.offload
    for _ in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = step(tokens, targets)
        loss.backward()
        if not args.offload:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    counted = seconds[min(DROPPED_STEPS, len(seconds) - 1):]
    rate = args.rows * args.length / statistics.median(counted)
    print(json.dumps({
        "program": f"torch {args.mode}" + (" FSDP2 offload" if args.offload else ""), "version": torch.__version__,
        "size": args.size, "rows": args.rows, "length": args.length, "states": args.states,
        "recompute": args.recompute or args.offload, "step_seconds": [round(s, 4) for s in seconds],
        "tokens_per_second": round(rate), "mfu989": round(rate * flops_per_token(args.size, args.length) / 989e12, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "losses": [round(x, 4) for x in losses], "lora": args.lora,
    }), flush=True)


if __name__ == "__main__":
    main()
