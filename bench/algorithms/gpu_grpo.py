#!/usr/bin/env python3
"""Report a GRPO step on one GPU by phase, beside what the hardware allows.

    python gpu_grpo.py --lockstep ../../target/release/lockstep            # 1b: 8 prompts, 8 completions of 512 tokens

The model is random (LLaMA of a named size, vocabulary 32,000, bf16) and the reward is a regular expression, so nothing
is learned: this measures speed. Hardly any completion ends early, because one id in 32,000 is the end token. Phases are
those of metrics.jsonl. The floors:

    rollout   every decoded token reads all weights once: parameters · 2 bytes · tokens / memory bandwidth
    update    6 · (parameters less the embedding) operations per token, over the matmul rate
    scoring   2 · (parameters less the embedding), likewise; only with --beta, which adds a reference model

Prints one JSON line per step and a table of medians.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

SIZES = {  # hidden, layers, heads, key-value heads, ffn
    "300m": (1024, 24, 16, 16, 2816),
    "1b": (2048, 22, 32, 4, 5632),
}
VOCAB = 32000


def write_tokenizer(folder):
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(3, VOCAB)]
    special = [dict(id=i, content=words[i], special=True, single_word=False, lstrip=False, rstrip=False,
                    normalized=False) for i in range(3)]
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None,
                     pre_tokenizer=dict(type="WhitespaceSplit"), post_processor=None, decoder=None,
                     model=dict(type="WordLevel", vocab={w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", tokenizer_class="PreTrainedTokenizerFast")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences of a micro-batch")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second, measured by a copy")
    parser.add_argument("--matmul", type=float, default=790e12, help="operations per second, measured at 8192^3")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    hidden, layers, heads, kv_heads, ffn = SIZES[args.size]
    head = hidden // heads
    block = hidden * (2 * heads * head + 2 * kv_heads * head) + 3 * hidden * ffn
    weights = layers * block + hidden * VOCAB
    sequences = args.prompts * args.generations
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tokenizer(folder / "tokenizer")
        draw = random.Random(7)
        with open(folder / "prompts.jsonl", "w") as out:
            for _ in range(args.prompts * args.steps):
                text = " ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(args.prompt_tokens))
                out.write(json.dumps(dict(prompt=text)) + "\n")
        config = dict(
            algorithm="grpo", tokenizer=str(folder / "tokenizer"), train_files=str(folder / "prompts.jsonl"),
            model=dict(architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=ffn,
                       num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                       max_position_embeddings=2048, vocab_size=VOCAB),
            per_device_train_batch_size=args.micro_batch, gradient_accumulation_steps=sequences // args.micro_batch,
            num_generations=args.generations, max_prompt_length=args.prompt_tokens,
            max_completion_length=args.new_tokens, beta=args.beta, learning_rate=1e-6, mixed_precision="bf16",
            reward_funcs=[{"regex": "w[0-9]*[02468]$"}], max_steps=args.steps, logging_steps=1, save_strategy="no",
            shuffle=False, output_dir=str(folder / "out"))
        (folder / "grpo.yaml").write_text(json.dumps(config))
        done = subprocess.run([args.lockstep, "train", str(folder / "grpo.yaml"), *args.set], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            sys.exit(done.stdout[-4000:])
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_seconds" in line]
    for line in steps:
        print(json.dumps(line))
    medians = {key: statistics.median(line[key] for line in steps[1:])
               for key in ("step_seconds", "generate_seconds", "reward_seconds", "score_seconds")}
    length = statistics.median(line.get("completions/mean_length", args.new_tokens) for line in steps[1:])
    rest = medians["step_seconds"] - sum(medians[k] for k in list(medians)[1:])
    tokens = sequences * (args.prompt_tokens + length)
    floors = {"generate_seconds": 2 * weights * length / args.bandwidth,
              "score_seconds": 2 * weights * tokens / args.matmul * (args.beta != 0),
              "update_seconds": 6 * weights * tokens / args.matmul}
    medians["update_seconds"] = rest
    print(f"{args.size}: {weights / 1e6:.0f} M weights in matmuls; {sequences} sequences of {args.prompt_tokens} + "
          f"{length:.0f} tokens; {sequences * length / medians['generate_seconds']:.0f} tokens/s decoded")
    for key, value in medians.items():
        floor = floors.get(key)
        print(f"{key:18} {value:8.3f}" + (f"   floor {floor:.3f}   {value / floor:.2f} of it" if floor else ""))


main()
