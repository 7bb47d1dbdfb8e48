"""Plot the losses of the runs in FOLDER, and their distance from PyTorch's f32 losses.

    python plot.py raw-2026-11-15 curves.svg
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RUNS = {"cpu-f32": "Lockstep, CPU f32", "gpu-f32": "Lockstep, GPU f32", "gpu-bf16": "Lockstep, GPU bf16",
        "torch-f32": "PyTorch, GPU f32", "torch-bf16": "PyTorch, GPU bf16 autocast"}


def losses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines[0]["losses"] if "losses" in lines[0] else [line["loss"] for line in lines]


def main():
    folder, out = pathlib.Path(sys.argv[1]), sys.argv[2]
    curves = {name: losses(folder / f"{name}.jsonl") for name in RUNS}
    base = curves["torch-f32"]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=[2, 1])
    styles = {"cpu-f32": "-", "gpu-f32": "--", "gpu-bf16": "-.", "torch-f32": ":", "torch-bf16": ":"}
    for name, label in RUNS.items():
        steps = range(1, len(curves[name]) + 1)
        above.plot(steps, curves[name], styles[name], label=label, linewidth=1.5)
        apart = [abs(a - b) for a, b in zip(curves[name], base)]
        if name != "torch-f32":
            below.semilogy(steps, [max(x, 1e-8) for x in apart], styles[name], label=label, linewidth=1)
        print(f"{label:28} last loss {curves[name][-1]:.5f}, at most {max(apart):.2e} from PyTorch's f32")
    above.set_ylabel("loss")
    above.set_title("LLaMA 90m, 200 steps of 2×512 tokens, the same weights and rows")
    above.legend()
    below.set_ylabel("distance from PyTorch f32")
    below.set_xlabel("step")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "lockstep"
    figure.savefig(out, metadata={"Date": None})


main()
