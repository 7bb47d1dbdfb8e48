"""Compares LoRA training with PEFT: ten steps from the same weights, adapters and data, and each other's folders.

    python goldens/check_lora.py --lockstep target/release/lockstep

Needs torch, transformers, peft and safetensors. Prints the largest difference of the losses, which must be below 1e-4,
and of the logits after loading Lockstep's adapter in PEFT, PEFT's in Lockstep, and a merged model.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, TOKENS, VOCAB, RANK = 10, 4, 64, 320, 8
# Larger ones amplify rounding: ten steps of AdamW at 1e-2 differ by 1.7e-4.
LEARNING_RATE = 2e-3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--rslora", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), str(Path(args.lockstep).resolve()), args.rslora)


def compare(folder, lockstep, rslora):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    rows = [torch.randint(0, VOCAB, (TOKENS,)).tolist() for _ in range(STEPS * ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=24, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    model.save_pretrained(folder / "start")

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)
    theirs = []
    for step in range(STEPS):
        batch = torch.tensor(rows[step * ROWS : (step + 1) * ROWS])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        theirs.append(loss.item())
    model.save_pretrained(folder / "theirs")

    settings = {
        "model_name_or_path": folder / "base", "adapter_name_or_path": folder / "start", "tokenizer": "none",
        "train_files": folder / "rows.jsonl", "output_dir": folder / "run", "max_length": TOKENS, "max_steps": STEPS,
        "per_device_train_batch_size": ROWS, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "shuffle": "false",
        "packing": "none", "device": "cpu", "algorithm": "clm",
    }
    run(lockstep, "train", *[f"{key}={value}" for key, value in settings.items()])
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ours = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"losses of {STEPS} steps: {theirs[0]:.6f} to {theirs[-1]:.6f}, largest difference {difference:.2e}")
    assert difference < 1e-4, (ours, theirs)

    probe = torch.tensor(rows[:2])
    logits = lambda model: model.eval()(input_ids=probe).logits.detach()
    want = logits(model)
    base = LlamaForCausalLM.from_pretrained(folder / "base")
    loaded = PeftModel.from_pretrained(base, folder / "run" / "model")
    report("our adapter in PEFT", logits(loaded), want)
    for source, name in [(folder / "run", "our"), (folder / "theirs", "their")]:
        extra = [] if name == "our" else ["--model", str(folder / "base")]
        run(lockstep, "export", str(source), str(folder / f"{name}-merged"), "--merge", *extra)
        merged = LlamaForCausalLM.from_pretrained(folder / f"{name}-merged")
        report(f"{name} adapter, merged by Lockstep", logits(merged), want)


def report(what, found, want):
    difference = (found - want).abs().max().item()
    print(f"{what}: largest difference of logits {difference:.2e}")
    assert difference < 2e-3, what


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    main()
