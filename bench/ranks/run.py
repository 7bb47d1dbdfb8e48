"""Compare two ranks of Lockstep with two ranks of PyTorch on this CPU, in one run: programs alternate.

    cargo build --release
    python run.py --lockstep ../../target/release/lockstep --python python --repeats 3 --sizes 15m 90m

`--python` is an interpreter with torch and with torchrun next to it. Every program trains `--steps` steps on the same
shapes, with two ranks of one thread each and the batch split between them; the first two steps are not counted.
`alone x 2` is two independent processes of one rank at the same time, each with half the batch: what two ranks could
reach without communication. Raw lines are appended to raw-<date>.jsonl in this folder. The table has the median over
repeats of each program's median step, and the median of the ratios within a repeat.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cpu-step"))
from run import DROPPED_STEPS, MODEL, SIZES, header, record, write_run  # noqa: E402

RANKS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--python", default="python")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["15m", "90m"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="setting passed to lockstep train")
    parser.add_argument("--settle", type=float, default=8, metavar="SECONDS",
                        help="pause before each program; the first seconds after another program are slower")
    parser.add_argument("--only", nargs="+", default=[], help="names of the programs to run")
    args = parser.parse_args()
    args.threads = 1
    programs = {
        "torch ddp": lambda size: torch(args, size, "ddp"),
        "torch fsdp2": lambda size: torch(args, size, "fsdp2"),
        "lockstep ddp": lambda size: lockstep(args, size, "ddp"),
        "lockstep zero3": lambda size: lockstep(args, size, "zero3"),
        "lockstep alone x 2": lambda size: alone(args, size),
    }
    if args.only:
        programs = {name: run for name, run in programs.items() if name in args.only}
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        record(raw, header(args))
        for size in args.sizes:
            results = {name: [] for name in programs}
            for repeat in range(args.repeats):
                order = list(programs)[::-1] if repeat % 2 else list(programs)
                for name in order:
                    result = {"program": name, "size": size, "repeat": repeat, "load": os.getloadavg()[0]}
                    time.sleep(args.settle)
                    result |= programs[name](size)
                    record(raw, result)
                    results[name].append(result)
            table(size, results)


def table(size, results):
    print(f"\n{size}: | program | tok/s | spread | peak MB of a rank |\n|---|---|---|---|")
    for name, runs in results.items():
        speed = [r["tokens_per_second"] for r in runs]
        memory = statistics.median(r["peak_rss_mb"] for r in runs)
        print(f"| {name} | {statistics.median(speed):,.0f} | {min(speed):,.0f}–{max(speed):,.0f} | {memory:,.0f} |")
    if "lockstep alone x 2" in results and "lockstep ddp" in results:
        # Ranks run at the pace of the slower core, and other tenants of the machine decide which one that is.
        pace = [RANKS * min(r["each"]) for r in results["lockstep alone x 2"]]
        ratios = [r["tokens_per_second"] / p for r, p in zip(results["lockstep ddp"], pace)]
        print(f"lockstep ddp / twice the slower of the two alone: median {statistics.median(ratios):.2f}, "
              f"{min(ratios):.2f}–{max(ratios):.2f}")
    for ours, theirs, what in [
        ("lockstep ddp", "torch ddp", "tokens_per_second"),
        ("lockstep zero3", "torch fsdp2", "tokens_per_second"),
        ("lockstep zero3", "lockstep ddp", "tokens_per_second"),
        ("lockstep ddp", "lockstep alone x 2", "tokens_per_second"),
        ("lockstep zero3", "torch fsdp2", "peak_rss_mb"),
    ]:
        if ours in results and theirs in results:
            ratios = [a[what] / b[what] for a, b in zip(results[ours], results[theirs])]
            print(f"{ours} / {theirs}, {what}: median {statistics.median(ratios):.2f}, "
                  f"{min(ratios):.2f}–{max(ratios):.2f}", flush=True)


def torch(args, size, mode):
    torchrun = str(pathlib.Path(args.python).parent / "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", str(RANKS), str(HERE / "peer.py"), size, "--mode", mode,
               "--steps", str(args.steps)]
    out = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in out.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"error: {' '.join(command)}:\n{out.stderr[-2000:]}")
    return json.loads(lines[0])


def lockstep(args, size, strategy):
    with tempfile.TemporaryDirectory() as folder:
        start(args, size, folder, [f"strategy={strategy}", "--nproc", str(RANKS)], rows_of=RANKS).wait()
        return read(args, size, folder, SIZES[size]["batch"])


def alone(args, size):
    # Pin each process to its own core, as ranks are.
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        both = [start(args, size, folder, [], 1, {core}) for folder, core in zip((a, b), cores)]
        [process.wait() for process in both]
        results = [read(args, size, folder, SIZES[size]["batch"] // RANKS) for folder in (a, b)]
    each = [r["tokens_per_second"] for r in results]
    return results[0] | {"tokens_per_second": sum(each), "each": each}


def start(args, size, folder, flags, rows_of, cores=None):
    """Start a process whose ranks each train a share of the batch; it reads rows for all of them."""
    shape = SIZES[size]
    share = shape["batch"] // RANKS
    write_run(args, folder, MODEL.format(**shape), share, shape["seq"], args.steps * rows_of, "fp32")
    command = [args.lockstep, "train", f"{folder}/run.yaml", f"max_steps={args.steps}", *args.set, *flags]
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with open(f"{folder}/log", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=pin)


def read(args, size, folder, rows):
    path = pathlib.Path(folder, "out/metrics.jsonl")
    if not path.exists():
        raise SystemExit(pathlib.Path(folder, "log").read_text()[-2000:])
    metrics = [json.loads(line) for line in path.read_text().splitlines()]
    tokens = rows * SIZES[size]["seq"]
    if [m["tokens"] for m in metrics] != [tokens] * args.steps:
        raise SystemExit(f"error: {args.steps} steps of {tokens} tokens expected, got {[m['tokens'] for m in metrics]}")
    seconds = [m["step_seconds"] for m in metrics]
    peak = re.search(r"peak memory (\d+) bytes", pathlib.Path(folder, "out/logs/training.log").read_text())
    return {
        "tokens_per_step": tokens, "step_seconds": seconds, "losses": [m["loss"] for m in metrics], "set": args.set,
        "tokens_per_second": round(tokens / statistics.median(seconds[DROPPED_STEPS:]), 1),
        "peak_rss_mb": round(int(peak[1]) / (1 << 20), 1),
    }


if __name__ == "__main__":
    main()
