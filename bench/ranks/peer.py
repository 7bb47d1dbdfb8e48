"""Train on two ranks of PyTorch on one CPU, over gloo, as its users write it: the baseline for Lockstep's ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 peer.py 15m --mode ddp --steps 8

The model is the one of bench/cpu-step/peer.py; the batch is split over the ranks. `fsdp2` builds the model on the meta
device, so that no rank ever holds all of it. Rank 0 prints one JSON line: the seconds of every step, the median tokens
per second without the first two steps, the largest peak memory of a rank.
"""

import argparse
import json
import pathlib
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cpu-step"))
from peer import DROPPED_STEPS, SIZES, VOCAB, Llama  # noqa: E402


def sharded(shape, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Llama(**shape)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    whole = Llama(**(shape | {"layers": 0}))
    model.cos.copy_(whole.cos)
    model.sin.copy_(whole.sin)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else torch.nn.init.ones_(parameter)
    return model


def main():
    args = argparse.ArgumentParser()
    args.add_argument("size", choices=SIZES)
    args.add_argument("--mode", choices=["ddp", "fsdp2"], default="ddp")
    args.add_argument("--steps", type=int, default=8)
    args = args.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = dict(SIZES[args.size])
    batch, seq = shape.pop("batch"), shape["seq"]
    if args.mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(Llama(**shape), gradient_as_bucket_view=True)
    else:
        model = sharded(shape, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    share = batch // world
    data = torch.randint(0, VOCAB, (args.steps, batch, seq + 1))[:, rank * share:(rank + 1) * share]

    seconds, losses = [], []
    for rows in data:
        dist.barrier()
        start = time.perf_counter()
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        seconds.append(time.perf_counter() - start)

    peaks = [None] * world
    dist.all_gather_object(peaks, round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))
    if rank == 0:
        print(json.dumps({
            "version": torch.__version__, "ranks": world, "tokens_per_step": batch * seq,
            "step_seconds": [round(s, 4) for s in seconds],
            "tokens_per_second": round(batch * seq / statistics.median(seconds[DROPPED_STEPS:]), 1),
            "peak_rss_mb": max(peaks), "losses": [round(x, 4) for x in losses],
        }), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
