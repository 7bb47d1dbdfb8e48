//! SIGTERM and SIGUSR1: the run saves a checkpoint after the step it is in and exits with 143; resumed, it ends bit
//! for bit like a run that was never stopped.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::launch::{free_port, node};
use crate::launch_ends::{children, is_alive, signal};
use crate::support::{Folder, rows};

/// Fifty steps of some ten milliseconds. Nothing saves a checkpoint but a signal.
const RUN: &str = "\
model: {architectures: [Qwen3ForCausalLM], hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, \
num_key_value_heads: 2, head_dim: 16, intermediate_size: 160, max_position_embeddings: 128, \
tie_word_embeddings: true}
train_files: data.jsonl
max_length: 128
packing: bfd
per_device_train_batch_size: 2
max_steps: 50
save_strategy: \"no\"
learning_rate: 3e-3
weight_decay: 0.1
threads: 1
";

fn folder() -> Folder {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", rows(90));
    folder
}

/// A command that has printed the line of a step.
struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: JoinHandle<String>,
}

struct Ended {
    code: Option<i32>,
    took: Duration,
    /// The output after the expected line.
    stdout: String,
    stderr: String,
}

fn spawn(command: &mut Command) -> Running {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let stderr = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    Running { stdout: BufReader::new(child.stdout.take().unwrap()), stderr, child }
}

/// Starts a run and returns when it has printed the line of `step`.
fn start(folder: &Folder, step: u32, args: &[&str]) -> Running {
    spawn(&mut folder.command(args)).at_step(step)
}

impl Running {
    fn at_step(mut self, step: u32) -> Running {
        let prefix = format!("step {step}/");
        let mut line = String::new();
        while !line.starts_with(&prefix) {
            line.clear();
            if self.stdout.read_line(&mut line).unwrap() == 0 {
                panic!("step {step} was not reached: {}", self.end().stderr);
            }
        }
        self
    }

    fn signal(&self, name: &str) {
        signal(name, self.child.id());
    }

    fn end(mut self) -> Ended {
        let start = Instant::now();
        let ranks = children(self.child.id());
        let code = self.child.wait().unwrap().code();
        let took = start.elapsed();
        assert!(!ranks.iter().any(|pid| is_alive(*pid)), "a rank is left");
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        Ended { code, took, stdout, stderr: self.stderr.join().unwrap() }
    }
}

/// The step after which a run has stopped, by what it has printed. There is a checkpoint of it, of no other step, and
/// `metrics.jsonl` ends with it.
fn stopped_after(folder: &Folder, ended: &Ended, by: &str) -> u64 {
    assert_eq!(ended.code, Some(143), "{}{}", ended.stdout, ended.stderr);
    let prefix = format!("stopped by {by} after step ");
    let line = ended.stdout.lines().find_map(|line| line.strip_prefix(&prefix));
    let line = line.unwrap_or_else(|| panic!("{}{}", ended.stdout, ended.stderr));
    let (step, rest) = line.split_once(';').unwrap();
    assert_eq!(
        rest,
        format!(" checkpoint in out/checkpoints/step-{step}; resume with resume_from_checkpoint: auto")
    );
    let saved: Vec<_> =
        fs::read_dir(folder.path("out/checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(saved, [format!("step-{step}").as_str()]);
    let step: u64 = step.parse().unwrap();
    assert_eq!(losses(folder, "out").len() as u64, step);
    assert!(folder.read("out/logs/training.log").contains(&format!("{prefix}{step}; checkpoint in ")));
    assert!(!folder.path("out/model").exists(), "the run is not done");
    step
}

/// Step, epoch, loss, gradient norm and rate of each line, as text: without speeds and times.
fn losses(folder: &Folder, out: &str) -> Vec<String> {
    let metrics = folder.read(&format!("{out}/metrics.jsonl"));
    metrics.lines().map(|line| line.split(",\"tokens_per_second\"").next().unwrap().to_string()).collect()
}

/// Resumes the run in `out`, which then has the numbers of the one in `straight`.
fn resumes_to_the_same(folder: &Folder, args: &[&str], step: u64) {
    let text = folder.succeeds(&[args, &["resume_from_checkpoint=auto"]].concat());
    assert!(text.contains(&format!("resumed from out/checkpoints/step-{step} at step {step}\n")), "{text}");
    let [straight, out] = ["straight", "out"]
        .map(|out| fs::read(folder.path(&format!("{out}/model/model.safetensors"))).unwrap());
    assert!(straight == out, "the weights differ");
    assert_eq!(losses(folder, "straight"), losses(folder, "out"));
    fs::remove_dir_all(folder.path("out")).unwrap();
}

#[test]
fn one_rank_saves_and_resumes_to_the_same_bits() {
    let folder = folder();
    folder.succeeds(&["train", "run.yaml", "output_dir=straight"]);
    let args = ["train", "run.yaml", "output_dir=out"];
    for (name, by) in [("-TERM", "SIGTERM"), ("-USR1", "SIGUSR1")] {
        let running = start(&folder, 5, &args);
        running.signal(name);
        let ended = running.end();
        assert_eq!(ended.stderr, "");
        let step = stopped_after(&folder, &ended, by);
        assert!((5..=50).contains(&step), "step {step}");
        resumes_to_the_same(&folder, &args, step);
    }
}

/// An evaluation that was due after the last step is done when the run is resumed.
#[test]
fn an_evaluation_that_was_due_is_made_on_resuming() {
    let folder = folder();
    folder.write("eval.jsonl", rows(6));
    let all = |output| {
        [
            "train",
            "run.yaml",
            "eval_files=eval.jsonl",
            "eval_strategy=steps",
            "eval_steps=1",
            "max_steps=30",
            output,
        ]
    };
    folder.succeeds(&all("output_dir=straight"));
    let running = start(&folder, 5, &all("output_dir=out"));
    running.signal("-TERM");
    let ended = running.end();
    assert_eq!(ended.code, Some(143), "{}{}", ended.stdout, ended.stderr);
    folder.succeeds(&[&all("output_dir=out")[..], &["resume_from_checkpoint=auto"]].concat());
    let lines = |out| {
        let numbers = |line: &str| {
            let mut record: serde_json::Value = serde_json::from_str(line).unwrap();
            let record = record.as_object_mut().unwrap();
            let measured = ["tflops", "mfu", "memory_bytes", "memory_peak_bytes"];
            record.retain(|key, _| !key.contains("second") && !measured.contains(&key.as_str()));
            format!("{record:?}")
        };
        folder.read(&format!("{out}/metrics.jsonl")).lines().map(numbers).collect::<Vec<_>>()
    };
    assert_eq!(lines("straight").len(), 60);
    assert_eq!(lines("straight"), lines("out"));
}

#[test]
fn several_ranks_stop_after_the_same_step() {
    let folder = folder();
    let all = |output| ["train", "run.yaml", "--nproc", "2", "strategy=zero2", output];
    folder.succeeds(&all("output_dir=straight"));
    let args = all("output_dir=out");
    let rank = |running: &Running, rank: usize| children(running.child.id())[rank];
    let ways: [(&str, Option<usize>, &str); 4] = [
        ("-TERM", None, "SIGTERM"),
        // The launcher sends SIGTERM to its ranks.
        ("-USR1", None, "SIGTERM"),
        ("-TERM", Some(0), "SIGTERM"),
        ("-USR1", Some(1), "a signal to another rank"),
    ];
    for (name, to, by) in ways {
        let running = start(&folder, 5, &args);
        signal(name, to.map_or(running.child.id(), |to| rank(&running, to)));
        let ended = running.end();
        assert_eq!(ended.stderr, "");
        let step = stopped_after(&folder, &ended, by);
        resumes_to_the_same(&folder, &args, step);
    }
}

/// As `timeout`, Slurm or systemd send it: to the launcher and its ranks at the same time. The signal that the launcher
/// forwards is then not the second signal of a rank.
#[test]
fn a_signal_to_the_whole_group() {
    let folder = folder();
    let args = ["launch", "--nproc-per-node", "2", "--max-restarts", "2", "run.yaml"];
    let running =
        spawn(folder.command(&[&args[..], &["output_dir=out"]].concat()).process_group(0)).at_step(5);
    let group = format!("-{}", running.child.id());
    assert!(Command::new("kill").args(["-TERM", "--", &group]).status().unwrap().success());
    let ended = running.end();
    assert_eq!(ended.stderr, "");
    stopped_after(&folder, &ended, "SIGTERM");
}

/// A signal to the launcher of one node stops the ranks of both, and they are not restarted.
#[test]
fn two_nodes_stop() {
    let (folder, port) = (folder(), free_port());
    let node = node(&folder, &port);
    let more = ["--max-restarts", "2", "output_dir=out"];
    let one = spawn(&mut node("1", &more));
    let zero = spawn(&mut node("0", &more)).at_step(5);
    one.signal("-TERM");
    let (one, zero) = (one.end(), zero.end());
    assert_eq!((one.code, one.stderr.as_str(), zero.stderr.as_str()), (Some(143), "", ""));
    stopped_after(&folder, &zero, "a signal to another rank");
}

/// A run that blocks after some steps: its log is a pipe that is nearly full and has no reader. Keep the pipe open.
fn stuck(folder: &Folder, grace: &str) -> (Running, fs::File) {
    fs::create_dir_all(folder.path("out/logs")).unwrap();
    let pipe = folder.path("out/logs/training.log");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut pipe = fs::File::options().read(true).write(true).open(pipe).unwrap();
    pipe.write_all(&[b'\n'; 60 << 10]).unwrap();
    let running =
        start(folder, 1, &["train", "run.yaml", "output_dir=out", "max_steps=100000", "--grace", grace]);
    let written = || fs::metadata(folder.path("out/metrics.jsonl")).unwrap().len();
    let mut before = 0;
    while written() != before {
        before = written();
        sleep(Duration::from_millis(300));
    }
    (running, pipe)
}

#[test]
fn a_second_signal_leaves_at_once() {
    let folder = folder();
    let (mut running, _pipe) = stuck(&folder, "60");
    running.signal("-TERM");
    sleep(Duration::from_millis(300));
    assert!(running.child.try_wait().unwrap().is_none(), "it has a minute");
    running.signal("-TERM");
    let ended = running.end();
    assert_eq!(ended.code, Some(143));
    assert!(ended.took < Duration::from_secs(5), "{:?}", ended.took);
    assert_snapshot!(ended.stderr, @"received a second SIGTERM: the run ends at once, without a checkpoint of its last steps");
    assert!(!folder.path("out/checkpoints").exists());
}

#[test]
fn the_grace_bounds_the_wait() {
    let folder = folder();
    let (running, _pipe) = stuck(&folder, "0.3");
    running.signal("-TERM");
    let ended = running.end();
    assert_eq!(ended.code, Some(143));
    assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
    assert_snapshot!(ended.stderr, @"the run did not stop within 0.3 s of SIGTERM (--grace), so it ends without a checkpoint of its last steps");
}

/// One rank hangs, and the other waits for it in a collective. `--grace` limits both.
#[test]
fn the_grace_bounds_the_wait_for_a_rank_that_hangs() {
    for to_rank in [false, true] {
        let folder = folder();
        let args = ["train", "run.yaml", "--nproc", "2", "--grace", "0.5", "output_dir=out"];
        let running = start(&folder, 5, &args);
        let ranks = children(running.child.id());
        signal("-STOP", ranks[1]);
        signal("-TERM", if to_rank { ranks[0] } else { running.child.id() });
        let ended = running.end();
        assert_eq!(ended.code, Some(143), "{}", ended.stderr);
        assert!(ended.took < Duration::from_secs(2), "{:?}", ended.took);
        let last = ended.stderr.lines().last().unwrap_or_default();
        let without = "the run ended without a checkpoint of its last steps: rank ";
        assert!(last.starts_with(without), "{}", ended.stderr);
    }
}

/// Before the first step there is nothing to save.
#[test]
fn before_the_first_step() {
    let folder = folder();
    let mut command = folder.command(&["train", "run.yaml", "output_dir=out"]);
    // It waits for a rank that never starts.
    let waiting = spawn(command.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", &free_port())]));
    sleep(Duration::from_millis(300));
    waiting.signal("-TERM");
    let ended = waiting.end();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(143), ""), "{}", ended.stderr);
    assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
    assert_snapshot!(ended.stderr, @"[rank 0] stopped by SIGTERM before the first step");
}

/// A checkpoint that cannot be written is reported, with the exit code of that error.
#[test]
fn a_checkpoint_that_cannot_be_saved() {
    let folder = folder();
    for args in [
        &["train", "run.yaml", "output_dir=out"][..],
        &["train", "run.yaml", "--nproc", "2", "output_dir=out"],
    ] {
        let running = start(&folder, 5, args);
        folder.write("out/checkpoints", "a file is in the way");
        running.signal("-TERM");
        let ended = running.end();
        assert_eq!(ended.code, Some(73), "{}", ended.stderr);
        assert!(ended.stderr.contains("out/checkpoints"), "{}", ended.stderr);
        fs::remove_dir_all(folder.path("out")).unwrap();
    }
}
