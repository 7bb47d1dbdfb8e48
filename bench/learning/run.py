"""Show that every algorithm learns, on generated arithmetic: held-out results before and after, for several seeds.

    cargo build --release
    python run.py --lockstep ../../target/release/lockstep --seeds 1 2 3
    python run.py --lockstep ../../target/release/lockstep --seeds 1 2 3 --cores 2     # all at once, two cores each
    python run.py --plot raw-<date>.jsonl ../../docs/learning.svg

The model is a LLaMA of 0.7 million parameters with the byte tokenizer. A problem is `27+45=`, and its answer is
`7+5=12, 2+4+1=7, 72`: units, tens, sum. One problem in twenty is held out, by a hash of its text. For each seed:

    sft        300 steps on the answers of 120 problems: the base of grpo and ppo
    grpo       900 steps from there; the reward is 1 if the last number is the sum. No answers are shown.
    continued  the same demonstrations for as long as grpo took
    full       700 steps on the answers of all problems: the base of dpo and reward
    dpo        400 steps on pairs: the right answer and one with a wrong sum. One pair in ten has them exchanged.
    reward     2400 steps on the same pairs
    ppo        500 steps from sft, with the reward model of that run

The runs that start from `sft` and those that start from `full` form two chains; ppo waits for both. Without `--cores`
everything runs one after the other. With it, every chain of every seed runs at the same time, pinned to that many cores
of its own. Completions are sampled at temperature 1, one per held-out problem. Pairs of held-out problems are all labelled right.
Prints JSON lines, which also go to raw-<date>.jsonl: one per evaluation, then one per seed.
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
COMMON = dict(device="cpu", logging_steps=50, save_strategy="no", overwrite_output_dir=True)
MODEL = dict(architecture="LlamaForCausalLM", hidden_size=128, intermediate_size=384, num_hidden_layers=3,
             num_attention_heads=4, max_position_embeddings=256)
SFT = dict(tokenizer="byte", max_length=48, per_device_train_batch_size=32, learning_rate=2e-3, adam_beta2=0.95,
           lr_scheduler_type="constant_with_warmup", warmup_steps=20, weight_decay=0.01)
ROLLOUT = dict(train_files="prompts.jsonl", eval_files="held_out.jsonl", eval_on_start=True,
               max_prompt_length=8, max_completion_length=32)
GRPO = ROLLOUT | dict(algorithm="grpo", reward_funcs=["numeric_match"], num_generations=8, num_generations_eval=1,
                      per_device_train_batch_size=256, learning_rate=2e-4, lr_scheduler_type="linear",
                      warmup_steps=10, max_grad_norm=0.3, max_steps=900, eval_steps=75)
PAIRS = dict(train_files="pairs.jsonl", eval_files="held_out_pairs.jsonl", eval_on_start=True, max_length=48,
             per_device_train_batch_size=32, lr_scheduler_type="linear", warmup_steps=20, weight_decay=0.01)
PPO = ROLLOUT | dict(algorithm="ppo", per_device_train_batch_size=128, num_ppo_epochs=4, num_mini_batches=1,
                     learning_rate=1e-4, value_learning_rate=1e-3, lr_scheduler_type="constant", kl_coef=0.06,
                     missing_eos_penalty=1.0, max_steps=500, eval_steps=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default=HERE / "../../target/release/lockstep", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cores", type=int, help="run all chains at once, each on this many cores")
    parser.add_argument("--raw", type=pathlib.Path, help="file for the raw lines [default: raw-<date>.jsonl here]")
    parser.add_argument("--plot", nargs=2, metavar=("RAW", "SVG"), help="draw the results of an earlier run")
    args = parser.parse_args()
    if args.plot:
        lines = [json.loads(line) for line in pathlib.Path(args.plot[0]).read_text().splitlines()]
        pathlib.Path(args.plot[1]).write_text(drawing(lines))
        return
    raw_file = args.raw or HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl"
    cores = sorted(os.sched_getaffinity(0))
    at_once = len(cores) // args.cores if args.cores else 1
    free = [cores[i * args.cores:(i + 1) * args.cores] for i in range(at_once)] if args.cores else [cores]
    with open(raw_file, "a") as raw, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        folders = [tempfile.TemporaryDirectory() for _ in args.seeds]
        seeds = [Runs(args, raw, seed, pathlib.Path(folder.name), free) for seed, folder in zip(args.seeds, folders)]
        chains = [(pool.submit(one.on_own_cores, one.from_sft), pool.submit(one.on_own_cores, one.from_full))
                  for one in seeds]
        for one, (from_sft, from_full) in zip(seeds, chains):
            one.finish(from_sft.result(), from_full.result())
        for folder in folders:
            folder.cleanup()


class Runs:
    """The runs of one seed, in one folder."""

    lock = threading.Lock()

    def __init__(self, args, raw, seed, folder, free):
        self.lockstep, self.threads, self.free = args.lockstep.resolve(), args.threads, free
        self.raw, self.seed, self.folder = raw, seed, folder
        self.has_sft = threading.Event()
        make_data(folder, seed)

    def on_own_cores(self, chain):
        with self.lock:
            cores = self.free.pop()
        try:
            # Affinity belongs to the calling thread, and processes that it starts inherit it.
            os.sched_setaffinity(0, cores)
            return chain()
        finally:
            with self.lock:
                self.free.append(cores)

    def from_sft(self):
        self.run("sft", SFT | dict(model=MODEL, train_files="demonstrations.jsonl", max_steps=300))
        self.has_sft.set()
        grpo = self.run("grpo", GRPO | dict(model_name_or_path="sft/model"))
        return grpo, self.continued(grpo["seconds"])

    def from_full(self):
        self.run("full", SFT | dict(model=MODEL, train_files="all.jsonl", max_steps=700))
        base = PAIRS | dict(model_name_or_path="full/model")
        dpo = self.run("dpo", base | dict(algorithm="dpo", learning_rate=1e-4, max_steps=400, eval_steps=100))
        reward = self.run("reward", base | dict(algorithm="reward", learning_rate=3e-4, max_steps=2400, eval_steps=400))
        self.has_sft.wait()
        ppo = self.run("ppo", PPO | dict(model_name_or_path="sft/model", reward_model_path="reward/model"))
        return dpo, reward, ppo

    def finish(self, from_sft, from_full):
        (grpo, continued), (dpo, reward, ppo) = from_sft, from_full
        first, last = ppo["evaluations"][0], ppo["evaluations"][-1]
        self.record({"summary": {
            "seed": self.seed,
            "exact match after sft": grpo["evaluations"][0]["eval_reward"],
            "exact match after grpo": grpo["evaluations"][-1]["eval_reward"],
            "exact match after sft continued": continued,
            "seconds of grpo": grpo["seconds"],
            "dpo accuracy": dpo["evaluations"][-1]["eval_rewards/accuracies"],
            "reward model accuracy": reward["evaluations"][-1]["eval_accuracy"],
            "ppo reward before": first["eval_reward"],
            "ppo reward deviation before": first["eval_reward_std"],
            "ppo reward after": last["eval_reward"],
            "ppo gain in deviations": (last["eval_reward"] - first["eval_reward"]) / first["eval_reward_std"],
            "ppo kl at the end": ppo["steps"][-1]["objective/kl"],
        }})

    def run(self, name, settings, report=True):
        """Run one training to its end. Returns its evaluations, its steps and its seconds."""
        settings = COMMON | settings | dict(seed=self.seed, threads=self.threads, output_dir=name)
        (self.folder / f"{name}.yaml").write_text(json.dumps(settings))
        begun = time.perf_counter()
        done = subprocess.run([self.lockstep, "train", f"{name}.yaml"], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr}")
        seconds = time.perf_counter() - begun
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        evaluations = [line for line in lines if "eval_seconds" in line]
        for line in evaluations if report else []:
            kept = {key: value for key, value in line.items() if key.startswith("eval_")}
            self.record({"seed": self.seed, "run": name, "step": line["step"],
                         "share": line["step"] / settings["max_steps"], "run_seconds": round(seconds, 1)} | kept)
        return {"evaluations": evaluations, "steps": [line for line in lines if "loss" in line], "seconds": seconds}

    def continued(self, seconds):
        """Supervised training on the same demonstrations for `seconds`, in six parts that are evaluated."""
        base = "sft/model"
        settings = SFT | dict(train_files="demonstrations.jsonl", lr_scheduler_type="constant", warmup_steps=0)
        settings.pop("tokenizer")
        begun = time.perf_counter()
        self.run("probe", settings | dict(model_name_or_path=base, max_steps=200), report=False)
        steps = int(200 * seconds / (time.perf_counter() - begun) / 6)
        for part in range(1, 7):
            self.run("part", settings | dict(model_name_or_path=base, max_steps=steps), report=False)
            base = "continued/model"
            shutil.rmtree(self.folder / "continued", ignore_errors=True)
            (self.folder / "part").rename(self.folder / "continued")
            measured = self.run("measure", GRPO | dict(model_name_or_path=base, max_steps=0), report=False)
            result = measured["evaluations"][0]["eval_reward"]
            self.record({"seed": self.seed, "run": "continued", "share": part / 6, "eval_reward": result,
                         "steps": part * steps, "run_seconds": round(seconds, 1)})
        return result

    def record(self, line):
        with self.lock:
            print(json.dumps(line), flush=True)
            self.raw.write(json.dumps(line) + "\n")
            self.raw.flush()


def make_data(folder, seed):
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    held_out = [problem for problem in problems if is_held_out(problem)]
    train = [problem for problem in problems if not is_held_out(problem)]
    draw = random.Random(seed)
    draw.shuffle(train)

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def with_answer(problem):
        return dict(prompt=prompt(problem), completion=answer(*problem))

    def pair(problem, exchanged):
        a, b = problem
        wrong = a + b + draw.choice([-30, -20, -10, -3, -2, -1, 1, 2, 3, 10, 20, 30])
        answers = [answer(a, b), answer(a, b, wrong)]
        chosen, rejected = reversed(answers) if draw.random() < exchanged else answers
        return dict(prompt=prompt(problem), chosen=chosen, rejected=rejected)

    write("demonstrations.jsonl", map(with_answer, train[:120]))
    write("all.jsonl", map(with_answer, train))
    write("prompts.jsonl", (dict(prompt=prompt(p), answer=sum(p)) for p in train))
    write("held_out.jsonl", (dict(prompt=prompt(p), answer=sum(p)) for p in held_out))
    write("pairs.jsonl", (pair(p, 0.1) for p in train + train))
    write("held_out_pairs.jsonl", (pair(p, 0) for p in held_out))


def prompt(problem):
    return "{}+{}=".format(*problem)


def answer(a, b, total=None):
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    carried = "+1" if units >= 10 else ""
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}{carried}={tens + units // 10}, {total or a + b}"


def is_held_out(problem):
    return int.from_bytes(hashlib.sha256(prompt(problem).encode()).digest()[:8], "big") % 20 == 0


PANELS = [
    ("exact match on held-out problems", "minutes", (0, 1), [("grpo", "eval_reward", "GRPO", "#1f77b4"),
                                                              ("continued", "eval_reward", "SFT continued", "#999999")]),
    ("accuracy on held-out pairs", "steps", (0, 1), [("dpo", "eval_rewards/accuracies", "DPO", "#2ca02c"),
                                                      ("reward", "eval_accuracy", "reward model", "#d62728")]),
    ("PPO: reward on held-out problems", "steps", (-1, 3), [("ppo", "eval_reward", "PPO", "#9467bd")]),
]


def drawing(lines):
    """An SVG with one panel per kind of result and one curve per seed."""
    width, height, left, top, gap = 240, 170, 44, 30, 70
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(PANELS) * (width + gap)} {height + 80}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for i, (title, unit, (low, high), curves) in enumerate(PANELS):
        runs = [name for name, *_ in curves]
        points = [line for line in lines if line.get("run") in runs]

        def x_of(line):
            return line["share"] * line["run_seconds"] / 60 if unit == "minutes" else line.get("step", 0)

        right = max(map(x_of, points), default=1)
        x0 = left + i * (width + gap)
        out.append(f'<text x="{x0}" y="{top - 10}" font-weight="bold">{title}</text>')
        for k in range(5):
            value, y = low + (high - low) * k / 4, top + height * (1 - k / 4)
            out.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
            out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        out.append(f'<text x="{x0}" y="{top + height + 16}">0</text>')
        out.append(f'<text x="{x0 + width}" y="{top + height + 16}" text-anchor="end">{right:.3g} {unit}</text>')
        for k, (name, key, label, color) in enumerate(curves):
            seeds = sorted({line["seed"] for line in points if line["run"] == name})
            for seed in seeds:
                own = [line for line in points if line["run"] == name and line["seed"] == seed]
                if name == "continued":
                    first = [line for line in points if line["run"] == "grpo" and line["seed"] == seed][:1]
                    own = first + own
                path = " ".join(
                    f"{x0 + width * x_of(line) / right:.1f},{top + height * (high - line[key]) / (high - low):.1f}"
                    for line in own)
                out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
            y = top + height + 34 + 14 * k
            out.append(f'<line x1="{x0}" x2="{x0 + 18}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>')
            out.append(f'<text x="{x0 + 24}" y="{y + 4}">{label}, {len(seeds)} seeds</text>')
    return "\n".join(out) + "\n</svg>\n"


main()
