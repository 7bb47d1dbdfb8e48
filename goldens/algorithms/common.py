"""What the scripts of this folder share: the models, a float64 head, and the writing of cases.

Import this before torch: it fixes one thread, no GPU and no access to the hub.

TRL computes log-probabilities with a kernel that keeps its sums in float32. For the float64 values, `exact()` replaces
that kernel by a plain log-softmax with the same interface; every other line that runs is TRL's own. Each script also
runs TRL without the replacement, in float32, and checks that both agree.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import warnings

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", WANDB_DISABLED="true", TOKENIZERS_PARALLELISM="false",
                  HF_DATASETS_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1", TRL_EXPERIMENTAL_SILENCE="1",
                  OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from make import build, float64_copy  # noqa: E402  (the goldens of the models themselves)

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

VOCAB, PAD, BOS, EOS, FIRST_WORD = 97, 0, 1, 2, 3
# Gradients that every case stores; a few cases store all of them.
SOME_TENSORS = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.post_attention_layernorm.weight",
                "model.norm.weight")
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
             tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
MODELS = {"policy": 101, "reference": 102, "reward": 103, "value": 104}


def make_models():
    """Random weights. Large heads spread the log-probabilities; the reference is three parts policy, one part noise."""
    policy = None
    for name, seed in MODELS.items():
        scalar = name in ("reward", "value")
        config = LlamaConfig(**SHAPE, **(dict(num_labels=1) if scalar else {}))
        model = build(LlamaForSequenceClassification if scalar else LlamaForCausalLM, config,
                      np.random.default_rng(seed))
        with torch.no_grad():
            (model.score if scalar else model.lm_head).weight.mul_(3)
            if name == "reference":
                for mine, theirs in zip(model.parameters(), policy.parameters(), strict=True):
                    mine.copy_(0.25 * mine + 0.75 * theirs)
        policy = model if name == "policy" else policy
        folder = HERE / "models" / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        print(name, sum(p.numel() for p in model.parameters()), "parameters")


def load(name, precision):
    """Load a model of models/ in "float32" as transformers computes it, or entirely in "float64"."""
    kind = LlamaForSequenceClassification if name in ("reward", "value") else LlamaForCausalLM
    model = kind.from_pretrained(HERE / "models" / name, dtype=torch.float32)
    return model if precision == "float32" else float64_copy(model)


def tokenizer(padding_side="right"):
    """One word per id; `text` below is its inverse."""
    words = ["<pad>", "<bos>", "<eos>"] + [f"w{i}" for i in range(FIRST_WORD, VOCAB)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
                                   padding_side=padding_side)


def text(ids):
    special = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}
    return " ".join(special.get(i, f"w{i}") for i in ids)


def random_ids(rng, n):
    return [int(i) for i in rng.integers(FIRST_WORD, VOCAB, n)]


def quiet(**settings):
    """Trainer settings of every run: plain arithmetic, nothing saved, nothing logged."""
    base = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
                logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=7,
                output_dir=os.path.join(tempfile.gettempdir(), "algorithm-goldens"))
    return {**base, **settings}


class PlainHead:
    """The interface of TRL's chunked log-probability kernel, computed by autograd in the type of its inputs."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        assert bias is None and softcap is None and scale == 1.0
        logits = hidden @ weight.t() / temperature
        logp = logits.log_softmax(-1)
        picked = logp.gather(-1, targets[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1) if "entropy" in outputs else None
        squares = torch.logsumexp(2 * logp, -1).detach() if "log_sum_sq_probs" in outputs else None
        mean = logits.mean(-1).detach() if "mean_logits" in outputs else None
        top1 = logits.argmax(-1) == targets if "is_top1" in outputs else None
        return picked, entropy, squares, mean, top1


@contextlib.contextmanager
def exact(precision):
    """Run TRL in the given precision: in float64, new tensors are float64 and the head is `PlainHead`."""
    if precision == "float32":
        yield
        return
    import trl.trainer.utils as utils
    theirs = getattr(utils, "_ChunkedLogProbFunction", None)
    utils._ChunkedLogProbFunction = PlainHead
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = theirs
        torch.set_default_dtype(torch.float32)


def watch(model):
    """Keep the output of the model's last forward, with the gradients of its log-probabilities and entropies."""
    seen = {}

    def hook(_module, _args, output):
        seen["output"] = output
        for name in ("log_probs", "entropy", "logits"):
            value = getattr(output, name, None)
            if value is not None and value.requires_grad:
                value.retain_grad()

    model.register_forward_hook(hook)
    return seen


def gradients(model, every=False):
    return {f"grad.{name}": p.grad.detach().clone() for name, p in model.named_parameters()
            if p.grad is not None and (every or name in SOME_TENSORS)}


def check(case, exact_values, plain_values, loss_tolerance=1e-5, tolerance=1e-4):
    """Check TRL's own float32 against the float64 values: loss, and each gradient relative to its largest element."""
    (loss, grads), (loss32, grads32) = exact_values, plain_values
    error = abs(loss - loss32) / max(1.0, abs(loss))
    assert error < loss_tolerance, (case, loss, loss32)
    worst = max(((grads[k] - grads32[k]).abs().max() / grads[k].abs().max().clamp(min=1e-12)).item() for k in grads)
    assert worst < tolerance, (case, worst)
    print(f"  {case}: loss {loss:.9f}, TRL's float32 differs by {error:.0e}, its gradients by {worst:.0e}")


def ragged(values, lengths, from_end=False):
    """The first (or last) `lengths[i]` numbers of each row."""
    rows = values.detach().tolist()
    return [row[len(row) - n:] if from_end else row[:n] for row, n in zip(rows, lengths)]


def plain(value):
    """Numbers with 10 digits, NaN as null, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value


def write_case(folder, case, tensors=None):
    """Write folder/case.json, with lists of numbers on one line, and folder/tensors.safetensors in f32."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    body = json.dumps(plain(case), indent=1)
    body = re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s+", " ", m.group()).replace("[ ", "[").replace(" ]", "]"),
                  body)
    (folder / "case.json").write_text(body + "\n")
    if tensors:
        arrays = {k: v.detach().to(torch.float32).contiguous().numpy() for k, v in tensors.items()}
        save_file(arrays, folder / "tensors.safetensors")


def metrics_of(trainer, leave_out=()):
    """The last value of each metric that the trainer recorded."""
    return {k: v[-1] for k, v in trainer._metrics["train"].items() if k not in leave_out}


if __name__ == "__main__":
    make_models()
