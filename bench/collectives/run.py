"""Compare Lockstep's collectives with PyTorch's gloo on this machine, in one run.

    cargo build --release -p lockstep-comm --example collective_speed
    python run.py --ours ../../target/release/examples/collective_speed --python python --repeats 3

`--python` is an interpreter with torch. Two processes run, one thread each. Every program measures one operation at all
sizes before the next program does, so that all run under the same load; every other repeat runs in reverse order. A
batch of calls between two barriers gives the seconds per call; a program reports the median and the minimum of seven
batches. Raw lines are appended to raw-<date>.jsonl in this folder. The printed table has the median over repeats of the
medians, and the ratio to gloo of the medians and of the minima.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OPERATIONS = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast"]
SIZES = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="../../target/release/examples/collective_speed")
    parser.add_argument("--python", default="python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--by", nargs="+", choices=["shm", "tcp"], default=["shm", "tcp"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--seconds", type=float, default=0.1, help="duration of one batch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    programs = ["torch gloo"] + [f"lockstep {by}" for by in args.by]
    results = {}
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        record(raw, header(args))
        for repeat in range(args.repeats):
            for operation in args.operations:
                for program in programs[::-1] if repeat % 2 else programs:
                    for line in run(args, program, operation):
                        line |= {"repeat": repeat, "load": os.getloadavg()[0]}
                        record(raw, line)
                        results.setdefault((operation, line["bytes"]), {}).setdefault(program, []).append(line)
    table(args, programs, results)


def table(args, programs, results):
    columns = "".join(f" {p} us | ratio | of minima |" for p in programs[1:])
    print(f"| operation | bytes | {programs[0]} us |{columns}")
    print("|---" * (3 + 3 * len(programs[1:])) + "|")
    for (operation, size), lines in results.items():
        median = {p: statistics.median(line["median_us"] for line in lines[p]) for p in programs}
        least = {p: min(line["min_us"] for line in lines[p]) for p in programs}
        row = f"| {operation} | {size:,} | {median[programs[0]]:,.1f} |"
        for p in programs[1:]:
            row += f" {median[p]:,.1f} | {median[programs[0]] / median[p]:.1f} | {least[programs[0]] / least[p]:.1f} |"
        print(row, flush=True)


def run(args, program, operation):
    """Run one program for one operation and return its lines."""
    common = ["--operations", operation, "--sizes", *map(str, args.sizes), "--seconds", str(args.seconds)]
    if program != "torch gloo":
        command = [args.ours, "--ranks", str(args.ranks), "--by", program.split()[1], *common]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        return [json.loads(line) for line in out.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, str(HERE / "peer.py"), "--meet", f"{folder}/meet", *common]
        ranks = []
        for rank in range(args.ranks):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1",
                                "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        outs = [rank.communicate(timeout=600)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"error: {' '.join(command)} failed")
    return [json.loads(line) for line in outs[0].splitlines() if line.startswith("{")]


def header(args):
    """Describe the run and the machine, without paths, which differ between machines."""
    settings = {key: value for key, value in vars(args).items() if key not in ("ours", "python")}
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    torch = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"time": now, "cpu": names[:1], "cores": os.cpu_count(), "torch": torch.stdout.strip(), "settings": settings}


def record(raw, value):
    raw.write(json.dumps(value) + "\n")
    raw.flush()


if __name__ == "__main__":
    main()
