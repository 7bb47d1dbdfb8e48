"""Compare Lockstep with PyTorch on this CPU, in one run: processes alternate, so that both run under the same load.

    cargo build --release && cargo build --release -p lockstep-device --example fma_peak
    python run.py --lockstep ../../target/release/lockstep --python python --repeats 3 --sizes 15m 90m
    python run.py --precision fp32 bf16 --set recompute=selective
    python run.py --tiny

`--python` is an interpreter with torch. Every process trains `--steps` steps; the first two are not counted. Raw lines
are appended to raw-<date>.jsonl in this folder. The printed table has the median over processes of their median tokens
per second, the spread, ratios to the first peer, and the share of the highest multiply-add peak measured. `--tiny`
measures the start instead: the wall clock of a whole one-step process on the tiny model, ten times.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import statistics
import string
import subprocess
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
DROPPED_STEPS, STARTS = 2, 10
# The same shapes as in peer.py.
SIZES = {
    "15m": dict(dim=288, layers=6, heads=6, hidden=768, batch=8, seq=256),
    "90m": dict(dim=768, layers=12, heads=12, hidden=2048, batch=2, seq=512),
}
VOCAB = 4096
MODEL = """{{architecture: LlamaForCausalLM, hidden_size: {dim}, intermediate_size: {hidden},
  num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: {heads}, vocab_size: 4096,
  rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: false, max_position_embeddings: 2048}}"""
CONFIG = """\
model: {model}
train_files: {folder}/rows.jsonl
tokenizer: byte
max_length: {max_length}
packing: none
per_device_train_batch_size: {batch}
max_steps: {steps}
learning_rate: 3.0e-4
adam_beta2: 0.95
weight_decay: 0.1
max_grad_norm: 0
mixed_precision: {precision}
save_strategy: "no"
threads: {threads}
output_dir: {folder}/out
logging_steps: 1
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--python", default="python")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["15m", "90m"])
    parser.add_argument("--peers", nargs="+", choices=["eager", "compile", "bf16"], default=["eager"])
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="setting passed to lockstep train")
    parser.add_argument("--fma-peak", default="../../target/release/examples/fma_peak", metavar="PROGRAM",
                        help="program that prints the multiply-add peak of all threads; runs before every repeat")
    parser.add_argument("--tiny", action="store_true", help="measure process start to end of first step")
    args = parser.parse_args()
    if args.steps <= DROPPED_STEPS:
        parser.error(f"--steps must be above {DROPPED_STEPS}, the steps that are not counted")
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        record(raw, header(args))
        tiny(args, raw) if args.tiny else steps(args, raw)


def steps(args, raw):
    programs = [(f"torch {mode}", lambda size, mode=mode: run_peer(args, size, mode)) for mode in args.peers]
    programs += [(f"lockstep {precision}", lambda size, precision=precision: run_lockstep(args, size, precision))
                 for precision in args.precision]
    print("| size | program | tok/s | spread | ratio | peak MB | ratio | of FMA peak |")
    print("|---|---|---|---|---|---|---|---|")
    for size in args.sizes:
        results = {name: [] for name, _ in programs}
        peaks = []
        for repeat in range(args.repeats):
            peaks.append(float(subprocess.run([args.fma_peak, str(args.threads)], capture_output=True, check=True).stdout))
            record(raw, {"program": "fma_peak", "threads": args.threads, "gflops": peaks[-1]})
            # Every other repeat runs in reverse order, so that no program is always first.
            for name, run in programs[::-1] if repeat % 2 else programs:
                result = {"program": name, "size": size, "repeat": repeat, "load": os.getloadavg()[0]} | run(size)
                record(raw, result)
                results[name].append(result)
        table(size, results, max(peaks))


def table(size, results, peak):
    speed = {name: [r["tokens_per_second"] for r in runs] for name, runs in results.items()}
    median = {name: statistics.median(values) for name, values in speed.items()}
    memory = {name: statistics.median(r["peak_rss_mb"] for r in runs) for name, runs in results.items()}
    peer = next(iter(results))
    for name in results:
        share = f"{flops_per_token(size) * median[name] / peak / 1e9:.0%} of {peak:.0f}"
        spread = f"{min(speed[name]):,.0f}–{max(speed[name]):,.0f}"
        print(f"| {size} | {name} | {median[name]:,.0f} | {spread} | {median[name] / median[peer]:.2f} "
              f"| {memory[name]:,.0f} | {memory[name] / memory[peer]:.2f} | {share} |", flush=True)
    if {"lockstep fp32", "lockstep bf16"} <= median.keys():
        print(f"| {size} | bf16 / fp32 | | | {median['lockstep bf16'] / median['lockstep fp32']:.2f} | | "
              f"{memory['lockstep bf16'] / memory['lockstep fp32']:.2f} | |", flush=True)


def flops_per_token(size):
    """6·(parameters without the embedding) + 6·L·T·d: matmuls, forward and backward, and causal attention."""
    dim, layers, hidden, seq = (SIZES[size][key] for key in ("dim", "layers", "hidden", "seq"))
    parameters = layers * (4 * dim * dim + 3 * dim * hidden) + VOCAB * dim
    return 6 * parameters + 6 * layers * seq * dim


def tiny(args, raw):
    wall = []
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory() as folder:
            write_run(args, folder, "tiny", batch=8, seq=256, steps=1, precision="fp32")
            usage = run([args.lockstep, "train", f"{folder}/run.yaml", *args.set], f"{folder}/log")
        wall.append(usage["wall_seconds"])
        record(raw, {"program": "lockstep", "size": "tiny"} | usage)
    print(f"start to first step: median {statistics.median(wall):.3f} s, "
          f"{min(wall):.3f}–{max(wall):.3f}, {STARTS} processes")


def run_peer(args, size, mode):
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, str(HERE / "peer.py"), size, "--threads", str(args.threads), "--steps", str(args.steps)]
        usage = run([*command, "--mode", mode], f"{folder}/log", OMP_NUM_THREADS=str(args.threads))
        lines = pathlib.Path(folder, "log").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith("{"))) | usage


def run_lockstep(args, size, precision):
    shape = SIZES[size]
    tokens = shape["batch"] * shape["seq"]
    with tempfile.TemporaryDirectory() as folder:
        write_run(args, folder, MODEL.format(**shape), shape["batch"], shape["seq"], args.steps, precision)
        usage = run([args.lockstep, "train", f"{folder}/run.yaml", *args.set], f"{folder}/log")
        lines = pathlib.Path(folder, "out/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    if [m["tokens"] for m in metrics] != [tokens] * args.steps:
        raise SystemExit(f"error: {args.steps} steps of {tokens} tokens expected, got {[m['tokens'] for m in metrics]}")
    seconds = [m["step_seconds"] for m in metrics]
    return {
        "threads": args.threads, "tokens_per_step": tokens, "step_seconds": seconds,
        "tokens_per_second": round(tokens / statistics.median(seconds[DROPPED_STEPS:]), 1),
        "losses": [m["loss"] for m in metrics], "set": args.set,
    } | usage


def write_run(args, folder, model, batch, seq, steps, precision):
    """Write the config and the data of a Lockstep run. A row of n bytes and its end token give n positions."""
    random.seed(0)
    letters = string.ascii_letters + " "
    with open(f"{folder}/rows.jsonl", "w") as out:
        for _ in range(batch * steps):
            out.write(json.dumps({"text": "".join(random.choices(letters, k=seq))}) + "\n")
    pathlib.Path(folder, "run.yaml").write_text(CONFIG.format(
        model=model, folder=folder, max_length=seq + 1, batch=batch, steps=steps, precision=precision,
        threads=args.threads))


def run(command, log, **env):
    """Run one process to its end. Its peak memory comes from wait4, for every program."""
    with open(log, "w") as out:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = pathlib.Path(log).read_text()[-2000:]
        raise SystemExit(f"error: {' '.join(command)} exited with {child.returncode}:\n{tail}")
    return {"wall_seconds": round(wall, 4), "peak_rss_mb": round(usage.ru_maxrss / 1024, 1)}


def header(args):
    """Describe the run and the machine, without paths, which differ between machines."""
    settings = {key: value for key, value in vars(args).items() if key not in ("lockstep", "python", "fma_peak")}
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    version = subprocess.run([args.lockstep, "--version"], capture_output=True, text=True).stdout.strip()
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"time": now, "cpu": names[:1], "cores": os.cpu_count(), "lockstep": version, "settings": settings}


def record(raw, value):
    raw.write(json.dumps(value) + "\n")
    raw.flush()


if __name__ == "__main__":
    main()
