"""Write the golden data files in `data/`: one small set of rows in every kind of file that other libraries write, and
the rows that TRL's packing makes.

Run by hand, from this folder, when a case changes:

    pip install trl==1.16.0 datasets==5.2.0
    python make_data.py

data/rows.jsonl, .jsonl.gz (two members), .jsonl.zst (two frames), .json, under-key.json, .csv, .txt: the same texts
data/rows-train.arrow      the stream format in which `datasets` stores prepared data
data/rows-file.arrow       an Arrow file with batches compressed by lz4; rows-zstd.arrow: by zstd
data/rows.parquet          several row groups, snappy; rows-lz4, rows-gzip, rows-zstd, rows-brotli: the other codecs
data/chats.parquet, chats.jsonl   the same conversations; tool calls in some messages only
data/ids.parquet           `input_ids` and `labels`
data/packing.json          lengths, and for every strategy the rows that `trl.pack_dataset` returns
"""

import gzip
import json
import pathlib
import random

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, disable_progress_bars
from trl import pack_dataset

HERE = pathlib.Path(__file__).resolve().parent / "data"
TEXTS = ["plain", "a \"quoted\" word, and a comma", "naïve 水 🦀", "tab\tand\\backslash", "last"] * 4
CHATS = [
    [{"role": "user", "content": "Weather in Bern?"},
     {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": "{\"city\": \"Bern\"}"}]},
     {"role": "tool", "content": "rain"},
     {"role": "assistant", "content": "It rains."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
     {"role": "assistant", "content": "Hello."}],
]


def main():
    disable_progress_bars()
    HERE.mkdir(exist_ok=True)
    write_texts()
    write_tables()
    write_packing()


def write_texts():
    lines = [json.dumps({"id": n, "text": text}, ensure_ascii=False) + "\n" for n, text in enumerate(TEXTS)]
    halves = ["".join(lines[:7]).encode(), "".join(lines[7:]).encode()]
    (HERE / "rows.jsonl").write_bytes(b"".join(halves))
    (HERE / "rows.jsonl.gz").write_bytes(b"".join(gzip.compress(half, mtime=0) for half in halves))
    zstd = pa.Codec("zstd")
    (HERE / "rows.jsonl.zst").write_bytes(b"".join(zstd.compress(half, asbytes=True) for half in halves))
    rows = [json.loads(line) for line in lines]
    (HERE / "rows.json").write_text(json.dumps(rows, indent=1))
    (HERE / "under-key.json").write_text(json.dumps({"version": "1", "tags": ["a"], "data": rows}))
    (HERE / "rows.txt").write_text("".join(text + "\n" for text in TEXTS))
    Dataset.from_list(rows).to_csv(HERE / "rows.csv")


def write_tables():
    rows = {"id": list(range(len(TEXTS))), "text": TEXTS}
    table = pa.table(rows)
    Dataset.from_dict(rows).save_to_disk(HERE / "saved", num_shards=1)
    (HERE / "saved/data-00000-of-00001.arrow").replace(HERE / "rows-train.arrow")
    for file in sorted((HERE / "saved").iterdir()):
        file.unlink()
    (HERE / "saved").rmdir()
    for name, codec in [("rows-file", "lz4"), ("rows-zstd", "zstd")]:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_file(HERE / f"{name}.arrow", table.schema, options=options) as out:
            for batch in table.to_batches(max_chunksize=6):
                out.write_batch(batch)
    for name, codec in [("rows", "snappy"), ("rows-lz4", "lz4"), ("rows-gzip", "gzip"), ("rows-zstd", "zstd"),
                        ("rows-brotli", "brotli")]:
        pq.write_table(table, HERE / f"{name}.parquet", compression=codec, row_group_size=6)
    (HERE / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    Dataset.from_dict({"messages": CHATS}).to_parquet(HERE / "chats.parquet")
    ids = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [-100, 5]], "attention_mask": [[1, 1, 1], [1, 1]]}
    Dataset.from_dict(ids).to_parquet(HERE / "ids.parquet")


def write_packing():
    random.seed(7)
    lengths = [random.choice([2, 3, 5, 8, 13, 21, 34, 40]) for _ in range(60)]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    docs = [list(range(start, start + length)) for start, length in zip(starts, lengths)]
    golden = {"lengths": lengths, "max_length": 16}
    for strategy in ["bfd", "bfd_split", "wrapped"]:
        packed = pack_dataset(Dataset.from_dict({"input_ids": docs}), golden["max_length"], strategy)
        golden[strategy] = packed["input_ids"][:]
    (HERE / "packing.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
