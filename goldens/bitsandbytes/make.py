"""Write this folder: a small LLaMA in 4 bits as transformers and bitsandbytes store it, and its log-probabilities.

Run by hand, from this folder, when the case changes:

    pip install torch==2.15.0 transformers==5.23.0 bitsandbytes==0.50.2 accelerate safetensors numpy
    OMP_NUM_THREADS=1 python make.py

config.json, model.safetensors   as `save_pretrained` writes them: NF4 with double quantisation; embedding, head and norms
    in f32. No weight has a whole number of blocks of 64 elements; those of the MLP have more than one group of scales.
golden.json   tokens of one document, and `logp`: the log-probability of each token but the first
"""

import json
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = LlamaConfig(
    vocab_size=101, hidden_size=60, intermediate_size=301, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=20, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)


def main():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else 0.08 * torch.randn_like(p))
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=quantised, dtype=torch.float32, device_map="cpu")
    model.save_pretrained(HERE)
    # The CPU kernel of bitsandbytes only multiplies by weights of round sizes.
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32, device_map="cpu").dequantize().eval()
    tokens = torch.randint(0, CONFIG.vocab_size, (1, 40))
    with torch.no_grad():
        logits = model(tokens).logits.double()
    logp = logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    golden = {"tokens": tokens[0].tolist(), "logp": [round(x, 8) for x in logp.tolist()]}
    (HERE / "golden.json").write_text(json.dumps(golden) + "\n")
    (HERE / "generation_config.json").unlink(missing_ok=True)
    print("mean", logp.mean().item())


main()
