"""Train the shared model on the shared rows in PyTorch, in order; print one JSON line with the losses.

    python peer.py FOLDER --steps 200 --rows 2 --dtype fp32|bf16
"""

import argparse
import json
import pathlib

import torch
from transformers import LlamaForCausalLM


def main():
    args = argparse.ArgumentParser()
    args.add_argument("folder", type=pathlib.Path)
    args.add_argument("--steps", type=int, default=200)
    args.add_argument("--rows", type=int, default=2)
    args.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    args = args.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = LlamaForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32).cuda().train()
    rows = [json.loads(line)["input_ids"] for line in open(args.folder / "rows.jsonl")]
    decays = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-4, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    losses = []
    for step in range(args.steps):
        batch = torch.tensor(rows[step * args.rows:(step + 1) * args.rows], device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    print(json.dumps({"program": f"torch {args.dtype}", "version": torch.__version__, "losses": losses}))


main()
