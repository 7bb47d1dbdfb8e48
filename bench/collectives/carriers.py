"""Compare the collectives of `lockstep bench collectives` over every carrier with PyTorch's gloo, in one run.

    cargo build --release
    LOCKSTEP_MPI_DIR=$(../../.ci/mpi ../../target/mpi) python carriers.py --python python --repeats 3

`--python` is an interpreter with torch. All ranks run on this host, one thread each. Programs alternate; every other
repeat runs in reverse order. Raw lines are appended to raw-carriers-<date>.jsonl in this folder. The printed table has the
median over repeats of the medians of each run in microseconds, and gloo's time over each.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess

import run as gloo

HERE = pathlib.Path(__file__).resolve().parent
OPERATIONS = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
GLOO = "torch gloo"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="../../target/release/lockstep")
    parser.add_argument("--python", default="python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--carriers", nargs="+", default=["shm", "tcp", "mpi"])
    parser.add_argument("--largest", type=int, default=64, help="MiB")
    parser.add_argument("--seconds", type=float, default=0.05, help="duration of one batch of gloo")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.sizes = [1 << 20]
    while args.sizes[-1] * 4 <= args.largest << 20:
        args.sizes.append(args.sizes[-1] * 4)
    programs = [GLOO] + args.carriers
    results = {}
    with open(HERE / f"raw-carriers-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        gloo.record(raw, gloo.header(args))
        for repeat in range(args.repeats):
            for program in programs[::-1] if repeat % 2 else programs:
                for line in measure(args, program):
                    line |= {"program": program, "repeat": repeat, "load": os.getloadavg()[0]}
                    gloo.record(raw, line)
                    key = (line["operation"], line["bytes"])
                    results.setdefault(key, {}).setdefault(program, []).append(line["median_us"])
    table(programs, results)


def measure(args, program):
    """Run one program for all operations and sizes and return its lines."""
    if program == GLOO:
        return [line for name in OPERATIONS.values() for line in gloo.run(args, GLOO, name)]
    command = [args.ours, "bench", "collectives", "device=cpu", "--carrier", program, "--nproc", str(args.ranks),
               "--largest", str(args.largest), "--json"]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    found = json.loads(out)
    # A carrier is described with the library's path, which differs between machines.
    carrier = found["carrier"].split(" (")[0]
    return [{"operation": OPERATIONS[rate["operation"]], "bytes": rate["bytes"], "ranks": args.ranks,
             "carrier": carrier, "median_us": round(rate["seconds"] * 1e6, 2),
             "min_us": round(rate["fastest"] * 1e6, 2)} for rate in found["rates"]]


def table(programs, results):
    print("| operation | bytes |" + "".join(f" {program} |" for program in programs)
          + "".join(f" gloo / {program} |" for program in programs[1:]))
    print("|---" * (1 + 2 * len(programs)) + "|")
    for (operation, size), of in results.items():
        median = {program: statistics.median(of[program]) for program in programs}
        cells = [f"{median[program]:,.0f}" for program in programs]
        cells += [f"{median[GLOO] / median[program]:.1f}" for program in programs[1:]]
        print(f"| {operation} | {size >> 20} Mi | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
