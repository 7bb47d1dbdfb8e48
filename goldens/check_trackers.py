"""Read what trackers get with their own readers, and compare it with metrics.jsonl.

Run by hand on the output folder of a run with `report_to: [tensorboard, wandb, csv]`:

    pip install tensorboard wandb
    python check_trackers.py OUTPUT_DIR

TensorBoard's reader reads the event files. `wandb sync` uploads the offline run to a server in this process that answers
like wandb's; older versions of wandb, which have a reader in Python, are asked instead. Nothing leaves this machine.
"""

import csv
import gzip
import http.server
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading

run = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = {line["step"]: line for line in lines if "eval_seconds" not in line}
evaluations = {line["step"]: line for line in lines if "eval_seconds" in line}


def expected(tag):
    """The values of a metric by step, from metrics.jsonl."""
    kind, name = tag.split("/", 1)
    if kind == "eval":
        key = {"runtime": "eval_seconds"}.get(name, f"eval_{name}")
        return {step: line[key] for step, line in evaluations.items() if key in line}
    return {step: line[name] for step, line in steps.items() if name in line}


def compare(who, found):
    """Compare {tag: {step: value}} with metrics.jsonl."""
    checked = 0
    for tag, values in found.items():
        logged = expected(tag)
        assert values.keys() == logged.keys(), (who, tag, sorted(values), sorted(logged))
        for step, value in values.items():
            same = (logged[step] is None and not math.isfinite(value)) or math.isclose(value, logged[step], rel_tol=1e-5, abs_tol=1e-6)
            assert same, (who, tag, step, value, logged[step])
            checked += 1
    assert checked > 0, f"{who} has nothing"
    print(f"{who}: {checked} values of {len(found)} metrics agree")


def check_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "runs"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Tags()["scalars"]
    compare("tensorboard", {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in scalars})
    text = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("```yaml\n"), text
    assert events.summary_metadata["config"].plugin_data.plugin_name == "text"


def check_csv():
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        for tag, value in row.items():
            if tag != "step" and value:
                found.setdefault(tag, {})[int(row["step"])] = float(value)
    compare("csv", found)


def from_history(rows):
    found = {}
    for row in rows:
        for tag, value in row.items():
            if "/" in tag and tag != "train/global_step":
                found.setdefault(tag, {})[row["_step"]] = float(value)
    return found


def read_wandb_file(path):
    """With the reader of wandb 0.19 and older."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    rows, kinds = [], []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kinds.append(record.WhichOneof("record_type"))
        if kinds[-1] == "history":
            rows.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item})
    assert kinds[:2] == ["header", "run"] and kinds[-1] == "exit", kinds
    return rows


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answers what `wandb sync` asks, and keeps the rows of the history."""

    rows = []
    run = {}
    complete = False
    asked = []

    def log_message(self, *_):
        pass

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = json.loads(body)
        if self.path.endswith("/file_stream"):
            history = request.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            StandIn.rows += [json.loads(line) for line in history]
            StandIn.complete |= bool(request.get("complete"))
            return self.answer({})
        query = request.get("query", "")
        StandIn.asked.append(re.findall(r"(?:query|mutation)\s+(\w+)", query)[:1])
        variables = request.get("variables") or {}
        if "upsertBucket" in query:
            StandIn.run = variables
            name = variables.get("name")
            project = {"name": variables.get("project"), "entity": {"name": "us"}}
            bucket = {"id": "1", "name": name, "displayName": variables.get("displayName"), "config": "{}", "project": project,
                      "sweepName": None, "historyLineCount": 0, "description": "", "summaryMetrics": "{}"}
            return self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        viewer = {"id": "1", "entity": "us", "username": "us", "email": "", "flags": "{}", "teams": {"edges": []}}
        self.answer({"data": {"viewer": viewer, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
                              "model": None, "project": None, "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
                              "organizationCoreWeaveOrganizationID": None}})


def sync_wandb_run(folder):
    """With `wandb sync`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
    wandb = pathlib.Path(sys.executable).parent / "wandb"
    done = subprocess.run([wandb, "sync", folder], env=os.environ | own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and StandIn.rows, (done, StandIn.asked)
    assert StandIn.complete, "the run has ended"
    return StandIn.rows


def check_wandb():
    (folder,) = [path for path in (run / "wandb").iterdir() if path.is_dir()]
    try:
        import wandb.sdk.internal.datastore  # noqa: F401
    except ImportError:
        rows = sync_wandb_run(folder)
        print(f"wandb sync: run {StandIn.run.get('name')} of project {StandIn.run.get('project')}")
    else:
        (file,) = folder.glob("*.wandb")
        rows = read_wandb_file(file)
    compare("wandb", from_history(rows))


check_tensorboard()
check_csv()
check_wandb()
