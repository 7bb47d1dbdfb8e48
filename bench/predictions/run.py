#!/usr/bin/env python3
"""Compare what `lockstep plan` predicts with what runs measure: step times and memory.

    cargo build --release
    python run.py --lockstep ../../target/release/lockstep                      # both parts on the CPU
    python run.py --lockstep ../../target/release/lockstep --parts memory
    python run.py --lockstep ../../target/release/lockstep --parts steps --sizes 15m --repeats 5
    python run.py --lockstep ../../target/release/lockstep --gpu                # steps on one GPU

Parts:

    steps    15m (8x256 tokens) and 90m (2x512) on 1 and 2 CPU ranks. Every repeat measures the rates of the CPU anew, as
             a first `lockstep plan` does, predicts all cases with them, and then runs all cases; every other repeat
             runs them in reverse order. Programs are pinned to as many cores as their ranks have threads, one hardware
             thread per core where the machine has enough. Cases that need more cores than there are get skipped.
    memory   the plan's total per rank against the peak resident memory that the run logs, once per case. `bounds` says
             whether the run holds what crates/cli/tests/memory.rs asserts.
    gpu      steps of random weights with `lockstep bench step`, vocabulary 32000, and the GPU memory that the driver
             reports.

An error is predicted / measured - 1. Each part prints its cases as they end, then tables. Raw lines are appended to
raw-<date>.jsonl in this folder (`--raw` names another file) as they come, so a run that is cut off keeps what it had.
After `--time-limit` seconds no new case begins. `--summarize RAW` prints the tables of a file of raw lines.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SIZES = {
    "15m": dict(dim=288, layers=6, heads=6, kv_heads=6, hidden=768, rows=8, length=256),
    "90m": dict(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, rows=2, length=512),
    "300m": dict(dim=1024, layers=24, heads=16, kv_heads=16, hidden=2816, rows=16, length=2048),
    "1b": dict(dim=2048, layers=22, heads=32, kv_heads=4, hidden=5632, rows=8, length=2048),
    "7b": dict(dim=4096, layers=32, heads=32, kv_heads=32, hidden=11008, rows=4, length=2048),
}
CPU_SIZES, CPU_VOCAB, GPU_VOCAB = ["15m", "90m"], 4096, 32000
# Steps of a run and how many of the first are not counted, by size and micro-batches per step.
STEPS = {("15m", 1): (10, 3), ("15m", 4): (5, 2), ("90m", 1): (6, 2), ("90m", 4): (4, 1)}
MODEL = """{{architectures: [LlamaForCausalLM], hidden_size: {dim}, intermediate_size: {hidden}, \
num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: {kv_heads}, vocab_size: {vocab}, \
tie_word_embeddings: false, max_position_embeddings: 4096}}"""
CONFIG = """\
model: {model}
train_files: rows.jsonl
tokenizer: byte
max_length: {max_length}
packing: none
per_device_train_batch_size: {rows}
save_strategy: "no"
output_dir: out
logging_steps: 1
"""
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
PEAK = re.compile(r"peak memory (\d+) bytes \(planned (\d+): arena (\d+), foreign (\d+)\)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep", metavar="PROGRAM")
    parser.add_argument("--parts", nargs="+", choices=["steps", "memory"], default=["steps", "memory"])
    parser.add_argument("--gpu", action="store_true", help="measure steps on a GPU instead")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="only these sizes")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the part `steps`")
    parser.add_argument("--steps", type=int, help="steps of a run in the part `steps`")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name contains this text")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--raw", help="file that raw lines are appended to")
    parser.add_argument("--summarize", metavar="RAW", help="print the tables of a file of raw lines")
    args = parser.parse_args()
    if args.summarize:
        lines = [json.loads(line) for line in open(args.summarize)]
        return summarize(lines)
    # Programs run in other folders.
    args.lockstep = str(pathlib.Path(args.lockstep).resolve())
    args.deadline = time.monotonic() + args.time_limit
    path = args.raw or HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl"
    with open(path, "a") as raw, tempfile.TemporaryDirectory() as folder:
        record = Record(raw)
        record.add(header(args))
        parts = {"steps": steps, "memory": memory, "gpu": gpu}
        for part in ["gpu"] if args.gpu else args.parts:
            (pathlib.Path(folder) / part).mkdir()
            parts[part](args, record, pathlib.Path(folder) / part)
        summarize(record.lines)


class Record:
    """Raw lines, in a file and in memory."""

    def __init__(self, raw):
        self.raw, self.lines = raw, []

    def add(self, line):
        self.lines.append(line)
        self.raw.write(json.dumps(line) + "\n")
        self.raw.flush()


def header(args):
    """Describe the run and the machine, without paths, which differ between machines."""
    hidden = ("lockstep", "raw", "summarize", "deadline")
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    settings["time_limit"] = None if args.time_limit == float("inf") else args.time_limit
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    version = subprocess.run([args.lockstep, "--version"], capture_output=True, text=True).stdout.strip()
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"time": now, "cpu": names[:1], "cores": len(os.sched_getaffinity(0)), "lockstep": version,
            "load": os.getloadavg()[0], "settings": settings}


# Steps on the CPU


def step_cases(sizes):
    """Every case with its name: settings, ranks, threads per rank."""
    def case(size, ranks, threads, precision="fp32", strategy="ddp", recompute="none", accumulation=1):
        name = f"{size} {ranks}x{threads} {precision} {strategy} {recompute} acc{accumulation}"
        shape = SIZES[size]
        settings = [f"mixed_precision={precision}", f"strategy={strategy}", f"recompute={recompute}",
                    f"gradient_accumulation_steps={accumulation}", f"threads={threads}", "device=cpu"]
        return dict(name=name, size=size, ranks=ranks, threads=threads, rows=shape["rows"] // ranks,
                    accumulation=accumulation, settings=settings)

    cases = []
    for size in sizes:
        for precision in ["fp32", "bf16"]:
            for recompute in ["none", "full"]:
                for accumulation in [1, 4]:
                    cases.append(case(size, 1, 2, precision, "ddp", recompute, accumulation))
        for threads in [1, 2]:
            for strategy in STRATEGIES:
                cases.append(case(size, 2, threads, "fp32", strategy))
                cases.append(case(size, 2, threads, "bf16", strategy))
        for strategy in STRATEGIES:
            cases.append(case(size, 2, 1, "fp32", strategy, accumulation=4))
        for strategy in ["ddp", "zero3"]:
            cases.append(case(size, 2, 1, "fp32", strategy, "full"))
            cases.append(case(size, 2, 1, "bf16", strategy, "full", 4))
    return cases


def steps(args, record, folder):
    cores = separate_cores()
    cases = [case for case in step_cases(args.sizes or CPU_SIZES) if args.match in case["name"]]
    few = [case for case in cases if case["ranks"] * case["threads"] > len(cores)]
    if few:
        say(f"{len(few)} cases need more than the {len(cores)} cores here and are skipped")
    cases = [case for case in cases if case not in few]
    for repeat in range(args.repeats):
        cache = folder / f"cache-{repeat}"
        for case in cases:
            case["prediction"] = predict(args, record, folder, case, cores, cache, repeat)
        order = cases[::-1] if repeat % 2 else cases
        for i, case in enumerate(order):
            if time.monotonic() > args.deadline:
                return say("the time limit is reached")
            line = measure_steps(args, folder, case, cores)
            line |= {"part": "steps", "name": case["name"], "repeat": repeat, "load": os.getloadavg()[0],
                     "prediction": case["prediction"]}
            record.add(line)
            say(f"repeat {repeat + 1}/{args.repeats}, case {i + 1}/{len(order)}: {case['name']}: {outcome(line)}")


def predict(args, record, folder, case, cores, cache, repeat):
    """The plan's prediction. The first one of its ranks, threads and stored type measures the rates and writes them."""
    write_run(folder, case["size"], case["rows"], num_rows=0)
    flags = ["--nproc", str(case["ranks"])] if case["ranks"] > 1 else []
    files = lambda: set((cache / "lockstep/rates").glob("*.json"))
    known = files()
    found = plan(args, folder, case["settings"] + flags, cores[:case["ranks"] * case["threads"]], cache)
    for rates in files() - known:
        record.add({"part": "rates", "repeat": repeat, "layout": rates.stem, "load": os.getloadavg()[0],
                    "rates": json.loads(rates.read_text())["rates"]})
    return found


def measure_steps(args, folder, case, cores):
    num_steps, dropped = STEPS[case["size"], case["accumulation"]]
    if args.steps:
        num_steps, dropped = args.steps, min(dropped, args.steps - 1)
    write_run(folder, case["size"], case["rows"], num_steps * case["rows"] * case["ranks"] * case["accumulation"])
    flags = ["--nproc", str(case["ranks"])] if case["ranks"] > 1 else []
    ran = run(args, folder, ["train", "run.yaml", f"max_steps={num_steps}", *case["settings"], *flags],
              cores[:case["ranks"] * case["threads"]], folder / "user-cache")
    if ran.returncode:
        return {"error": ran.stderr[-1000:]}
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    expected = case["rows"] * case["ranks"] * case["accumulation"] * SIZES[case["size"]]["length"]
    if [line["tokens"] for line in metrics] != [expected] * num_steps:
        return {"error": f"{num_steps} steps of {expected} tokens expected: {[line['tokens'] for line in metrics]}"}
    seconds = [line["step_seconds"] for line in metrics]
    return {"step_seconds": seconds, "measured": statistics.median(seconds[dropped:])}


# Memory of CPU ranks


def memory_cases():
    """Name, settings, ranks, and what kind of rows the case reads."""
    sft, cases = "text", []

    def case(name, settings="", ranks=1, rows=sft, size="15m"):
        cases.append(dict(name=f"{size} {name}", settings=settings.split(), ranks=ranks, rows=rows, size=size))

    for precision in ["fp32", "bf16", "fp16"]:
        case(f"{precision} none", f"mixed_precision={precision} recompute=none")
    for recompute in ["selective", "full"]:
        case(f"fp32 {recompute}", f"mixed_precision=fp32 recompute={recompute}")
    case("bf16 full acc4", "mixed_precision=bf16 recompute=full gradient_accumulation_steps=4")
    for where in ["cpu", "nvme"]:
        case(f"bf16 full offload_optimizer={where}", f"mixed_precision=bf16 recompute=full offload_optimizer={where}")
    case("bf16 full zero3 all on nvme",
         "mixed_precision=bf16 recompute=full strategy=zero3 offload_optimizer=nvme offload_param=nvme")
    for strategy in [*STRATEGIES, "shard_grad_op"]:
        case(f"2 ranks fp32 {strategy}", f"mixed_precision=fp32 recompute=selective strategy={strategy}", ranks=2)
    case("2 ranks fp16 zero2 acc2",
         "mixed_precision=fp16 recompute=full strategy=zero2 gradient_accumulation_steps=2", ranks=2)
    case("2 ranks bf16 zero3 offload_optimizer=cpu",
         "mixed_precision=bf16 recompute=full strategy=zero3 offload_optimizer=cpu", ranks=2)
    case("4 ranks bf16 ddp acc2", "mixed_precision=bf16 recompute=selective strategy=ddp gradient_accumulation_steps=2",
         ranks=4)
    case("4 ranks fp32 zero1", "mixed_precision=fp32 recompute=none strategy=zero1", ranks=4)
    case("4 ranks bf16 zero2", "mixed_precision=bf16 recompute=none strategy=zero2", ranks=4)
    case("4 ranks fp32 zero3", "mixed_precision=fp32 recompute=full strategy=zero3", ranks=4)
    case("fp32 none", "mixed_precision=fp32 recompute=none", size="90m")
    case("bf16 full offload_optimizer=nvme", "mixed_precision=bf16 recompute=full offload_optimizer=nvme", size="90m")
    case("2 ranks fp32 zero3", "mixed_precision=fp32 recompute=selective strategy=zero3", ranks=2, size="90m")
    case("4 ranks bf16 zero2", "mixed_precision=bf16 recompute=selective strategy=zero2", ranks=4, size="90m")
    case("reward", "algorithm=reward mixed_precision=fp32 recompute=none", rows="pairs")
    case("2 ranks reward zero2", "algorithm=reward mixed_precision=bf16 strategy=zero2", ranks=2, rows="pairs")
    case("dpo", "algorithm=dpo mixed_precision=fp32 recompute=none", rows="pairs")
    case("2 ranks dpo zero3", "algorithm=dpo mixed_precision=bf16 strategy=zero3", ranks=2, rows="pairs")
    # The rollouts of these runs have the lengths that the plan assumes: the longest that are allowed.
    rollout = "max_prompt_length=128 max_completion_length=64 max_length=192"
    ppo = f"algorithm=ppo reward_model_path=reward/model {rollout}"
    case("ppo", f"{ppo} mixed_precision=fp32 recompute=none", rows="prompts")
    case("2 ranks ppo zero2", f"{ppo} mixed_precision=bf16 strategy=zero2", ranks=2, rows="prompts")
    grpo = f"algorithm=grpo num_generations=4 reward_funcs=[format] {rollout}"
    case("grpo", f"{grpo} beta=0.1 mixed_precision=fp32 recompute=none", rows="prompts")
    case("2 ranks grpo zero3", f"{grpo} mixed_precision=bf16 strategy=zero3", ranks=2, rows="prompts")
    return cases


def memory(args, record, folder):
    cases = [case for case in memory_cases() if args.match in case["name"]]
    cases = [case for case in cases if not args.sizes or case["size"] in args.sizes]
    for i, case in enumerate(cases):
        if time.monotonic() > args.deadline:
            return say("the time limit is reached")
        line = measure_memory(args, folder, case)
        record.add({"part": "memory", "name": case["name"], "settings": case["settings"]} | line)
        say(f"memory, case {i + 1}/{len(cases)}: {case['name']}: {outcome(line)}")


def measure_memory(args, folder, case):
    shape = SIZES[case["size"]]
    write_run(folder, case["size"], max(1, shape["rows"] // case["ranks"]), 16 * shape["rows"], case["rows"])
    settings = case["settings"] + ["threads=1", "device=cpu"]
    if "reward_model_path=reward/model" in settings and not (folder / f"reward-{case['size']}").exists():
        make_reward_model(args, folder, case["size"])
    if case["ranks"] > 1:
        settings += ["--nproc", str(case["ranks"])]
    cores, cache = sorted(os.sched_getaffinity(0)), folder / "user-cache"
    planned = plan(args, folder, settings, cores, cache, measure=False)
    if "error" in planned:
        return planned
    ran = run(args, folder, ["train", "run.yaml", "max_steps=2", *settings], cores, cache)
    if ran.returncode:
        return {"error": ran.stderr[-1000:]}
    found = PEAK.findall((folder / "out/logs/training.log").read_text())
    peak, planned_by_run, arena, foreign = map(int, found[-1])
    # What crates/cli/tests/memory.rs asserts.
    holds = 0.98 * arena <= peak <= 1.02 * arena + foreign and peak >= arena + 0.3 * foreign
    return {"predicted": planned["memory_bytes"], "planned_by_run": planned_by_run, "arena": arena,
            "foreign": foreign, "measured": peak, "holds": holds}


def make_reward_model(args, folder, size):
    """A reward model with random weights in reward/model. Leaves the case's configuration and rows as they were."""
    kept = {name: (folder / name).read_text() for name in ["run.yaml", "rows.jsonl"]}
    write_run(folder, size, 2, 8, "pairs")
    settings = ["algorithm=reward", "max_steps=0", "output_dir=reward", "device=cpu", "threads=1"]
    ran = run(args, folder, ["train", "run.yaml", *settings], sorted(os.sched_getaffinity(0)), folder / "user-cache")
    if ran.returncode:
        say(f"cannot make a reward model: {ran.stderr[-1000:]}")
    (folder / f"reward-{size}").touch()
    for name, text in kept.items():
        (folder / name).write_text(text)


# Steps on a GPU


def gpu_cases():
    def case(size, num_steps, *settings):
        return dict(name=" ".join([size, *settings]), size=size, steps=num_steps, settings=list(settings))

    return [
        case("300m", 12, "recompute=selective"),
        case("1b", 12, "recompute=selective"),
        case("7b", 5, "recompute=full"),
        case("7b", 5, "recompute=auto"),
        case("7b", 5, "memory_budget_gib=44", "offload_optimizer=cpu"),
        case("7b", 5, "memory_budget_gib=44", "offload_optimizer=cpu", "recompute=full"),
    ]


def gpu(args, record, folder):
    cases = [case for case in gpu_cases() if args.match in case["name"]]
    cases = [case for case in cases if not args.sizes or case["size"] in args.sizes]
    cores = sorted(os.sched_getaffinity(0))
    for i, case in enumerate(cases):
        if time.monotonic() > args.deadline:
            return say("the time limit is reached")
        begun = time.monotonic()
        shape, settings = SIZES[case["size"]], [*case["settings"], "mixed_precision=bf16", "device=cuda"]
        write_run(folder, case["size"], shape["rows"], 0, vocab=GPU_VOCAB)
        line = {"part": "gpu", "name": case["name"],
                "prediction": plan(args, folder, settings, cores, folder / "user-cache")}
        bench = ["bench", "step", "--rows", str(shape["rows"]), "--length", str(shape["length"]), "--vocab",
                 str(GPU_VOCAB), "--steps", str(case["steps"]), "--json", f"model={case['size']}", *settings]
        ran = run(args, folder, bench, cores, folder / "user-cache")
        if ran.returncode:
            line["error"] = ran.stderr[-1000:]
        else:
            line["bench"] = json.loads(ran.stdout)
            line["measured"] = statistics.median(line["bench"]["step_seconds"][2:])
        line["wall_seconds"] = round(time.monotonic() - begun, 1)
        record.add(line)
        say(f"gpu, case {i + 1}/{len(cases)}, {line['wall_seconds']} s: {case['name']}: {outcome(line)}")


# Programs and their files


def write_run(folder, size, rows, num_rows, kind="text", vocab=CPU_VOCAB):
    """Write run.yaml and rows.jsonl. A row of n bytes and its end token give n positions, so every row is full."""
    shape, draw = SIZES[size], random.Random(0)
    letters = string.ascii_letters + " "

    def text(num_bytes):
        return "".join(draw.choices(letters, k=num_bytes))

    def row():
        length = shape["length"]
        if kind == "pairs":
            # A pair has up to max_length tokens on each side, with the end token.
            return dict(prompt=text(length // 2), chosen=text(length // 2), rejected=text(length // 2))
        return dict(prompt=text(128)) if kind == "prompts" else dict(text=text(length))

    max_length = shape["length"] + 1
    model = MODEL.format(vocab=vocab, **shape)
    (folder / "run.yaml").write_text(CONFIG.format(model=model, max_length=max_length, rows=rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(num_rows)))
    shutil.rmtree(folder / "out", ignore_errors=True)


def plan(args, folder, settings, cores, cache, measure=True):
    """The chosen strategy's prediction, and the bytes of a rank. On a CPU the memory is the device's and the host's."""
    ran = run(args, folder, ["plan", "run.yaml", "--json", *settings], cores, cache, measure)
    if ran.returncode:
        return {"error": ran.stderr[-1000:]}
    found = json.loads(ran.stdout)
    row = next(row for row in found["comparison"]["strategies"] if row["chosen"])
    total = found["memory"]["total"]
    is_gpu = "device=cuda" in settings
    return {"step_seconds": row["prediction"]["step_seconds"], "busy_seconds": row["prediction"]["busy_seconds"],
            "exposed": row["prediction"]["exposed_communication_seconds"], "basis": found["rates"],
            "memory_bytes": total["device_bytes"] + (0 if is_gpu else total["host_bytes"])}


def run(args, folder, arguments, cores, cache, measure=True):
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    if not measure:
        env["LOCKSTEP_MEASURE"] = "0"
    return subprocess.run([args.lockstep, *arguments], cwd=folder, env=env, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, cores))


def separate_cores():
    """Hardware threads that this process may use, the first one of every core before all others."""
    allowed, first, others, seen = sorted(os.sched_getaffinity(0)), [], [], set()
    for cpu in allowed:
        path = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = path.read_text().strip() if path.exists() else str(cpu)
        (others if core in seen else first).append(cpu)
        seen.add(core)
    return first + others


# Tables


def outcome(line):
    found = predicted(line), line.get("measured")
    if "error" in line or None in found:
        return f"failed: {line.get('error') or line['prediction'].get('error')}"
    unit, scale = ("MiB", 1 << 20) if "arena" in line else ("ms", 1e-3)
    return f"predicted {found[0] / scale:.1f} {unit}, measured {found[1] / scale:.1f} {unit}, {percent(*found)}"


def predicted(line):
    return line["predicted"] if "predicted" in line else line.get("prediction", {}).get("step_seconds")


def percent(predicted, measured):
    return f"{100 * (predicted / measured - 1):+.1f} %"


def summarize(lines):
    complete = [line for line in lines if "part" in line and predicted(line) and line.get("measured")]
    by_part = {part: [line for line in complete if line["part"] == part] for part in ["steps", "memory", "gpu"]}
    for part, table in [("steps", steps_table), ("gpu", gpu_table), ("memory", memory_table)]:
        if by_part[part]:
            table(by_part[part])
    failed = [line for line in lines if line.get("part") in by_part and line not in complete]
    for line in failed:
        say(f"failed: {line['part']}: {line['name']}")


def steps_table(lines):
    say("\n| case | predicted, ms | measured, ms | spread | error |\n|---|---|---|---|---|")
    errors = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        runs = [line for line in lines if line["name"] == name]
        values = [line["measured"] for line in runs]
        guess, value = statistics.median(map(predicted, runs)), statistics.median(values)
        errors[name] = guess / value - 1
        say(f"| {name} | {1e3 * guess:.1f} | {1e3 * value:.1f} | {1e3 * min(values):.1f} to {1e3 * max(values):.1f} "
            f"| {percent(guess, value)} |")
    worst_and_median(errors)
    say("\n| of the cases with | cases | median error | lowest | highest |\n|---|---|---|---|---|")
    words = dict.fromkeys(word for name in errors for word in name.split())
    for word in words:
        some = [error for name, error in errors.items() if word in name.split()]
        say(f"| {word} | {len(some)} | {100 * statistics.median(some):+.1f} % | {100 * min(some):+.1f} % "
            f"| {100 * max(some):+.1f} % |")


def gpu_table(lines):
    say("\n| case | predicted, ms | measured, ms | error | planned, GiB | driver, GiB | error |")
    say("|---|---|---|---|---|---|---|")
    for line in lines:
        guess, value = predicted(line), line["measured"]
        memory = [line["prediction"]["memory_bytes"], line["bench"]["driver_bytes"]]
        cells = [f"{1e3 * guess:.1f}", f"{1e3 * value:.1f}", percent(guess, value)]
        cells += [f"{bytes / (1 << 30):.2f}" for bytes in memory] + [percent(*memory)]
        say(f"| {line['name']} | {' | '.join(cells)} |")
    worst_and_median({line["name"]: predicted(line) / line["measured"] - 1 for line in lines})


def memory_table(lines):
    say("\n| case | plan, MiB | planned by the run | arena | peak | error | bounds |\n|---|---|---|---|---|---|---|")
    for line in lines:
        sizes = [line[key] / (1 << 20) for key in ["predicted", "planned_by_run", "arena", "measured"]]
        cells = [f"{size:.1f}" for size in sizes] + [percent(line["predicted"], line["measured"])]
        say(f"| {line['name']} | {' | '.join(cells)} | {'holds' if line['holds'] else 'BROKEN'} |")
    worst_and_median({line["name"]: line["predicted"] / line["measured"] - 1 for line in lines})


def worst_and_median(errors):
    worst = max(errors, key=lambda name: abs(errors[name]))
    median = statistics.median(abs(error) for error in errors.values())
    say(f"\n{len(errors)} cases: median of absolute errors {100 * median:.1f} %, worst {100 * errors[worst]:+.1f} % "
        f"({worst})")


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
