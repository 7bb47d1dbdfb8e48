"""Run one rank of PyTorch's gloo collectives, with the operations, sizes and batches of the collective_speed example.

run.py starts it for every rank, with RANK, WORLD_SIZE and a rendezvous file. Rank 0 prints a line of JSON for every
operation and size. A size is the number of bytes of the whole buffer that the ranks share.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

BATCHES = 7


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet", required=True, help="rendezvous file; must not exist yet")
    parser.add_argument("--operations", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=rank, world_size=world)
    for operation in args.operations:
        for size in args.sizes:
            if operation == "barrier" and size != args.sizes[0]:
                continue
            seconds = measure(operation, size, rank, world, args.seconds)
            if rank == 0:
                bytes_ = 0 if operation == "barrier" else size
                print(json.dumps({"program": "torch gloo", "operation": operation, "bytes": bytes_, "ranks": world,
                                  "median_us": round(seconds[BATCHES // 2] * 1e6, 2),
                                  "min_us": round(seconds[0] * 1e6, 2)}), flush=True)
    dist.destroy_process_group()


def measure(operation, size, rank, world, batch_seconds):
    """Return the seconds per call of every batch, sorted."""
    whole = torch.zeros(max(size // 4, world))
    share = len(whole) // world
    own = whole[rank * share:(rank + 1) * share]
    part = torch.zeros(share)
    calls_of = {
        "barrier": lambda: dist.barrier(),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    call = calls_of[operation]

    def batch(calls):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        dist.barrier()
        return time.perf_counter() - start

    calls = 1
    while True:
        enough = torch.tensor([1.0 if batch(calls) > batch_seconds / 4 else 0.0])
        dist.broadcast(enough, 0)
        if enough.item() == 1.0:
            break
        calls *= 2
    calls *= 4
    return sorted(batch(calls) / calls for _ in range(BATCHES))


if __name__ == "__main__":
    main()
