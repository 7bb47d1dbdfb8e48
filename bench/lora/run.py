"""Compare LoRA training with PEFT on this CPU, in one run: processes alternate, so that both run under the same load.

    cargo build --release
    python run.py --python python --repeats 3

`--python` is an interpreter with torch, transformers and peft. Every process trains `--steps` steps; the first two are
not counted. The data, the shapes and the measuring are those of ../cpu-step. Raw lines are appended to
raw-<date>-cpu.jsonl in this folder. Peaks are of whole processes, with everything they import.
"""

import argparse
import datetime
import importlib.util
import json
import pathlib
import statistics
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("cpu_step", HERE.parent / "cpu-step" / "run.py")
cpu_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cpu_step)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--python", default="python")
    parser.add_argument("--sizes", nargs="+", choices=cpu_step.SIZES, default=["15m", "90m"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="setting passed to lockstep train")
    args = parser.parse_args()
    args.set += ["use_peft=true", f"lora_r={args.rank}", f"lora_alpha={2 * args.rank}", "lora_dropout=0",
                 "lora_target_modules=all-linear"]
    programs = {
        "peft": lambda size: run_peer(args, size),
        "lockstep": lambda size: cpu_step.run_lockstep(args, size, "fp32"),
    }
    print("| size | program | tok/s | spread | ratio | peak MB | ratio |")
    print("|---|---|---|---|---|---|---|")
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-cpu.jsonl", "a") as raw:
        cpu_step.record(raw, cpu_step.header(args))
        for size in args.sizes:
            results = {name: [] for name in programs}
            for repeat in range(args.repeats):
                # Every other repeat runs in reverse order, so that no program is always first.
                for name in list(programs)[::-1] if repeat % 2 else programs:
                    load = float(pathlib.Path("/proc/loadavg").read_text().split()[0])
                    result = {"program": name, "size": size, "repeat": repeat, "load": load} | programs[name](size)
                    cpu_step.record(raw, result)
                    results[name].append(result)
            table(size, results)


def run_peer(args, size):
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, str(HERE / "peer.py"), size, "--threads", str(args.threads)]
        command += ["--steps", str(args.steps), "--rank", str(args.rank)]
        usage = cpu_step.run(command, f"{folder}/log", OMP_NUM_THREADS=str(args.threads))
        lines = pathlib.Path(folder, "log").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith("{"))) | usage


def table(size, results):
    speed = {name: [r["tokens_per_second"] for r in runs] for name, runs in results.items()}
    median = {name: statistics.median(values) for name, values in speed.items()}
    memory = {name: statistics.median(r["peak_rss_mb"] for r in runs) for name, runs in results.items()}
    for name, values in speed.items():
        print(f"| {size} | {name} | {median[name]:,.0f} | {min(values):,.0f}–{max(values):,.0f} "
              f"| {median[name] / median['peft']:.2f} | {memory[name]:,.0f} | {memory[name] / memory['peft']:.2f} |",
              flush=True)


if __name__ == "__main__":
    main()
