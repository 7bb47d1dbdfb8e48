"""Check that transformers loads a folder written by Lockstep, unchanged.

    python check_export.py DIR TOKENS_JSON

TOKENS_JSON is a list of token ids, or an object {"tokens": [...], "logits": [[...], ...]}. With logits (Lockstep's, one
row per token), they are compared with transformers' in f32 and the largest difference is printed. The greedy
continuation is printed as text if DIR has a tokenizer, otherwise as ids.

Exits with 1 on missing, unexpected or mismatched tensors, on values that are not finite, and on logits that differ by
more than 1e-3. Needs the packages that make.py lists.
"""

import json
import pathlib
import sys

import torch
import transformers

NEW_TOKENS = 24
LOGITS_TOLERANCE = 1e-3


def main(folder, tokens_json):
    transformers.logging.disable_progress_bar()
    given = json.loads(pathlib.Path(tokens_json).read_text())
    given = given if isinstance(given, dict) else {"tokens": given}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(key):
            sys.exit(f"error: {key}: {sorted(map(str, info[key]))}")
    dtype, parameters = model.dtype, sum(p.numel() for p in model.parameters())

    # Load again in f32, because Lockstep computes in f32 from the stored weights.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([given["tokens"]])
    if tokens.shape[1] < 2 or tokens.max() >= model.config.vocab_size:
        sys.exit(f"error: {tokens_json} needs two or more tokens, all below {model.config.vocab_size}")
    with torch.no_grad():
        logits = model(tokens).logits[0]
        greedy = model.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False)[0, tokens.shape[1]:]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]).item()
    if not logits.isfinite().all():
        sys.exit("error: logits are not finite")
    if "logits" in given:
        ours = torch.tensor(given["logits"])
        if ours.shape != logits.shape:
            sys.exit(f"error: logits are {list(logits.shape)}, {tokens_json} has {list(ours.shape)}")
        difference = (ours - logits).abs().max().item()
        print(f"logits: largest difference {difference:.2e}, largest magnitude {logits.abs().max().item():.2f}")
        if not difference <= LOGITS_TOLERANCE:
            sys.exit(f"error: logits differ by more than {LOGITS_TOLERANCE}")
    if (pathlib.Path(folder) / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        print(f"prompt: {tokenizer.decode(tokens[0])!r}")
        print(f"greedy: {tokenizer.decode(greedy)!r}")
    else:
        print(f"greedy: {greedy.tolist()}")
    print(f"ok: transformers {transformers.__version__} loads {folder}, {parameters} parameters, "
          f"dtype {str(dtype).removeprefix('torch.')}, loss {loss:.6f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
