"""Run transformers' `generate` on a model folder: greedy, f32, one batch of prompts of equal length.

    python peer.py FOLDER PROMPTS.json NEW THREADS

Prints one JSON line: the new tokens per second of the second of two calls, and the tokens.
"""

import json
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM, logging


def main():
    folder, prompts, new, threads = sys.argv[1:]
    logging.set_verbosity_error()
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(json.loads(pathlib.Path(prompts).read_text()))
    for _ in range(2):
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=int(new),
                                 pad_token_id=0)
        seconds = time.perf_counter() - begun
    rows = out[:, ids.shape[1]:].tolist()
    print(json.dumps({"tokens_per_second": len(rows) * len(rows[0]) / seconds, "rows": rows}))


main()
