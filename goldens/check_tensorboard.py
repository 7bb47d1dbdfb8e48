"""Read event files with TensorBoard's own reader and compare them with metrics.jsonl.

Run by hand on the output folder of a run with `report_to: tensorboard`:

    pip install tensorboard
    python check_tensorboard.py OUTPUT_DIR
"""

import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = pathlib.Path(sys.argv[1])
events = EventAccumulator(str(run / "runs"), size_guidance={"scalars": 0})
events.Reload()
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
checked = 0
for tag in events.Tags()["scalars"]:
    kind, name = tag.split("/", 1)
    key = {"eval/loss": "eval_loss", "eval/perplexity": "eval_perplexity", "eval/runtime": "eval_seconds"}.get(tag, name)
    logged = {line["step"]: line[key] for line in lines if key in line and ("eval_tokens" in line) == (kind == "eval")}
    found = {event.step: event.value for event in events.Scalars(tag)}
    assert found.keys() == logged.keys(), (tag, sorted(found), sorted(logged))
    for step, value in found.items():
        expected = logged[step]
        assert (math.isnan(value) and expected is None) or math.isclose(value, expected, rel_tol=1e-6), (tag, step)
        checked += 1
print(f"{checked} values of {len(events.Tags()['scalars'])} tags agree")
