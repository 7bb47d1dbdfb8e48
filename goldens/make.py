"""Write the golden files: small Hugging Face models and what PyTorch computes with them.

Run by hand, from this folder, when a case changes:

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    OMP_NUM_THREADS=1 python make.py [CASE ...]

The result is the same on every run with these versions on one kind of CPU. Letters: T tokens, V vocabulary.

<case>/config.json, generation_config.json, model.safetensors   as `save_pretrained` writes them, f32; cases in
    SHARDED have several files and an index, cases in OLD_SPELLING a config.json with the keys of transformers 4
<case>/golden.safetensors
    tokens, targets [T] u32; weights [T] f32, the 0/1 loss mask; cu_seqlens [documents+1] u32
    logits [T, V]; logp [T], of the targets; loss [] = sum(weights * -logp) / sum(weights)
    grad.<name>, for every tensor of model.safetensors: the gradient of that loss
    steps.tokens, steps.targets u32, steps.weights f32: ten steps of two micro-batches, end to end
    steps.micro_bounds [21] u32: micro-batch m is [bounds[m], bounds[m+1]) of the three above
    steps.cu_seqlens u32, each micro-batch's own, starting at 0; steps.cu_bounds [21] u32, their bounds
    steps.losses, steps.grad_norms (before clipping), steps.lr [10] f32; steps.final.<name>: the weights after
<case>-bf16, <case>-f16: the same model rounded to that type, and golden.safetensors with
    tokens, targets, weights, cu_seqlens, logits, logp, loss of the rounded weights

logits, logp, loss and grad are computed in float64 and rounded once; the ten steps run in float32, as users
run them. Every document goes through the model alone, so no document attends to another and positions start at 0.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
    Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup, logging)

HERE = pathlib.Path(__file__).resolve().parent
COMMON = dict(max_position_embeddings=64, attn_implementation="sdpa", bos_token_id=1, eos_token_id=2)
CASES = {
    # Grouped-query attention.
    "llama-untied": (LlamaForCausalLM, LlamaConfig(
        vocab_size=131, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, **COMMON)),
    # A head_dim other than hidden_size / heads.
    "llama-tied": (LlamaForCausalLM, LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=20, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, **COMMON)),
    # Norms on queries and keys.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(
        vocab_size=120, hidden_size=40, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, **COMMON)),
    # One key-value head, three layers.
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, **COMMON)),
}
SMALL = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8)
CASES |= {
    # A sliding window in every layer, shorter than the documents.
    "mistral": (MistralForCausalLM, MistralConfig(
        vocab_size=61, rms_norm_eps=1e-5, sliding_window=9, tie_word_embeddings=False, **SMALL, **COMMON)),
    # No sliding window; frequencies divided by a factor.
    "mistral-full-linear": (MistralForCausalLM, MistralConfig(
        vocab_size=59, sliding_window=None, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=500.0), **SMALL, **COMMON)),
    # Biases on queries, keys and values.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(
        vocab_size=61, tie_word_embeddings=False, **SMALL, **COMMON)),
    # A sliding window in the second layer; yarn with its own factor for cosines and sines.
    "qwen2-window-yarn": (Qwen2ForCausalLM, Qwen2Config(
        vocab_size=59, use_sliding_window=True, sliding_window=12, max_window_layers=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=300.0,
                             mscale=1.5, mscale_all_dim=0.5), **SMALL, **COMMON)),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(
        vocab_size=61, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=48, rope_theta=100.0), **SMALL, **COMMON)),
    # Biases on all seven projections.
    "llama-biases": (LlamaForCausalLM, LlamaConfig(
        vocab_size=59, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **SMALL, **COMMON)),
    # A sliding window in the first layer, by `layer_types`; biases; yarn without rounding of its ramp.
    "qwen3-window-yarn": (Qwen3ForCausalLM, Qwen3Config(
        vocab_size=61, attention_bias=True, use_sliding_window=True, sliding_window=7, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=300.0,
                             beta_fast=8, beta_slow=2, truncate=False), **SMALL, **COMMON)),
}
SHARDED = {"mistral", "qwen2-window-yarn"}
OLD_SPELLING = {"llama-llama3", "mistral-full-linear", "qwen2-window-yarn"}
ROUNDED = {"llama-tied": ("f16", torch.float16), "qwen3-tied": ("bf16", torch.bfloat16)}
LENGTHS = [13, 1, 40, 27, 2]
STEPS, MICRO_BATCHES, WARMUP, PEAK_LR = 10, 2, 2, 1e-2


def build(model_class, config, rng):
    """Build a model whose weights are large enough, and whose norms are uneven enough, for errors to show."""
    model = model_class(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(p.shape).astype(np.float32))
            if name.endswith(".bias"):
                p.copy_(0.3 * noise)
            elif p.dim() == 1:
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_((0.15 if "q_proj" in name or "k_proj" in name else 0.08) * noise)
    return model


def documents(vocab, lengths, rng):
    """Return (tokens, targets, weights) per document. Low ids are common, so that there is something to learn.
    About a quarter of the positions is masked; a document of two positions is masked entirely."""
    out = []
    for n in lengths:
        ids = (vocab * rng.random(n + 1) ** 4).astype(np.int64)
        mask = (rng.random(n) < 0.75) if n > 2 else np.full(n, n == 1)
        out.append((torch.from_numpy(ids[:-1]), torch.from_numpy(ids[1:]), torch.from_numpy(mask.astype(np.float32))))
    return out


def flat(docs):
    tokens, targets, weights = (torch.cat(column).numpy() for column in zip(*docs))
    cu_seqlens = np.cumsum([0] + [len(d[0]) for d in docs])
    return {"tokens": u32(tokens), "targets": u32(targets), "weights": weights, "cu_seqlens": u32(cu_seqlens)}


def u32(values):
    return np.asarray(values, dtype=np.uint32)


def f32(values):
    return torch.as_tensor(values).detach().to(torch.float32).contiguous().numpy()


def forward(model, docs):
    """Return logits [T, V] and log-probabilities of the targets [T], one document at a time."""
    logits = torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens, _, _ in docs])
    targets = torch.cat([d[1] for d in docs])
    return logits, -F.cross_entropy(logits, targets, reduction="none")


def loss_of(logp, docs, supervised):
    return (torch.cat([d[2] for d in docs]).to(logp) * -logp).sum() / supervised


def supervised_tokens(docs):
    return sum(d[2].sum().item() for d in docs)


class Rotary64(nn.Module):
    """Compute the angles in float64; transformers uses float32 whatever the model's type. Scaled frequencies are
    transformers' own float32 values, because they are part of the model's definition."""

    def __init__(self, model):
        super().__init__()
        config, theirs = model.config, model.model.rotary_emb
        self.scale = theirs.attention_scaling
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        plain = config.rope_parameters["rope_type"] == "default"
        self.inv_freq = config.rope_parameters["rope_theta"] ** -exponent if plain else theirs.inv_freq.double()

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def float64_copy(model):
    """Copy the model entirely to float64, with norms replaced: transformers' own go through float32."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.double()
    copy.model.rotary_emb = Rotary64(model)
    for module in copy.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
    return copy


def one_pass(model, docs, with_grads):
    """Return logits, loss and gradients in float64, checked against transformers' own float32."""
    exact = float64_copy(model)
    logits, logp = forward(exact, docs)
    loss = loss_of(logp, docs, supervised_tokens(docs))
    with torch.no_grad():
        error = (forward(model, docs)[0] - logits).abs().max().item()
    assert error < 2e-5, error
    print(f"  loss {loss.item():.6f}; transformers' float32 logits differ from float64 by {error:.1e}")
    out = {"logits": f32(logits), "logp": f32(logp), "loss": f32(loss)}
    if with_grads:
        loss.backward()
        out |= {f"grad.{name}": f32(p.grad) for name, p in exact.named_parameters()}
    return out


def train(model, windows):
    """Train, and return losses, norms and learning rates of the steps; the model keeps the final weights."""
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses, norms, rates = [], [], []
    for window in windows:
        supervised = sum(supervised_tokens(docs) for docs in window)
        loss = 0.0
        for docs in window:
            part = loss_of(forward(model, docs)[1], docs, supervised)
            part.backward()
            loss += part.item()
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, norms, rates


def ten_steps(model, vocab, rng):
    """Run in float32, and in float64 only to print how much rounding alone changes the weights."""
    windows = [[documents(vocab, rng.integers(1, 25, rng.integers(2, 5)), rng) for _ in range(MICRO_BATCHES)]
               for _ in range(STEPS)]
    exact = float64_copy(model)
    losses, norms, rates = train(model, windows)
    train(exact, windows)
    pairs = zip(model.parameters(), exact.parameters())
    drift = max((a - b).abs().max().item() for a, b in pairs)
    print("  losses", " ".join(f"{x:.4f}" for x in losses))
    print("  norms ", " ".join(f"{x:.4f}" for x in norms))
    print(f"  final weights, float32 against float64: {drift:.1e} at most")

    micro = [flat(docs) for window in windows for docs in window]
    out = {f"steps.{key}": np.concatenate([m[key] for m in micro]) for key in micro[0]}
    out["steps.micro_bounds"] = u32(np.cumsum([0] + [len(m["tokens"]) for m in micro]))
    out["steps.cu_bounds"] = u32(np.cumsum([0] + [len(m["cu_seqlens"]) for m in micro]))
    out |= {"steps.losses": f32(losses), "steps.grad_norms": f32(norms), "steps.lr": f32(rates)}
    return out | {f"steps.final.{name}": f32(p) for name, p in model.named_parameters()}


def save(model, folder):
    shutil.rmtree(folder, ignore_errors=True)
    if folder.name in SHARDED:
        model.save_pretrained(folder, max_shard_size="24KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    else:
        model.save_pretrained(folder)
    if folder.name in OLD_SPELLING:
        respell(model, folder)


def respell(model, folder):
    """Rewrite config.json with the keys of transformers 4, and check that transformers reads the same from it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type" if folder.name.startswith("mistral") else "rope_type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
    again = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    assert torch.equal(again.inv_freq, model.model.rotary_emb.inv_freq)
    assert again.attention_scaling == model.model.rotary_emb.attention_scaling


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    for seed, (case, (model_class, config)) in enumerate(CASES.items()):
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        print(case)
        rng = np.random.default_rng(seed)
        model = build(model_class, config, rng)
        docs = documents(config.vocab_size, LENGTHS, rng)
        save(model, HERE / case)
        golden = flat(docs) | one_pass(model, docs, with_grads=True)
        rounded = ROUNDED.get(case)
        if rounded:
            suffix, dtype = rounded
            print(f"{case}-{suffix}")
            folder = HERE / f"{case}-{suffix}"
            save(model_class.from_pretrained(HERE / case, dtype=dtype), folder)
            # Read the file back: `.to(dtype)` also rounds the rotary frequencies, which no file stores.
            half = model_class.from_pretrained(folder, dtype=torch.float32)
            save_file(flat(docs) | one_pass(half, docs, with_grads=False), folder / "golden.safetensors")
        golden |= ten_steps(model, config.vocab_size, rng)
        save_file(golden, HERE / case / "golden.safetensors")


if __name__ == "__main__":
    main()
