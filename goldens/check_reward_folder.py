#!/usr/bin/env python3
"""Check that transformers loads a reward model that Lockstep has trained, and gives the same scores.

    python goldens/check_reward_folder.py --lockstep target/release/lockstep

Needs torch and transformers. Trains a small reward model, evaluates it with Lockstep on held-out pairs, loads the folder
with `AutoModelForSequenceClassification` and compares accuracy, margin and rewards. Then trains on from the folder, which
shows that Lockstep loads it, too.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--lockstep", type=pathlib.Path, default=pathlib.Path("target/release/lockstep"))
args = parser.parse_args()

import torch
from transformers import AutoModelForSequenceClassification

MODEL = dict(architecture="LlamaForCausalLM", hidden_size=64, intermediate_size=192, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=128)


def write_pairs(path, seed, count):
    draw = random.Random(seed)
    with open(path, "w") as out:
        for _ in range(count):
            prompt = "".join(draw.choice("abc") for _ in range(8)) + ":"
            good = "".join(draw.choice("xy") for _ in range(draw.randrange(1, 9)))
            bad = "".join(draw.choice("uv") for _ in range(draw.randrange(1, 9)))
            out.write(json.dumps(dict(prompt=prompt, chosen=good, rejected=bad)) + "\n")


def train(folder, name, **settings):
    config = dict(algorithm="reward", device="cpu", tokenizer="byte", train_files="train.jsonl", eval_files="held_out.jsonl",
                  per_device_train_batch_size=8, max_length=48, learning_rate=1e-3, max_steps=40, eval_steps=40,
                  logging_steps=10, save_strategy="no", output_dir=name) | settings
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    done = subprocess.run([args.lockstep.resolve(), "train", f"{name}.yaml"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_accuracy" in line][-1]


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_pairs(folder / "train.jsonl", 1, 400)
    write_pairs(folder / "held_out.jsonl", 2, 64)
    ours = train(folder, "first", model=MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "first/model", dtype=torch.float32).eval()
    eos = model.config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos

    def score(text):
        with torch.no_grad():
            return model(torch.tensor([list(text.encode()) + [eos]])).logits[0, 0].item()

    rows = [json.loads(line) for line in open(folder / "held_out.jsonl")]
    rewards = [(score(row["prompt"] + row["chosen"]), score(row["prompt"] + row["rejected"])) for row in rows]
    theirs = dict(eval_accuracy=sum(a > b for a, b in rewards) / len(rewards),
                  eval_margin=sum(a - b for a, b in rewards) / len(rewards),
                  eval_mean_reward=sum(a + b for a, b in rewards) / 2 / len(rewards),
                  eval_min_reward=min(min(pair) for pair in rewards), eval_max_reward=max(max(pair) for pair in rewards))
    for key, value in theirs.items():
        print(f"{key:18} Lockstep {ours[key]:.6f}   transformers {value:.6f}")
        if abs(ours[key] - value) > 1e-4:
            sys.exit(f"{key} differs")
    again = train(folder, "second", model_name_or_path="first/model", max_steps=1, eval_steps=1, learning_rate=0.0)
    print(f"loaded by Lockstep: accuracy {again['eval_accuracy']:.6f}, margin {again['eval_margin']:.6f}")
    if abs(again["eval_margin"] - ours["eval_margin"]) > 1e-5:
        sys.exit("Lockstep's own folder gives another margin")
