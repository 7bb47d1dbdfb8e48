"""Compare Lockstep with TRL on this CPU: reward models, DPO, GRPO and PPO, in one run. Processes alternate.

    cargo build --release
    python run.py --python python --lockstep '../../target/release/lockstep train {config}' --repeats 3
    python run.py --python python --algorithms dpo --repeats 1          # TRL alone

`--lockstep` is Lockstep's command line. In it, {config}, {folder}, {algorithm} and {threads} are replaced; the
command reads {config} and leaves metrics.jsonl, with a `step_seconds` per step, in {folder}/out. `--set KEY=VALUE` sets
a key of the configuration. `--python` is an interpreter with torch, transformers and TRL 1.16; `--trl112` a folder
with TRL 1.12, the last release with PPO.

Both programs read the same random models (LLaMA of the given size, vocabulary 4096, f32) and the same rows:

    dpo      8 pairs a step, 64 prompt and 64 completion tokens each, sigmoid loss, a frozen copy as the reference
    reward   8 pairs of 128 tokens a step
    grpo     4 prompts of 32 tokens, 8 completions of 64 tokens each, beta 0, one optimizer step a rollout
    ppo      32 prompts of 32 tokens, one completion of 64 tokens each, 4 epochs of one mini-batch, no stop token

TRL bars the end token in GRPO, so that all completions have 64 tokens. Without that, one completion in 65 ends early.
The first steps of a process are not counted. Prints JSON lines, which also go to raw-<date>.jsonl: one per process,
then one per algorithm with medians over the processes' median step, spreads, the ratio of times (above 1: Lockstep is
faster) and the ratio of peak memory (below 1: Lockstep needs less).
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
VOCAB, PAD, EOS, FIRST_WORD = 4096, 0, 1, 3
SIZES = {
    "15m": dict(hidden_size=288, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768),
    "90m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048),
}
# Steps of a process, of which the first are not counted.
STEPS = {"dpo": (8, 2), "reward": (8, 2), "grpo": (5, 1), "ppo": (5, 1)}
SHAPES = {
    "dpo": dict(pairs=8, prompt=64, completion=64),
    "reward": dict(pairs=8, tokens=128),
    "grpo": dict(prompts=4, generations=8, prompt=32, new=64),
    "ppo": dict(prompts=32, prompt=32, new=64, epochs=4),
}
COMMON = """\
algorithm: {algorithm}
train_files: {folder}/rows.jsonl
packing: none
mixed_precision: fp32
recompute: none
shuffle: false
max_steps: {steps}
logging_steps: 1
save_strategy: "no"
threads: {threads}
output_dir: {folder}/out
"""
CONFIGS = {
    "dpo": """\
model_name_or_path: {folder}/policy
per_device_train_batch_size: 8
learning_rate: 1.0e-6
beta: 0.1
loss_type: sigmoid
max_length: 128
""",
    "reward": """\
model_name_or_path: {folder}/reward
per_device_train_batch_size: 8
learning_rate: 1.0e-4
max_length: 128
""",
    "grpo": """\
model_name_or_path: {folder}/policy
per_device_train_batch_size: 32
learning_rate: 1.0e-6
num_generations: 8
max_completion_length: 64
temperature: 1.0
beta: 0.0
reward_funcs: [{{regex: "w[0-9]*[02468]$"}}]
""",
    "ppo": """\
model_name_or_path: {folder}/policy
reward_model_path: {folder}/reward
value_model_path: {folder}/value
per_device_train_batch_size: 32
learning_rate: 3.0e-6
response_length: 64
temperature: 1.0
num_ppo_epochs: 4
num_mini_batches: 1
""",
}
# Run by the interpreter with torch: random models and the tokenizer that reads `rows.jsonl`.
MAKE_MODELS = """
import json, sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
folder, shape = sys.argv[1], json.loads(sys.argv[2])
words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(3, shape["vocab_size"])]
core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>",
                                    unk_token="<unk>", model_max_length=1024)
torch.manual_seed(7)
for name in ("policy", "reward", "value"):
    kind = LlamaForCausalLM if name == "policy" else LlamaForSequenceClassification
    labels = {} if name == "policy" else dict(num_labels=1)
    config = LlamaConfig(**shape, **labels, num_key_value_heads=shape["num_attention_heads"], rms_norm_eps=1e-5,
                         max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
                         eos_token_id=1, dtype="float32")
    kind(config).save_pretrained(f"{folder}/{name}")
    tokenizer.save_pretrained(f"{folder}/{name}")
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", metavar="COMMAND", help="Lockstep's command line; without it, TRL runs alone")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch, transformers and TRL")
    parser.add_argument("--trl112", default="trl112", help="folder with TRL 1.12, for PPO")
    parser.add_argument("--algorithms", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--size", choices=SIZES, default="15m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of a process; the default depends on the algorithm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of Lockstep")
    args = parser.parse_args()
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        record(raw, {"run": vars(args)})
        for algorithm in args.algorithms:
            with tempfile.TemporaryDirectory() as folder:
                measure(args, raw, algorithm, pathlib.Path(folder))


def measure(args, raw, algorithm, folder):
    steps, dropped = STEPS[algorithm]
    steps = args.steps or steps
    dropped = min(dropped, steps - 1)
    prepare(args, algorithm, folder, steps)
    programs = {"trl": trl_command(args, algorithm, folder, steps)}
    if args.lockstep:
        programs["lockstep"] = lockstep_command(args, algorithm, folder, steps)
    medians, peaks = {name: [] for name in programs}, {name: [] for name in programs}
    for repeat in range(args.repeats):
        for name in list(programs)[:: -1 if repeat % 2 else 1]:
            shutil.rmtree(folder / "out", ignore_errors=True)
            result = run(*programs[name])
            if name == "lockstep":
                result |= lockstep_steps(folder, SHAPES[algorithm].get("epochs", 1))
            medians[name].append(statistics.median(result["step_seconds"][dropped:]))
            peaks[name].append(result["peak_rss_mb"])
            record(raw, {"program": name, "algorithm": algorithm, "size": args.size, "repeat": repeat,
                         "load": os.getloadavg()[0], "shape": SHAPES[algorithm], "dropped": dropped,
                         "median_step_seconds": medians[name][-1]} | result)
    summary = {"algorithm": algorithm, "size": args.size, "threads": args.threads, "repeats": args.repeats}
    for name in programs:
        summary[name] = {"step_seconds": statistics.median(medians[name]), "lowest": min(medians[name]),
                         "highest": max(medians[name]), "peak_rss_mb": max(peaks[name])}
    if "lockstep" in programs:
        pairs = [a / b for a, b in zip(medians["trl"], medians["lockstep"])]
        summary["speed_ratio"] = summary["trl"]["step_seconds"] / summary["lockstep"]["step_seconds"]
        summary["speed_ratio_spread"] = [min(pairs), max(pairs)]
        summary["memory_ratio"] = summary["lockstep"]["peak_rss_mb"] / summary["trl"]["peak_rss_mb"]
    record(raw, {"summary": summary})


def prepare(args, algorithm, folder, steps):
    """Write models, shape.json and rows.jsonl: each row has exactly the tokens that the shape names."""
    shape = dict(vocab_size=VOCAB, **SIZES[args.size])
    subprocess.run([args.python, "-c", MAKE_MODELS, str(folder), json.dumps(shape)], check=True,
                   env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}, stderr=subprocess.DEVNULL)
    wanted = SHAPES[algorithm]
    (folder / "shape.json").write_text(json.dumps(wanted))
    draw = random.Random(7)

    def text(n):
        return " ".join(f"w{draw.randrange(FIRST_WORD, VOCAB)}" for _ in range(n))

    def completion(n):
        return f" {text(n - 1)} <eos>"

    def row():
        if algorithm == "dpo":
            return dict(prompt=text(wanted["prompt"]), chosen=completion(wanted["completion"]),
                        rejected=completion(wanted["completion"]))
        if algorithm == "reward":
            return dict(chosen=completion(wanted["tokens"])[1:], rejected=completion(wanted["tokens"])[1:])
        return dict(prompt=text(wanted["prompt"]))

    count = steps * (wanted.get("pairs") or wanted["prompts"])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))


def trl_command(args, algorithm, folder, steps):
    command = [args.python, str(HERE / "peer.py"), algorithm, str(folder), str(steps), str(args.threads)]
    return command, {"PYTHONPATH": args.trl112} if algorithm == "ppo" else {}


def lockstep_command(args, algorithm, folder, steps):
    # A step of TRL's PPO is a rollout with all of its epochs; Lockstep counts optimizer steps.
    steps *= SHAPES[algorithm].get("epochs", 1)
    values = dict(algorithm=algorithm, folder=folder, steps=steps, threads=args.threads)
    settings = dict(line.split(": ", 1) for line in (COMMON + CONFIGS[algorithm]).format(**values).splitlines())
    settings |= dict(pair.split("=", 1) for pair in args.set)
    config = folder / "lockstep.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    return shlex.split(args.lockstep.format(config=config, **values)), {}


def lockstep_steps(folder, epochs):
    """The seconds of every rollout or batch, and of its phases where the metrics have them."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_seconds" in line]
    phases = {key[:-len("_seconds")] for line in lines for key in line if key.endswith("_seconds")} - {"step"}
    groups = [lines[i:i + epochs] for i in range(0, len(lines), epochs)]

    def seconds(key):
        return [sum(line.get(key) or 0.0 for line in group) for group in groups]

    return {"step_seconds": seconds("step_seconds"),
            "phases": {name: seconds(f"{name}_seconds") for name in sorted(phases)}}


def run(command, extra):
    """Run a process to its end. Its peak memory is what the kernel counted for it and for its own children."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors, text=True, env=os.environ | extra)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
        out.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{errors.read()[-4000:]}")
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    return found | {"wall_seconds": round(seconds, 3), "peak_rss_mb": round(usage.ru_maxrss / 1024, 1)}


def record(raw, line):
    print(json.dumps(line), flush=True)
    raw.write(json.dumps(line) + "\n")
    raw.flush()


main()
