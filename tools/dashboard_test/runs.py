"""Output folders of runs that never were, for the browser test: with what each view shows."""

import json
import math
import random
from pathlib import Path

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">\x1b[31m"
KINDS = {"parameters": 5.6e9, "gradients": 2.8e9, "optimizer": 11.2e9, "activations": 9.1e9, "buffers": 1.9e9, "foreign": 1.1e9}
WORDS = ["the", "model", "adds", "two", "numbers", "and", "writes", "the", "sum"]


def write(folder: Path, name: str, steps: int, *, total=None, rate=1e-3, ranks=4, seed=0, rewards=False):
    """Writes a run of `steps` steps."""
    draw = random.Random(seed)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "profile").mkdir(exist_ok=True)
    total = total or steps
    settings = {"learning_rate": f"{rate:g}", "seed": str(seed), "optim": "adamw", "strategy": "zero2", "max_steps": str(total)}
    changed = {"learning_rate", "seed", "max_steps"}
    info = {
        "name": name, "started": f"2026-03-0{1 + seed % 8}T09:05:07.250Z", "version": "0.1.0", "device": "NVIDIA H200",
        "config": f"model: 1b\nlearning_rate: {rate:g}\nstrategy: zero2\n", "settings": {}, "ranks": ranks,
        "total_steps": total, "parameters": 1_400_000_000, "planned_memory_bytes": {k: int(v) for k, v in KINDS.items()},
        "command": f"lockstep train --nproc {ranks} run.yaml learning_rate={rate:g}",
        "all_settings": [
            {"key": k, "value": v, "origin": "run.yaml:2:1" if k in changed else "default"} for k, v in settings.items()
        ],
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "plan.json").write_text(json.dumps(plan()))
    (folder / "profile/steps-10-11.json").write_text(timeline(ranks, draw))
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "logs/training.log", "w") as log:
        for step in range(1, steps + 1):
            metrics.write(line(step, total, rate, ranks, draw, rewards) + "\n")
            if step % max(1, total // 20) == 0:
                loss = 1.7 + 3 * math.exp(-5 * step / total) + 0.06
                metrics.write(json.dumps({"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss), "eval_seconds": 2.0}) + "\n")
            if step > steps - 50:
                log.write(f"2026-03-01T09:05:07.250Z step {step} | loss: 2.500000\n")
    if rewards:
        completions(folder, total, draw)


def line(step, total, rate, ranks, draw, rewards=False):
    """A line of metrics.jsonl."""
    done = step / total
    busy = [0.52 + 0.08 * draw.random() + (0.11 if rank == 2 else 0) for rank in range(ranks)]
    seconds = max(busy) + 0.04
    row = {
        "step": step, "epoch": done, "loss": 1.7 + 3.2 * math.exp(-5.5 * done * (rate / 1e-3) ** 0.3) + draw.gauss(0, 0.05),
        "grad_norm": 0.5 + 1.5 * math.exp(-8 * done) + abs(draw.gauss(0, 0.12)),
        "learning_rate": rate * min(1, 20 * done) * (0.5 + 0.5 * math.cos(math.pi * done)), "tokens": 16000,
        "tokens_total": 16384 * step, "tokens_per_second": 16384 / seconds, "step_seconds": seconds, "skipped": False,
        "mfu": 0.43 + draw.gauss(0, 0.004), "tflops": 425 + draw.gauss(0, 4), "forward_seconds": 0.16, "backward_seconds": 0.31,
        "head_seconds": 0.05, "update_seconds": 0.02, "reduce_seconds": 0.11, "reduce_wait_seconds": 0.02 + 0.01 * draw.random(),
        "exchange_wait_seconds": 0.01 * draw.random(), "memory_bytes": 3.0e10 + 2e8 * draw.random(), "memory_peak_bytes": 3.05e10,
        "slowest_rank": 2, "rank_busy_seconds": busy,
    }
    if rewards:
        row["reward"] = 0.2 + 0.75 * (1 - math.exp(-4 * done)) + draw.gauss(0, 0.04)
        row["kl"] = 0.03 * done + abs(draw.gauss(0, 0.002))
        row["completions/mean_length"] = 80 + 60 * done + draw.gauss(0, 4)
    return json.dumps(row)


def plan():
    """Planned memory that rises through forward and falls through backward."""
    blocks = 24
    names = [f"#{i} forward block {i}" for i in range(blocks)] + ["#24 objective"]
    names += [f"#{25 + i} backward block {blocks - 1 - i}" for i in range(blocks)] + ["#49 update"]
    resident = int(19.6e9)
    rise = [i * 0.36e9 for i in range(blocks)]
    live = [int(resident + x + 0.4e9) for x in rise + [9e9] + rise[::-1] + [0]]
    parts = [{"name": name, "device_bytes": int(size), "host_bytes": 0, "nvme_bytes": 0} for name, size in KINDS.items()]
    group = {"name": "residents", "device_bytes": resident, "host_bytes": 0, "nvme_bytes": 0, "parts": parts[:3]}
    total = {"device_bytes": int(sum(KINDS.values())), "host_bytes": 0, "nvme_bytes": 0}
    curve = {"phase": "train", "resident_bytes": resident, "peak_bytes": max(live) + int(0.5e9), "live_bytes": live}
    return {"memory": {"residents": group, "phases": [], "overhead": parts[5], "total": total}, "memory_over_step": curve, "operations": names}


def timeline(ranks, draw):
    """Two profiled steps, in the format of the program: an event on each line."""
    events = []
    for rank in range(ranks):
        lanes = ["compute", "comm", "loop"]
        events += [{"name": "thread_name", "ph": "M", "pid": rank, "tid": i + 1, "args": {"name": lane}} for i, lane in enumerate(lanes)]
        at = 0.0
        for step in (10, 11):
            begin = at
            slow = 1.18 if rank == 2 else 1.0
            for kind, count, length in (("forward", 24, 6000), ("head", 1, 30000), ("backward", 24, 12000), ("update", 4, 5000)):
                for i in range(count):
                    took = length * slow * (0.9 + 0.2 * draw.random())
                    events.append({"name": f"{kind} block {i}", "cat": kind, "ph": "X", "pid": rank, "tid": 1, "ts": at, "dur": took})
                    if kind == "backward" and i % 4 == 3:
                        events.append({"name": f"reduce-scatter block {i}", "cat": "reduce", "ph": "X", "pid": rank, "tid": 2, "ts": at + took, "dur": 3 * took})
                    at += took
            at = max(at, begin + 640000)
            events.append({"name": f"step {step}: phases", "cat": "step", "ph": "X", "pid": rank, "tid": 3, "ts": begin, "dur": at - begin})
            at += 2000
    lines = ",\n".join(json.dumps(event) for event in events)
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + lines + "\n]}\n"


def completions(folder, total, draw):
    with open(folder / "completions.jsonl", "w") as out:
        for step in range(1, total + 1, 4):
            for which in range(4):
                a, b = draw.randrange(100), draw.randrange(100)
                right = draw.random() < step / total
                text = f"First add the tens, then the ones: {a} + {b} = {a + b if right else a + b + 10}"
                row = {
                    "step": step, "prompt": f"What is {a} + {b}? Explain, then answer.", "completion": HOSTILE if step == 1 else text,
                    "rewards": {"exact_match": float(right), "format": 0.5}, "reward": float(right) + 0.5,
                    "advantage": 0.7 if right else -1.1, "truncated": which == 3 and not right,
                }
                out.write(json.dumps(row) + "\n")
