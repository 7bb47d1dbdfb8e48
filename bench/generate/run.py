"""Compare `lockstep generate` with transformers' `generate`, in one run: processes alternate under the same load.

    cargo build --release
    python run.py --lockstep ../../target/release/lockstep --repeats 5 --sizes 15m 90m

Run it with an interpreter that has torch, transformers and safetensors. The models are random, f32, with a vocabulary
of 4096. 16 prompts of 32 tokens are decoded greedily for 128 tokens each, without an end token. Loading is not counted;
transformers runs twice in its process, and the second call counts. Raw lines are appended to raw-<date>.jsonl. The
table has medians, spreads, the ratio, and for how many of the 16 prompts both chose the same 128 tokens (where the two
likeliest tokens are close, rounding may make two correct programs differ).
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SIZES = {
    "15m": dict(hidden_size=288, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768),
    "90m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048),
}
VOCAB, PROMPT = 4096, 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["15m", "90m"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        record(raw, {"run": vars(args), "lockstep_version": version(args)})
        print("| size | program | tok/s | spread | ratio | same rows |\n|---|---|---|---|---|---|")
        for size in args.sizes:
            with tempfile.TemporaryDirectory() as folder:
                measure(args, raw, size, pathlib.Path(folder))


def measure(args, raw, size, folder):
    make_model(size, folder)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(args.batch)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    lines = (json.dumps({"prompt": " ".join(f"t{i}" for i in ids)}) for ids in prompts)
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    programs = {"transformers": run_peer, "lockstep": run_lockstep}
    speeds, rows = {name: [] for name in programs}, {}
    for repeat in range(args.repeats):
        for name in list(programs)[:: -1 if repeat % 2 else 1]:
            result = programs[name](args, folder)
            rows[name] = result.pop("rows")
            speeds[name].append(result["tokens_per_second"])
            record(raw, {"program": name, "size": size, "repeat": repeat, "load": os.getloadavg()[0]} | result)
    base = statistics.median(speeds["transformers"])
    same = sum(a == b for a, b in zip(rows["transformers"], rows["lockstep"]))
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"| {size} | {name} | {median:,.0f} | {min(values):,.0f}–{max(values):,.0f} | {median / base:.2f} "
              f"| {same} of {args.batch} |", flush=True)


def make_model(size, folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(7)
    shape = SIZES[size]
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False,
                         num_key_value_heads=shape["num_attention_heads"], bos_token_id=None, eos_token_id=None,
                         initializer_range=0.1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}))


def run_peer(args, folder):
    command = [sys.executable, str(HERE / "peer.py"), str(folder), str(folder / "prompts.json"), str(args.new), str(args.threads)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    return json.loads(out.stdout.strip().splitlines()[-1])


def run_lockstep(args, folder):
    command = [args.lockstep, "generate", str(folder), "--prompts", str(folder / "prompts.jsonl"), "--json", "--threads",
               str(args.threads), "--slots", str(args.batch), "--max-new-tokens", str(args.new), "--context",
               str(PROMPT + args.new)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line)["tokens"] for line in out.stdout.splitlines()]
    seconds = float(re.search(r"in ([0-9.]+) s", out.stderr).group(1))
    return {"tokens_per_second": sum(map(len, rows)) / seconds, "rows": rows}


def version(args):
    return subprocess.run([args.lockstep, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def record(raw, line):
    raw.write(json.dumps(line) + "\n")
    raw.flush()


main()
