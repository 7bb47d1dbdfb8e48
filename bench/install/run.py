#!/usr/bin/env python3
"""From a clone to the end of the quickstart, for two commits in turn: time, CPU time and size of the binary.

    python run.py                            # 1658d3a and HEAD, once each
    python run.py --commits HEAD --repeats 3 --timings

Every repeat clones the repository into a temporary folder, builds into an empty target folder with `cargo build
--release` and runs the quickstart. The registry's cache is filled before the clock starts (`cargo fetch`), so the
network is not measured. One JSON line to a run goes to the standard output; the load of the machine before and after
stands in it, because other work on the same cores stretches the wall clock. `cpu_s` is user and system time of
all compilers, which depends on it less.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measured(command, cwd, env):
    """Runs a command that must succeed: seconds by the clock, CPU seconds of it and its children, its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    ran = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stdout}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(wall, 1), round(cpu, 1), ran.stdout


def stripped_bytes(binary):
    with tempfile.TemporaryDirectory() as folder:
        stripped = Path(folder) / "stripped"
        subprocess.run(["strip", "-o", stripped, binary], check=True)
        return stripped.stat().st_size


def cpu_model():
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*: (.*)", text)
    return found.group(1) if found else "unknown"


def run(commit, args):
    folder = Path(tempfile.mkdtemp(prefix="lockstep-install-", dir=args.work))
    clone = folder / "lockstep"
    env = dict(os.environ, CARGO_TARGET_DIR=str(folder / "target"), CARGO_INCREMENTAL="0")
    env.pop("RUSTC_WRAPPER", None)
    load_before = os.getloadavg()[0]
    try:
        # `--no-local` copies the objects, as a clone from elsewhere would.
        clone_s, _, _ = measured(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], folder, env)
        measured(["git", "checkout", "--quiet", commit], clone, env)
        measured(["cargo", "fetch", "--locked"], clone, env)
        build = ["cargo", "build", "--release", "--locked"] + (["--timings"] if args.timings else [])
        build_s, build_cpu_s, _ = measured(build, clone, env)
        if args.timings:
            shutil.copy(next((folder / "target/cargo-timings").glob("cargo-timing-*.html")), f"{commit}-timings.html")
        quickstart = ["cargo", "run", "--release", "--locked", "--", "quickstart"]
        quickstart_s, quickstart_cpu_s, _ = measured(quickstart, clone, env)
        binary = folder / "target/release/lockstep"
        if args.keep:
            shutil.copy(binary, Path(args.keep) / f"lockstep-{commit}")
        return {
            "commit": commit,
            "clone_s": clone_s,
            "build_s": build_s,
            "build_cpu_s": build_cpu_s,
            "quickstart_s": quickstart_s,
            "quickstart_cpu_s": quickstart_cpu_s,
            "cold_start_s": round(clone_s + build_s + quickstart_s, 1),
            "binary_bytes": binary.stat().st_size,
            "stripped_bytes": stripped_bytes(binary),
            "cores": len(os.sched_getaffinity(0)),
            "cpu": cpu_model(),
            "rustc": subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.strip(),
            "load_before": round(load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
        }
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="+", default=["1658d3a", "HEAD"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timings", action="store_true", help="keep cargo's report of every crate's time")
    parser.add_argument("--keep", help="folder to copy each binary to")
    parser.add_argument("--work", help="folder for clones and builds [default: the system's temporary folder]")
    args = parser.parse_args()
    name = ["git", "rev-parse", "--short=7", "--verify"]
    commits = [subprocess.check_output([*name, c + "^{commit}"], cwd=ROOT, text=True).strip() for c in args.commits]
    for _ in range(args.repeats):
        for commit in commits:
            print(json.dumps(run(commit, args)), flush=True)


if __name__ == "__main__":
    main()
