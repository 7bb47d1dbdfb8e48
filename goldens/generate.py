"""Write generate.json: the greedy output of transformers' `generate` for the golden models.

Run by hand, from this folder, after make.py, with the packages it lists:

    OMP_NUM_THREADS=1 python generate.py

For every case in f32: three prompts (the beginnings of the golden's documents) and the 64 tokens after each. Where the
two likeliest tokens are closer than rounding error, two correct programs may differ; `margin` is the smallest distance
of their logits in the sequence.
"""

import json
import pathlib

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, logging

HERE = pathlib.Path(__file__).resolve().parent
PROMPTS, NEW = [1, 5, 12], 64


def main():
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases = {}
    for path in sorted(HERE.glob("*/golden.safetensors")):
        folder = path.parent
        if folder.name.endswith(("-f16", "-bf16")):
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        tokens = load_file(path)["tokens"].astype(np.int64)
        rows = []
        for length in PROMPTS:
            prompt = torch.from_numpy(tokens[:length])[None]
            out = model.generate(prompt, do_sample=False, max_new_tokens=NEW, output_logits=True,
                                 return_dict_in_generate=True)
            top = torch.cat(out.logits).topk(2).values
            rows.append({
                "prompt": prompt[0].tolist(),
                "tokens": out.sequences[0, length:].tolist(),
                "margin": (top[:, 0] - top[:, 1]).min().item(),
            })
        cases[folder.name] = rows
    lines = (f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in cases.items())
    (HERE / "generate.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, rows in cases.items():
        print(name, "smallest margin", min(row["margin"] for row in rows))


main()
