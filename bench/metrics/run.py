"""CPU time of a step of two builds of Lockstep, in alternating runs: python run.py ROUNDS BASE NEW

The model is as small as a model can be, so that everything around the kernels counts most. The difference of a long and a
short run leaves out the start and the end. CPU time and not the clock, because other processes disturb it less.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

CONFIG = """\
model: {architectures: [LlamaForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
intermediate_size: 64, max_position_embeddings: 64}
train_files: data.jsonl
max_length: 64
per_device_train_batch_size: 2
threads: 1
save_strategy: no
logging_steps: 1000000
overwrite_output_dir: true
"""
SHORT, LONG = 500, 4500


def cpu_seconds(program, steps, folder):
    name = f"output_dir={folder}/out-{pathlib.Path(program).name}-{steps}"
    env = dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache")
    args = [program, "train", "run.yaml", name, f"max_steps={steps}"]
    run = subprocess.Popen(args, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    assert status == 0, args
    return usage.ru_utime + usage.ru_stime


rounds, programs = int(sys.argv[1]), [str(pathlib.Path(p).resolve()) for p in sys.argv[2:4]]
with tempfile.TemporaryDirectory() as folder:
    words = "one step follows the other in lockstep again".split()
    rows = [json.dumps({"text": " ".join(words[(i * 3 + j) % 8] for j in range(8))}) for i in range(40)]
    pathlib.Path(folder, "data.jsonl").write_text("\n".join(rows) + "\n")
    pathlib.Path(folder, "run.yaml").write_text(CONFIG)
    found = {program: [] for program in programs}
    for i in range(rounds):
        for program in programs if i % 2 else reversed(programs):
            seconds = cpu_seconds(program, LONG, folder) - cpu_seconds(program, SHORT, folder)
            found[program].append(seconds / (LONG - SHORT) * 1e6)
    for program, micros in found.items():
        print(program, [round(m, 1) for m in micros], f"median {statistics.median(micros):.1f} us of CPU time per step")
