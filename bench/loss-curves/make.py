"""Write what the runs of `run.sh` and `formats.sh` share: a 90m LLaMA with random weights, and rows of tokens.

    python make.py FOLDER [ROWS]

The tokens come from a small artificial language (a Markov chain over 256 words), so that there is something to learn.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, WORDS, LENGTH = 4096, 256, 513


def main():
    folder, num_rows = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
        intermediate_size=2048, max_position_embeddings=1024, tie_word_embeddings=False, rms_norm_eps=1e-5,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCAB)}, "unk_token": "w0"},
    }
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))

    random = np.random.default_rng(0)
    followers = random.integers(0, WORDS, (WORDS, 8))
    odds = random.dirichlet(np.full(8, 0.5), WORDS)
    with open(folder / "rows.jsonl", "w") as out:
        for _ in range(num_rows):
            words = [int(random.integers(0, WORDS))]
            while len(words) < LENGTH:
                words.append(int(random.choice(followers[words[-1]], p=odds[words[-1]])))
            out.write(json.dumps({"input_ids": words}) + "\n")


main()
