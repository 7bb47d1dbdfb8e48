"""Compare `lockstep prepare` with `datasets.map`, in one run: processes alternate under the same load.

    cargo build --release
    python run.py --lockstep ../../target/release/lockstep --megabytes 50 --repeats 5

The interpreter that runs this needs `datasets`, `tokenizers` and `transformers`. The script generates a corpus from a
seed (words of Zipf-like frequency, about `--megabytes` of text as jsonl rows) and trains a byte-level BPE on it. Both
programs tokenize every row with that tokenizer.json, append the end token and write the result to disk: Lockstep to its
cache, the peer through `load_dataset` and `map(batched=True, num_proc=--processes)`, as TRL does. The time of both runs
from the open file to the last token, without the start of the interpreter; whole processes are timed as well. Both must
count the same number of tokens. Raw lines are appended to raw-<date>.jsonl in this folder; the table is printed.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
EOS = "<|endoftext|>"
CONFIG = """\
model: tiny
train_files: {corpus}
tokenizer: {tokenizer}
max_length: {max_length}
packing: {packing}
output_dir: {folder}/out
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="../../target/release/lockstep")
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=2, help="number of processes of datasets.map")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--packing", choices=["none", "bfd"], default="none",
                        help="packing of lockstep; the peer only tokenizes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer(args, *args.peer)
    with tempfile.TemporaryDirectory() as folder, \
            open(HERE / f"raw-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.jsonl", "a") as raw:
        corpus, tokenizer = f"{folder}/corpus.jsonl", f"{folder}/tokenizer.json"
        size = write_corpus(corpus, args.megabytes)
        train_tokenizer(corpus, tokenizer, args.vocab)
        record(raw, header(args) | {"text_bytes": size})
        programs = {"datasets.map": run_peer, "lockstep": run_lockstep}
        results = {name: [] for name in programs}
        for repeat in range(args.repeats):
            # Every other repeat runs in reverse order, so that no program is always first.
            for name, run in list(programs.items())[:: -1 if repeat % 2 else 1]:
                with tempfile.TemporaryDirectory() as scratch:
                    result = {"program": name, "repeat": repeat, "load": os.getloadavg()[0]}
                    result |= run(args, corpus, tokenizer, scratch)
                record(raw, result)
                results[name].append(result)
        table(results, size)


def table(results, size):
    counts = {r["tokens"] for runs in results.values() for r in runs}
    if len(counts) != 1:
        raise SystemExit(f"error: the programs count different tokens: {counts}")
    median = {name: statistics.median(r["tokens_per_second"] for r in runs) for name, runs in results.items()}
    first = next(iter(results))
    print(f"{size / 1e6:.1f} MB of text, {counts.pop():,} tokens")
    print("| program | tokens/s | spread | ratio | seconds | whole process, s | peak MB |\n|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        of = lambda key: statistics.median(r[key] for r in runs)
        speeds = [r["tokens_per_second"] for r in runs]
        print(f"| {name} | {median[name]:,.0f} | {min(speeds):,.0f}–{max(speeds):,.0f} | {median[name] / median[first]:.2f} "
              f"| {of('seconds'):.2f} | {of('wall_seconds'):.2f} | {of('peak_rss_mb'):,.0f} |")


def write_corpus(path, megabytes):
    """Write rows of 20 to 400 words. Words consist of syllables; the n-th most frequent occurs about 1/n as often."""
    rng = random.Random(0)
    syllables = [c + v + e for c in "bcdfglmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s")]
    words = sorted({"".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(30_000)})
    rng.shuffle(words)
    weights = [1 / (n + 3) for n in range(len(words))]
    total, ends = 0, [". ", ", ", " ", " ", " ", " ", " ", "\n"]
    with open(path, "w") as out:
        while total < megabytes * 1e6:
            chosen = rng.choices(words, weights, k=rng.randint(20, 400))
            text = "".join(word + rng.choice(ends) for word in chosen)
            total += len(text)
            out.write(json.dumps({"text": text}) + "\n")
    return total


def train_tokenizer(corpus, path, vocab):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    with open(corpus) as rows:
        texts = (json.loads(row)["text"] for _, row in zip(range(2000), rows))
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(path)


def peer(args, corpus, tokenizer, scratch):
    """Tokenize with datasets.map. Runs in its own process and prints one line of JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    from transformers import PreTrainedTokenizerFast
    datasets.disable_progress_bars()
    encode = PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token=EOS)

    def tokenise(rows):
        ids = encode([text + EOS for text in rows["text"]], return_attention_mask=False)["input_ids"]
        return {"input_ids": [row[: args.max_length] for row in ids]}

    start = time.perf_counter()
    data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=scratch)
    loaded = time.perf_counter()
    data = data.map(tokenise, batched=True, num_proc=args.processes, remove_columns=data.column_names)
    end = time.perf_counter()
    tokens = sum(len(row) for batch in data.iter(batch_size=1000) for row in batch["input_ids"])
    print(json.dumps({
        "tokens": tokens, "seconds": round(end - start, 4), "map_seconds": round(end - loaded, 4),
        "tokens_per_second": round(tokens / (end - loaded), 1)}))


def run_peer(args, corpus, tokenizer, scratch):
    command = [sys.executable, str(HERE / "run.py"), "--max-length", str(args.max_length), "--processes", str(args.processes)]
    out, usage = run([*command, "--peer", corpus, tokenizer, scratch], f"{scratch}/log", TOKENIZERS_PARALLELISM="false")
    return json.loads(next(line for line in out.splitlines() if line.startswith("{"))) | usage


def run_lockstep(args, corpus, tokenizer, scratch):
    pathlib.Path(scratch, "run.yaml").write_text(CONFIG.format(
        corpus=corpus, tokenizer=tokenizer, folder=scratch, max_length=args.max_length, packing=args.packing))
    out, usage = run([args.lockstep, "prepare", f"{scratch}/run.yaml", "--json", "--samples", "0"], f"{scratch}/log")
    printed = json.loads(out)
    made = printed["train"]
    # The peak that the system reports for a child starts at this interpreter's memory, so use the program's own count.
    usage["peak_rss_mb"] = round(printed["peak_memory_bytes"] / 2**20, 1)
    if made["cached"]:
        raise SystemExit("error: the data was found prepared")
    return {"tokens": made["tokens"], "seconds": round(made["seconds"], 4),
            "tokens_per_second": round(made["tokens_per_second"], 1)} | usage


def run(command, log, **env):
    """Run one process to its end. Peak memory is that of the process or of its largest child."""
    with open(log, "w") as out:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    text = pathlib.Path(log).read_text()
    if child.returncode:
        raise SystemExit(f"error: {' '.join(command)} exited with {child.returncode}:\n{text[-2000:]}")
    return text, {"wall_seconds": round(wall, 4), "peak_rss_mb": round(usage.ru_maxrss / 1024, 1)}


def header(args):
    """Describe the run and the machine, without paths, which differ between machines."""
    settings = {key: value for key, value in vars(args).items() if key not in ("lockstep", "peer")}
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    version = subprocess.run([args.lockstep, "--version"], capture_output=True, text=True).stdout.strip()
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"time": now, "cpu": names[:1], "cores": os.cpu_count(), "lockstep": version, "settings": settings}


def record(raw, value):
    raw.write(json.dumps(value) + "\n")
    raw.flush()


if __name__ == "__main__":
    main()
