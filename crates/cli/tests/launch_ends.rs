//! How several ranks end: all of them, quickly, without leftover processes, and with the cause printed last.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::launch::{free_port, nameless, node};
use crate::support::{Folder, RUN};

const LONG: [&str; 3] = ["max_steps=100000000", "logging_steps=100", "save_strategy=no"];

/// The child processes of `pid`.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

pub(crate) fn is_alive(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

pub(crate) fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

/// A launcher whose ranks have taken their first steps.
struct Running {
    launcher: Child,
    ranks: Vec<u32>,
    out: std::thread::JoinHandle<String>,
    err: std::thread::JoinHandle<String>,
}

struct Ended {
    code: Option<i32>,
    took: Duration,
    stdout: String,
    stderr: String,
}

fn start(folder: &Folder, args: &[&str]) -> Running {
    let args = [&["launch", "--nproc-per-node", "3", "run.yaml"], args].concat();
    watch(&mut folder.command(&args))
}

fn watch(command: &mut Command) -> Running {
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map(Result::unwrap);
    let first = lines.find(|line| line.starts_with("step "));
    let out = std::thread::spawn(move || lines.collect::<Vec<_>>().join("\n"));
    let mut stderr = launcher.stderr.take().unwrap();
    let err = std::thread::spawn(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
        text
    });
    let ranks = children(launcher.id());
    let running = Running { launcher, ranks, out, err };
    if first.is_none() {
        panic!("no step was taken: {}", running.end().stderr);
    }
    assert_eq!(running.ranks.len(), 3);
    running
}

impl Running {
    /// Waits for the launcher, and checks that its ranks have ended.
    fn end(mut self) -> Ended {
        let start = Instant::now();
        let code = self.launcher.wait().unwrap().code();
        let took = start.elapsed();
        assert!(!self.ranks.iter().any(|pid| is_alive(*pid)), "a rank is left");
        Ended { code, took, stdout: self.out.join().unwrap(), stderr: self.err.join().unwrap() }
    }
}

#[test]
fn a_killed_rank_ends_all() {
    for victim in 0..3 {
        let folder = Folder::new(RUN);
        let running = start(&folder, &LONG);
        signal("-KILL", running.ranks[victim]);
        let ended = running.end();
        println!("all ended {:?} after rank {victim} was killed", ended.took);
        assert_eq!(ended.code, Some(71), "{}", ended.stderr);
        assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
        let expected = format!(
            "error: rank {victim} (pid [pid] on [host]) was killed by signal 9 (SIGKILL)\n\
             hint: the kernel kills processes with SIGKILL when memory runs out: check the kernel log (dmesg).\n"
        );
        assert_eq!(nameless(&ended.stderr), expected);
    }
}

#[test]
fn a_rank_that_only_stops_is_missed() {
    let folder = Folder::new(RUN);
    let running = start(&folder, &LONG);
    signal("-STOP", running.ranks[1]);
    let ended = running.end();
    println!("all ended {:?} after a rank had stopped", ended.took);
    assert!(ended.took > Duration::from_secs(2) && ended.took < Duration::from_secs(6), "{:?}", ended.took);
    assert_eq!(ended.code, Some(71));
    assert_snapshot!(nameless(&ended.stderr), @r"
    error: rank 1 (pid [pid] on [host]) has sent no heartbeat for 3 s
    hint: the process may be stopped, or its host may be overloaded, down or cut off from the network.
    ");
}

#[test]
pub(crate) fn signals_to_the_launcher_end_every_rank() {
    for (name, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let folder = Folder::new(RUN);
        let running = start(&folder, &LONG);
        signal(name, running.launcher.id());
        let ended = running.end();
        println!("all ended {:?} after SIG{}", ended.took, &name[1..]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), ""));
        assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
    }
}

/// As a terminal sends it: to the launcher and the ranks.
#[test]
fn ctrl_c() {
    let folder = Folder::new(RUN);
    let mut command = folder.command(&[&["launch", "--nproc-per-node", "3", "run.yaml"], &LONG[..]].concat());
    let running = watch(command.process_group(0));
    let group = format!("-{}", running.launcher.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let ended = running.end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(130), ""));
    assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
}

/// A stopped process does not handle SIGTERM; the second signal kills it at once.
#[test]
fn a_second_signal_kills_at_once() {
    let folder = Folder::new(RUN);
    let running = start(&folder, &[&LONG[..], &["--grace", "60"]].concat());
    running.ranks.iter().for_each(|pid| signal("-STOP", *pid));
    signal("-TERM", running.launcher.id());
    std::thread::sleep(Duration::from_millis(200));
    assert!(running.ranks.iter().all(|pid| is_alive(*pid)), "they have a minute");
    signal("-TERM", running.launcher.id());
    let ended = running.end();
    assert_eq!(ended.code, Some(143));
    assert!(ended.took < Duration::from_secs(1), "{:?}", ended.took);
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    let folder = Folder::new(RUN);
    let mut running = start(&folder, &LONG);
    signal("-KILL", running.launcher.id());
    let start = Instant::now();
    running.launcher.wait().unwrap();
    while running.ranks.iter().any(|pid| is_alive(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(10), "ranks are left");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("all ended {:?} after the launcher was killed", start.elapsed());
}

#[test]
fn a_failure_is_reported_once_and_last() {
    let folder = Folder::new(RUN);
    folder.write("data.jsonl", "{\"text\": \"good\"}\n{\"txt\": \"bad\"}\n");
    let ran = folder.run(&["train", "run.yaml", "--nproc", "3"]);
    assert_eq!(ran.code, Some(65), "{ran:#?}");
    let text = nameless(&ran.stderr);
    let (rank, rest) = text.strip_prefix("error: rank ").unwrap().split_at(1);
    assert!("012".contains(rank));
    assert_snapshot!(rest.trim_start(), @r"
    (pid [pid] on [host]) failed with exit code 65: data.jsonl row 2: no column to train on; columns found: `txt`
    hint: did you mean `text` by `txt`? Rename it, or set `columns: {text: txt}`.
    ");
}

/// Killed, restarted, and resumed from the newest checkpoint.
#[test]
fn ranks_restart_from_the_newest_checkpoint() {
    let folder = Folder::new(RUN);
    let args = ["max_steps=3000", "logging_steps=100", "save_steps=100", "--max-restarts", "2"];
    let running = start(&folder, &args);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !folder.path("out/checkpoints/step-100").exists() {
        assert!(Instant::now() < deadline, "no checkpoint was written");
        std::thread::sleep(Duration::from_millis(1));
    }
    signal("-KILL", running.ranks[1]);
    let ended = running.end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("resumed from out/checkpoints/step-"), "{}", ended.stdout);
    assert!(ended.stdout.contains("step 3000/3000"));
    assert!(ended.stderr.contains("restarting all ranks in 1 s (restart 1 of 2)"), "{}", ended.stderr);
}

/// If a node is lost, the others end with an error that names it.
#[test]
fn a_node_that_is_lost() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let long: Vec<&str> = LONG.to_vec();
    let mut zero = node("0", &long);
    let mut one = node("1", &long);
    let mut zero = zero.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut one = one.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(zero.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step ")));
    one.kill().unwrap();
    one.wait().unwrap();
    let start = Instant::now();
    drop(lines);
    let output = zero.wait_with_output().unwrap();
    println!("the other node ended {:?} after this one was killed", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(output.status.code(), Some(71));
    assert_snapshot!(nameless(&String::from_utf8(output.stderr).unwrap()), @r"
    error: lost rank 1 (pid [pid] on [host]): its connection closed unexpectedly
    hint: the kernel may have killed the process because the host ran out of memory: check the kernel log on that host (dmesg).
    ");
}

/// A folder with the checkpoint of an older run.
fn with_an_older_run() -> Folder {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml", "max_steps=4"]);
    assert!(folder.path("out/checkpoints/step-4").exists());
    folder
}

/// Starts two ranks that are restarted once, and kills one as soon as it runs.
fn killed_at_its_start(folder: &Folder, args: &[&str]) -> std::process::Output {
    let all = [&["launch", "--nproc-per-node", "2", "--max-restarts", "1", "run.yaml", "max_steps=6"], args]
        .concat();
    let launcher = folder.command(&all).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let victim = loop {
        if let [_, second] = children(launcher.id())[..] {
            break second;
        }
        assert!(Instant::now() < deadline, "no rank was started");
        std::thread::sleep(Duration::from_micros(200));
    };
    signal("-KILL", victim);
    launcher.wait_with_output().unwrap()
}

/// Restarted ranks resume from checkpoints of this launch, never from those of an older run that this one replaces.
#[test]
fn a_restart_before_the_first_step_starts_over() {
    let folder = with_an_older_run();
    let output = killed_at_its_start(&folder, &["overwrite_output_dir=true"]);
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("(restart 1 of 1)"), "{stderr}");
    assert!(!stdout.contains("resumed from"), "{stdout}");
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 6);
    assert!(!folder.path("out/checkpoints/step-4").exists(), "the older run was to be replaced");
}

/// A run that may not replace an older one may not resume from it after a restart either.
#[test]
fn a_restart_does_not_take_over_an_older_run() {
    let folder = with_an_older_run();
    let output = killed_at_its_start(&folder, &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{stderr}");
    assert!(stderr.contains("the output folder has checkpoints of an earlier run"), "{stderr}");
    assert_eq!(folder.read("out/metrics.jsonl").lines().count(), 4);
}
