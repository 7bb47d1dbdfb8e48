//! What a run writes about itself: metrics, trackers, profiles, and the commands that read them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Folder, RUN, rows};
use crate::tidy;

/// The keys in the first column of the tables below a heading of docs/metrics.md.
fn documented(heading: &str) -> BTreeSet<String> {
    let page = fs::read_to_string(tidy::root().join("docs/metrics.md")).unwrap();
    let (_, section) = page.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    cells.flat_map(|cell| cell.split(", ")).map(|key| key.trim_matches('`').to_owned()).collect()
}

fn lines(text: &str) -> Vec<serde_json::Map<String, Value>> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn keys<'a>(lines: impl Iterator<Item = &'a serde_json::Map<String, Value>>) -> BTreeSet<String> {
    lines.flat_map(|line| line.keys().cloned()).collect()
}

#[test]
fn every_key_is_documented() {
    let folder = Folder::new(RUN);
    folder.write("eval.jsonl", rows(2));
    let run = [
        "train",
        "run.yaml",
        "--nproc",
        "2",
        "threads=1",
        "eval_files=eval.jsonl",
        "eval_steps=2",
        "save_steps=1",
    ];
    let more = ["strategy=zero3", "per_device_train_batch_size=1", "max_steps=4", "fp16=true"];
    folder.succeeds(&[&run[..], &more[..]].concat());
    let all = lines(&folder.read("out/metrics.jsonl"));
    let is_evaluation = |line: &&serde_json::Map<String, Value>| line.contains_key("eval_seconds");
    let evaluations = keys(all.iter().filter(is_evaluation));
    assert_eq!(evaluations, documented("Evaluations"));
    let steps = keys(all.iter().filter(|line| !is_evaluation(line)));
    let known: BTreeSet<String> = documented("Steps").union(&documented("Costs")).cloned().collect();
    let unknown: Vec<_> =
        steps.difference(&known).filter(|key| !matches!(key.as_str(), "fingerprint" | "numbers")).collect();
    assert!(unknown.is_empty(), "docs/metrics.md does not have {unknown:?}");
    // What this run cannot have: waits that may take no time, and the sensors of a GPU.
    let absent: Vec<_> = known.difference(&steps).collect();
    let optional = |key: &str| {
        key.ends_with("_wait_seconds") || matches!(key, "energy_joules" | "power_watts" | "copy_seconds")
    };
    assert!(absent.iter().all(|key| optional(key)), "this run does not write {absent:?}");

    let last = all.iter().rfind(|line| !is_evaluation(line)).unwrap();
    let number = |key: &str| last[key].as_f64().unwrap();
    assert!(number("forward_seconds") + number("backward_seconds") < 2.0 * number("step_seconds"));
    assert!(number("sent_bytes") > 1000.0 && number("received_bytes") > 1000.0);
    assert!(number("mfu") > 0.0 && number("mfu") < 2.0, "{last:?}");
    assert_eq!(last["rank_busy_seconds"].as_array().unwrap().len(), 2);
    assert!(number("memory_peak_bytes") >= number("memory_bytes"));
}

#[test]
fn a_breakdown_is_printed_if_asked_for() {
    let folder = Folder::new(RUN);
    let printed = folder.succeeds(&["train", "run.yaml", "wall_clock_breakdown=true"]);
    let line = printed.lines().find(|line| line.starts_with("step 2 | time | ")).expect("a breakdown");
    assert!(line.contains(" forward ") && line.contains(" %)"), "{line}");
    assert!(folder.read("out/logs/training.log").contains(line));
}

#[test]
fn profiled_steps_are_a_timeline_of_all_ranks() {
    let folder = Folder::new(RUN);
    let run = ["train", "run.yaml", "--nproc", "2", "threads=1", "max_steps=5", "strategy=zero2"];
    let printed = folder.succeeds(&[&run[..], &["--profile-steps", "2:3"]].concat());
    assert!(printed.contains("profile in out/profile/steps-2-3.json"), "{printed}");
    let file: Value = serde_json::from_str(&folder.read("out/profile/steps-2-3.json")).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    for rank in 0..2 {
        let of_rank = || spans.iter().filter(move |span| span["pid"] == rank);
        let updates = of_rank().filter(|span| span["cat"] == "update").count();
        let steps = of_rank().filter(|span| span["cat"] == "step").count();
        assert!(updates > 0 && steps == 2, "rank {rank}");
        assert!(of_rank().any(|span| span["name"].as_str().unwrap().contains("backward")), "rank {rank}");
    }
    for span in &spans {
        assert!(span["ts"].as_f64().unwrap() >= 0.0 && span["dur"].as_f64().unwrap() >= 0.0, "{span}");
    }
    // Both ranks end a step in the same exchange, so it overlaps on the shared clock.
    let exchange = |rank: u64| {
        let of_step = |span: &&&Value| span["pid"] == rank && span["name"] == "step 3: exchange";
        let span = spans.iter().find(of_step).unwrap();
        let start = span["ts"].as_f64().unwrap();
        (start, start + span["dur"].as_f64().unwrap())
    };
    let ((start, end), (other_start, other_end)) = (exchange(0), exchange(1));
    assert!(start < other_end && other_start < end, "{:?} {:?}", (start, end), (other_start, other_end));
    let names: Vec<&Value> =
        events.iter().filter(|e| e["name"] == "thread_name").map(|e| &e["args"]["name"]).collect();
    assert!(
        names.iter().any(|name| *name == "compute") && names.iter().any(|name| *name == "comm"),
        "{names:?}"
    );
}

#[test]
fn files_of_trackers_have_every_step() {
    let folder = Folder::new(RUN);
    folder.succeeds(&[
        "train",
        "run.yaml",
        "max_steps=3",
        "report_to=[tensorboard,csv,wandb]",
        "project=mine",
    ]);
    let csv = folder.read("out/metrics.csv");
    assert!(csv.starts_with("step,train/loss,train/learning_rate,"), "{csv}");
    assert_eq!(csv.lines().count(), 4);
    let mut runs = fs::read_dir(folder.path("out/wandb")).unwrap().map(|entry| entry.unwrap().path());
    let run = runs.find(|path| path.is_dir()).unwrap();
    let log = fs::read_dir(&run)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.extension().is_some_and(|e| e == "wandb"));
    let bytes = fs::read(log.unwrap()).unwrap();
    assert!(bytes.starts_with(b":W&B"));
    for text in ["mine", "train/global_step", "train/loss", "max_steps"] {
        assert!(bytes.windows(text.len()).any(|part| part == text.as_bytes()), "{text}");
    }
    assert_eq!(fs::read_dir(folder.path("out/runs")).unwrap().count(), 1);
}

/// A server that answers like MLflow and Trackio, and sends every request to the test.
fn server() -> (u16, mpsc::Receiver<(String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, sender) = (stream.unwrap(), sender.clone());
            std::thread::spawn(move || {
                while let Some((head, body)) = request(&mut stream) {
                    let answer = answer(&head);
                    let text = format!(
                        "HTTP/1.1 {} X\r\nContent-Length: {}\r\nContent-Type: application/json\r\n\r\n{}",
                        answer.0,
                        answer.1.len(),
                        answer.1
                    );
                    if sender.send((head, body)).is_err() || stream.write_all(text.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, requests)
}

fn request(stream: &mut std::net::TcpStream) -> Option<(String, String)> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        bytes.push(byte[0]);
    }
    let head = String::from_utf8(bytes).unwrap();
    let length = head
        .to_lowercase()
        .lines()
        .find_map(|l| l.strip_prefix("content-length: ")?.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((head, String::from_utf8(body).unwrap()))
}

fn answer(head: &str) -> (u16, &'static str) {
    match head.split(' ').nth(1).unwrap() {
        path if path.contains("get-by-name") => (404, r#"{"error_code":"RESOURCE_DOES_NOT_EXIST"}"#),
        path if path.ends_with("experiments/create") => (200, r#"{"experiment_id":"7"}"#),
        path if path.ends_with("runs/create") => (200, r#"{"run":{"info":{"run_id":"abc"}}}"#),
        _ => (200, "{}"),
    }
}

#[test]
fn servers_get_every_step_and_no_secret_is_written() {
    let folder = Folder::new(RUN);
    let (port, requests) = server();
    let mut command = folder.command(&["train", "run.yaml", "max_steps=3", "report_to=[mlflow,trackio]"]);
    command
        .env("MLFLOW_TRACKING_URI", format!("http://me:hidden-pass@127.0.0.1:{port}"))
        .env("TRACKIO_SERVER_URL", format!("http://127.0.0.1:{port}/?write_token=hidden-token"))
        .env("WANDB_API_KEY", "hidden-key");
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let all: Vec<(String, String)> = requests.try_iter().collect();
    let find = |path: &str| {
        all.iter().filter(|(head, _)| head.split(' ').nth(1).unwrap().ends_with(path)).collect::<Vec<_>>()
    };
    let metrics: Vec<Value> = find("log-batch")
        .iter()
        .flat_map(|(_, body)| {
            serde_json::from_str::<Value>(body).unwrap()["metrics"].as_array().cloned().unwrap_or_default()
        })
        .filter(|metric| metric["key"] == "train/loss")
        .map(|metric| metric["step"].clone())
        .collect();
    assert_eq!(metrics, [1, 2, 3]);
    assert!(find("runs/update")[0].1.contains("FINISHED"));
    assert!(find("runs/create")[0].0.contains("Basic bWU6aGlkZGVuLXBhc3M="), "{all:?}");
    let logs: Vec<Value> = find("bulk_log")
        .iter()
        .flat_map(|(_, body)| {
            serde_json::from_str::<Value>(body).unwrap()["logs"].as_array().cloned().unwrap()
        })
        .map(|entry| entry["step"].clone())
        .collect();
    assert_eq!(logs, [1, 2, 3]);
    assert!(find("bulk_log")[0].0.to_lowercase().contains("x-trackio-write-token: hidden-token"));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(!printed.contains("hidden-"), "{printed}");
    for (path, content) in folder.tree() {
        let text = String::from_utf8_lossy(&content.unwrap_or_default()).into_owned();
        assert!(!text.contains("hidden-"), "{} has a secret", path.display());
    }
}

#[test]
fn a_server_that_is_missing_warns_once_and_slows_nothing() {
    let folder = Folder::new(RUN);
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = folder.command(&["train", "run.yaml", "max_steps=40", "report_to=mlflow"]);
    command.env("MLFLOW_TRACKING_URI", format!("http://127.0.0.1:{port}"));
    let start = std::time::Instant::now();
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(start.elapsed() < Duration::from_secs(60));
    let printed = String::from_utf8(output.stdout).unwrap();
    let warnings: Vec<&str> = printed.lines().filter(|line| line.contains("MLflow")).collect();
    assert_eq!(warnings.len(), 1, "{printed}");
    assert!(
        warnings[0].starts_with(&format!("MLflow: http://127.0.0.1:{port} cannot be reached")),
        "{}",
        warnings[0]
    );
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 40);
}

#[test]
fn runs_are_listed_shown_compared_and_drawn() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "output_dir=all/first"]);
    folder.succeeds(&["train", "run.yaml", "output_dir=all/second", "learning_rate=1e-3", "max_steps=3"]);
    let list = folder.succeeds(&["runs", "ls", "all"]);
    assert_eq!(list.lines().count(), 3, "{list}");
    assert!(list.contains("all/first   finished            2/2") && list.contains("3/3"), "{list}");
    let objects = lines(&folder.succeeds(&["runs", "ls", "--json"]));
    assert!(objects.iter().any(|run| run["run"] == "./all/second" && run["total_steps"] == 3), "{objects:?}");
    let shown = folder.succeeds(&["runs", "show", "all/second"]);
    for part in [
        "all/second: finished at step 3 of 3",
        "learning_rate",
        "newest step",
        "planned memory",
        "forward_seconds",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
    let text = folder.succeeds(&["runs", "show", "all/second", "--prometheus"]);
    assert!(text.contains("lockstep_step{run=\"second\"} 3\n"), "{text}");
    let diff = folder.succeeds(&["runs", "diff", "all/first", "all/second"]);
    let row = diff.lines().find(|line| line.starts_with("learning_rate ")).expect("the setting differs");
    assert!(row.contains("(default)") && row.ends_with("1e-3"), "{diff}");
    let svg = folder.succeeds(&["runs", "plot", "all/first", "all/second", "--metric", "grad_norm"]);
    assert!(svg.starts_with("<svg ") && svg.matches("stroke-width=\"1.5\"").count() == 2);
    let refused = folder.refused(&["runs", "plot", "all/first", "--metric", "speed"], 64);
    assert!(refused.contains("have no `speed`") && refused.contains("hint: it has epoch, loss"), "{refused}");
    folder.refused(&["runs", "show", "elsewhere"], 66);
}

#[test]
fn logs_of_any_program_are_read() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    let own = folder.succeeds(&["logs", "out/logs/training.log"]);
    assert_eq!(own.lines().count(), 3, "{own}");
    folder.write("theirs.log", "epoch 1\nstep 10 loss: 2.5\nstep 20 loss: 2.25\n");
    let json = folder.succeeds(&["logs", "theirs.log", "--json", "--svg", "loss.svg"]);
    let read: Vec<_> =
        lines(&json).into_iter().map(|line| (line["step"].clone(), line["loss"].clone())).collect();
    assert_eq!(read, [(10.into(), 2.5.into()), (20.into(), 2.25.into())]);
    assert!(folder.read("loss.svg").contains("<path"));
    let refused = folder.refused(&["logs", "data.jsonl"], 65);
    assert!(refused.contains("data.jsonl has no line with a loss"), "{refused}");
}
