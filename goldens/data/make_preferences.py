"""Write the goldens of preference pairs and prompts.

Run by hand, from any folder, when a case changes:

    pip install trl==1.16.0 datasets==5.2.0
    python make_preferences.py

preferences.json           a list of cases: name, template (a file of ../chat/templates, or null), rows, and
    dpo                    for each max_length and truncation_mode, the pairs that TRL's DPOTrainer trains on: the
                           tokens and the completion mask of both documents, after dropping and truncation
    reward                 for each max_length, the pairs of TRL's RewardTrainer: the tokens of both documents
pairs.jsonl, pairs.json, pairs.csv, pairs.parquet, pairs.arrow    the same pairs of text with a margin
prompts.jsonl, .json, .csv, .parquet, .arrow                      the same prompts with other columns

The tokenizer is ../chat/tokenizer.
"""

import csv
import json
import pathlib
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.reward_trainer import RewardTrainer

HERE = pathlib.Path(__file__).resolve().parent
CHAT = HERE.parent / "chat"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TEXT = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green, as far as I know."},
    {"prompt": "A prompt that is somewhat longer than the others, which fills", "chosen": " it", "rejected": " all"},
    {"prompt": "Two plus two is ", "chosen": "four</s>", "rejected": "5"},
    {"prompt": "", "chosen": "no prompt", "rejected": "nothing before it"},
    {"prompt": "wor", "chosen": "d merges across the boundary", "rejected": "king on it"},
    {"prompt": "ends with</s>", "chosen": "", "rejected": "x"},
]
IMPLICIT = [
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"chosen": "The sky is blue", "rejected": "The sky is blue or green."},
    {"chosen": "naïve 水 🦀 one", "rejected": "naïve 水 🦀 two"},
    {"chosen": "same", "rejected": "same"},
    {"chosen": "word", "rejected": "work"},
]
CHATS = [
    {"prompt": [user("What color is the sky?")], "chosen": [assistant("It is blue.")],
     "rejected": [assistant("It is green, as everybody can see when looking up.")]},
    {"prompt": [SYSTEM, user("Hi"), assistant("Hello."), user("Who are you? Please answer in one short sentence.")],
     "chosen": [assistant("A model.")], "rejected": [assistant("I"), user("You?"), assistant("am.")]},
]
IMPLICIT_CHATS = [
    {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in CHATS
] + [{"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b"), user("c")]}]
CASES = [
    ("text", None, TEXT),
    ("implicit text", None, IMPLICIT),
    ("chat", "markup", CHATS),
    ("chat", "headers", CHATS),
    ("implicit chat", "markup", IMPLICIT_CHATS),
    ("implicit chat", "spaces", IMPLICIT_CHATS),
]
PAIRS = [
    {"id": 7, "prompt": "1 + 1 = ", "chosen": "2", "rejected": "a \"guess\", 3", "margin": 0.5},
    {"id": 8, "prompt": "naïve 水 ", "chosen": "🦀", "rejected": "no", "margin": -1.25},
    {"id": 9, "prompt": "line\nbreak", "chosen": "a", "rejected": "b", "margin": 2.0},
]
PROMPTS = [
    {"prompt": "1 + 1 = ", "answer": "2", "level": 1, "tags": ["add", "small"], "meta": {"source": "a", "ok": True}},
    {"prompt": "naïve 水 \"🦀\", ", "answer": "", "level": 2, "tags": [], "meta": {"source": "b", "ok": False}},
    {"prompt": "line\nbreak", "answer": None, "level": 3, "tags": ["x"], "meta": {"source": "c", "ok": True}},
]


def main():
    disable_progress_bars()
    cases = []
    for name, template, rows in CASES:
        tokenizer = AutoTokenizer.from_pretrained(CHAT / "tokenizer")
        tokenizer.pad_token = tokenizer.eos_token
        if template:
            tokenizer.chat_template = (CHAT / "templates" / f"{template}.jinja").read_text()
        limits = [10, 16, 1024]
        dpo = [expected_dpo(tokenizer, rows, limit, mode) for limit in limits for mode in ["keep_start", "keep_end"]]
        reward = [expected_reward(tokenizer, rows, limit) for limit in [16, 24, 1024]]
        cases.append({"name": name, "template": template, "rows": rows, "dpo": dpo, "reward": reward})
    text = json.dumps(cases, ensure_ascii=False, separators=(",", ":"))
    for start in ['{"name"', '{"max_length"']:
        text = text.replace(start, "\n" + start)
    (HERE / "preferences.json").write_text(text + "\n")
    write_files("pairs", PAIRS)
    write_files("prompts", PROMPTS)


def expected_dpo(tokenizer, rows, max_length, mode):
    args = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode=mode)
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    prepared = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, "train")
    collate = DataCollatorForPreference(tokenizer.pad_token_id, max_length, mode)
    pairs = []
    for example in prepared:
        batch = collate([{key: example[key] for key in ["prompt_ids", "chosen_ids", "rejected_ids"]}])
        docs = []
        for ids, real, mask in zip(batch["input_ids"], batch["attention_mask"], batch["completion_mask"]):
            length = int(real.sum())
            docs.append({"ids": ids[:length].tolist(), "mask": mask[:length].tolist()})
        pairs.append(docs)
    return {"max_length": max_length, "mode": mode, "pairs": pairs}


def expected_reward(tokenizer, rows, max_length):
    args = SimpleNamespace(dataset_num_proc=None, max_length=max_length)
    prepared = RewardTrainer._prepare_dataset(None, Dataset.from_list(rows), tokenizer, args, "train")
    return {"max_length": max_length, "pairs": [[row["chosen_ids"], row["rejected_ids"]] for row in prepared]}


def write_files(name, rows):
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (HERE / f"{name}.json").write_text(json.dumps({"data": rows}, indent=1))
    with open(HERE / f"{name}.csv", "w", newline="") as file:
        out = csv.DictWriter(file, rows[0].keys())
        out.writeheader()
        out.writerows(rows)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, HERE / f"{name}.parquet")
    with pa.ipc.new_stream(HERE / f"{name}.arrow", table.schema) as out:
        out.write_table(table)


main()
