#!/usr/bin/env python3
"""Compare two builds of Lockstep with `lockstep bench step`.

    python run.py --before OLD --after NEW --pairs 9 -- --rows 8 --length 256 --vocab 4096 model=15m device=cpu threads=2

Arguments after `--` go to `lockstep bench step`. The builds run as whole processes, alternating, so that a busy machine
slows both; the order within a pair alternates too. Prints a JSON line per process, then the medians and their ratio.
"""

import argparse
import json
import statistics
import subprocess
import sys


def tokens_per_second(binary, args):
    command = [binary, "bench", "step", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", required=True)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("args", nargs="*")
    given = parser.parse_args()
    builds = {"before": given.before, "after": given.after}
    rates = {name: [] for name in builds}
    for pair in range(given.pairs):
        order = list(builds) if pair % 2 == 0 else list(reversed(builds))
        for name in order:
            found = tokens_per_second(builds[name], given.args)
            rate = found["tokens_per_second"]
            rates[name].append(rate)
            print(json.dumps({"pair": pair, "build": name, "tokens_per_second": rate, "args": given.args}), flush=True)
    medians = {name: statistics.median(list_) for name, list_ in rates.items()}
    ratios = [after / before for before, after in zip(rates["before"], rates["after"])]
    summary = {
        "args": given.args,
        "median_before": medians["before"],
        "median_after": medians["after"],
        "ratio_of_medians": medians["after"] / medians["before"],
        "median_of_ratios": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }
    print(json.dumps(summary), flush=True)


main()
