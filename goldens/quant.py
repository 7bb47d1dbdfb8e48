"""Write quant.json: the codes and scales that bitsandbytes computes for NF4 weights and for 8-bit Adam.

Run by hand, from this folder, with PyTorch and bitsandbytes on a CPU (2.15.0 and 0.50.2 wrote the file):

    python quant.py

8-bit codes are the nearest ones, as in bitsandbytes' CUDA kernels. Its library for CPUs looks them up in a coarse table
instead, which takes the wrong neighbour for about one number in ten, so `nearest` below replaces it. Everything else is
bitsandbytes' own.

Inputs are not stored: `numbers` below makes them from integers, exactly, and the Rust test does the same. Floats are
stored as their bits, codes as hexadecimal bytes.

`maps`: the values of the 256 codes of the dynamic maps and of the 16 codes of NF4.
`nf4`: for each case, codes and scales without double quantisation; codes of the scales, their absmax and the offset
with it; and the weights that both give, as a checksum over the bits of f32 and of bf16.
`adam`: codes and scales of both moments, and the parameters, after each step of AdamW with 8-bit blockwise states.
"""

import json
import pathlib

import bitsandbytes.backends.cpu.ops as cpu_ops
import bitsandbytes.functional as bnb
import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
BLOCK = 64
LR, BETAS, EPS, DECAY, STEPS, ELEMS = 1e-2, (0.9, 0.99), 1e-8, 0.1, 4, 700


def numbers(seed: int, count: int) -> np.ndarray:
    """Roughly normal f32 numbers whose size changes every 64 elements. All operations are exact in f64."""
    state, out = seed, np.zeros(count, dtype=np.float64)
    for i in range(count):
        total = 0
        for _ in range(4):
            state = (state * 1664525 + 1013904223) % 2**32
            total += state >> 16
        out[i] = (total - 2 * 65535) / 2**16 * (1 + i // BLOCK * 37 % 101) / 128
    return out.astype(np.float32)


def bits(values) -> list[int]:
    return np.ascontiguousarray(torch.as_tensor(values).float().numpy()).reshape(-1).view(np.uint32).tolist()


def checksum(words: np.ndarray) -> str:
    """The sum of (index + 1) * word, modulo 2^64, as text: JSON has no integers of 64 bits."""
    index = np.arange(1, words.size + 1, dtype=np.uint64)
    return str(int((index * words.reshape(-1).astype(np.uint64)).sum(dtype=np.uint64)))


def nearest(values: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales. A code is the number of midpoints between neighbouring values that are below value / scale."""
    blocks = values.reshape(-1).split(blocksize)
    absmax = torch.stack([block.abs().max() for block in blocks])
    scaled = torch.cat([block / scale.clamp(min=1e-38) for block, scale in zip(blocks, absmax)])
    return torch.bucketize(scaled, (code[:-1] + code[1:]) / 2).to(torch.uint8), absmax


def store_nearest(values, code, absmax_out, out, blocksize) -> None:
    codes, absmax = nearest(values, code, blocksize)
    out.copy_(codes)
    absmax_out.copy_(absmax)


def weights_of(codes: torch.Tensor, state, elems: int) -> dict:
    out = {}
    for name, dtype, word in [("f32", torch.float32, torch.int32), ("bf16", torch.bfloat16, torch.int16)]:
        state.dtype = dtype
        values = bnb.dequantize_4bit(codes, state).reshape(-1)[:elems]
        words = values.contiguous().view(word).numpy()
        out[name] = checksum(words.view(np.uint32 if word == torch.int32 else np.uint16))
    return out


def nf4(seed: int, elems: int, dtype: torch.dtype) -> dict:
    weights = torch.from_numpy(numbers(seed, elems)).to(dtype)
    if elems > 3 * BLOCK:
        weights[BLOCK : 2 * BLOCK] = 0
    plain_codes, plain = bnb.quantize_4bit(weights, blocksize=BLOCK, quant_type="nf4")
    codes, double = bnb.quantize_4bit(weights, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    assert torch.equal(codes, plain_codes)
    assert double.state2.blocksize == 256
    double.absmax, absmax = nearest(plain.absmax - double.offset, double.state2.code, 256)
    assert torch.equal(absmax, double.state2.absmax)
    return {
        "seed": seed,
        "elems": elems,
        "dtype": str(dtype).removeprefix("torch."),
        "codes": codes.reshape(-1).numpy().tobytes().hex(),
        "scales": bits(plain.absmax),
        "plain": weights_of(codes, plain, elems),
        "scale_codes": double.absmax.reshape(-1).numpy().tobytes().hex(),
        "absmax": bits(double.state2.absmax),
        "offset": bits(double.offset)[0],
        "double": weights_of(codes, double, elems),
    }


def adam() -> dict:
    cpu_ops._quant_blockwise_fp32_direct = store_nearest
    p = torch.from_numpy(numbers(11, ELEMS))
    maps = [bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False)]
    states = [torch.full((ELEMS,), code, dtype=torch.uint8) for code in (127, 0)]
    absmax = [torch.zeros(-(-ELEMS // 256)) for _ in states]
    steps = []
    for step in range(1, STEPS + 1):
        g = torch.from_numpy(numbers(20 + step, ELEMS))
        bnb.optimizer_update_8bit_blockwise(
            "adam", g, p, states[0], states[1], *BETAS, 0.0, 0.0, EPS, step, LR, *maps, *absmax, DECAY
        )
        steps.append(
            {
                "codes": [state.numpy().tobytes().hex() for state in states],
                "absmax": [bits(values) for values in absmax],
                "parameters": bits(p),
            }
        )
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "elems": ELEMS}
    return {"settings": settings, "steps": steps}


def main() -> None:
    golden = {
        "maps": {
            "signed": bits(bnb.create_dynamic_map(signed=True)),
            "unsigned": bits(bnb.create_dynamic_map(signed=False)),
            "nf4": bits(bnb.get_4bit_type("nf4", device="cpu")),
        },
        # More than 256 blocks, and a last one that is shorter.
        "nf4": [
            nf4(1, 257 * BLOCK, torch.float32),
            nf4(2, 5 * BLOCK + 38, torch.float32),
            nf4(3, 5 * BLOCK, torch.bfloat16),
            nf4(4, 10, torch.float32),
        ],
        "adam": adam(),
    }
    (HERE / "quant.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
