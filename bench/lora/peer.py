"""Train LoRA adapters with PEFT on the CPU, in a plain PyTorch loop: the baseline for Lockstep.

    python peer.py 15m --threads 2 --steps 8 --rank 16

Adapters on every linear layer of the blocks, alpha twice the rank, no dropout, f32, fused AdamW, no activation
checkpointing. Prints one JSON line: the seconds of every step, and the median tokens per second without the first two.
"""

import argparse
import json
import statistics
import time

import peft
import torch
import transformers

VOCAB, DROPPED_STEPS = 4096, 2
SIZES = {
    "15m": dict(dim=288, layers=6, heads=6, hidden=768, batch=8, seq=256),
    "90m": dict(dim=768, layers=12, heads=12, hidden=2048, batch=2, seq=512),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = SIZES[args.size]
    model = adapted(shape, args.rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds, losses = [], []
    for _ in range(args.steps):
        ids = torch.randint(VOCAB, (shape["batch"], shape["seq"]))
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    tokens = shape["batch"] * shape["seq"]
    print(json.dumps({
        "peft": peft.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "trained": sum(p.numel() for p in trained), "tokens_per_step": tokens, "step_seconds": seconds,
        "tokens_per_second": round(tokens / statistics.median(seconds[DROPPED_STEPS:]), 1), "losses": losses,
    }))


def adapted(shape, rank):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=shape["dim"], intermediate_size=shape["hidden"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], max_position_embeddings=2048, tie_word_embeddings=False, use_cache=False,
    )
    lora = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).train()


if __name__ == "__main__":
    main()
