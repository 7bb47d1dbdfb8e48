//! `lockstep watch`, `lockstep runs report`, and the page that a run leaves behind.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, tcgetattr};

use crate::support::{Folder, RUN};

const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until something is there.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "no {what} after {DEADLINE:?}");
        sleep(Duration::from_millis(10));
    }
}

/// Starts a run of two ranks that trains until it is stopped.
fn endless(folder: &Folder) -> Child {
    let args = ["train", "run.yaml", "--nproc", "2", "threads=1", "max_steps=1000000", "save_strategy=no"];
    let child = folder.start(&args);
    wait_for("metrics", || {
        let text = fs::read_to_string(folder.path("out/metrics.jsonl")).ok()?;
        (text.lines().count() > 3 && folder.path("out/status/rank-1.json").exists()).then_some(())
    });
    child
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn ends(child: &mut Child) -> Option<i32> {
    wait_for("end", || child.try_wait().unwrap()).code()
}

#[test]
fn a_frame_of_a_run_that_has_ended() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    let text = folder.succeeds(&["watch", "out", "--once", "--size", "120x40"]);
    assert_eq!(text.lines().count(), 40);
    for part in
        ["out  finished  step 2/2 (100 %)", "─ loss ─", "─ tokens_per_second ─", "measured peak", "forward"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.contains("step 2 | loss: ") && !text.contains('\x1b'), "{text}");
    assert!(!text.contains("collectives"), "one rank waits for nobody: {text}");
}

#[test]
fn what_cannot_be_watched() {
    let folder = Folder::new(RUN);
    let error = folder.refused(&["watch", "nothing"], 66);
    assert!(error.starts_with("error: nothing is not the output folder of a run"), "{error}");
    folder.succeeds(&["train", "run.yaml"]);
    let error = folder.refused(&["watch", "out"], 69);
    assert!(error.contains("needs a terminal") && error.contains("hint: add --once"), "{error}");
    for size in ["0x10", "10", "10x", "5000x10", "-1x1"] {
        let size = format!("--size={size}");
        let error = folder.refused(&["watch", "out", "--once", &size], 2);
        assert!(error.contains("expected columns and rows"), "{error}");
    }
}

#[test]
fn a_run_of_two_ranks_in_progress_shows_its_ranks_and_leaves_a_page_when_it_is_stopped() {
    let folder = Folder::new(RUN);
    let mut run = endless(&folder);
    let text = folder.run(&["watch", "out", "--once", "--size", "160x50"]).stdout;
    for part in ["running  step ", "busy ranks", "rank 1", "collectives in flight", "ETA "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let status: serde_json::Value = serde_json::from_str(&folder.read("out/status/rank-1.json")).unwrap();
    assert_eq!((&status["rank"], status["operations"].is_array()), (&1.into(), true), "{status}");
    assert!(
        status["pid"].as_u64() > Some(1) && status["step"].is_u64() && status["host"].is_string(),
        "{status}"
    );
    signal(&run, Signal::TERM);
    assert_eq!(ends(&mut run), Some(143));
    assert!(!folder.path("out/status").exists(), "ranks that end remove their files");
    let page = folder.read("out/report.html");
    assert!(page.contains("<td>stopped</td>") && page.contains("stopped by SIGTERM after step "), "{page}");
    let text = folder.succeeds(&["watch", "out", "--once"]);
    assert!(text.contains("stopped by SIGTERM after step "), "{text}");
    assert!(folder.succeeds(&["runs", "ls"]).contains("  stopped  "));
}

#[test]
fn a_run_leaves_a_page_without_secrets() {
    let folder = Folder::new(&RUN.replace("output_dir: out\n", "output_dir: '<b>out'\n"));
    let args = ["train", "run.yaml", "experiment_name=<script>x"];
    let secrets = ["HF_TOKEN", "WANDB_API_KEY", "LOCKSTEP_TOKEN", "MLFLOW_TRACKING_PASSWORD"];
    let mut command = folder.command(&args);
    secrets.iter().for_each(|name| {
        command.env(name, format!("S3cret-{name}-0123456789abcdef0123456789abcdef"));
    });
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = folder.read("<b>out/report.html");
    assert!(page.contains("<h1>&lt;script&gt;x</h1>") && !page.contains("<script"), "{page}");
    assert!(page.contains("lockstep train run.yaml &#39;experiment_name=&lt;script&gt;"), "{page}");
    for (path, content) in folder.tree() {
        let text = String::from_utf8_lossy(content.as_deref().unwrap_or_default()).into_owned();
        assert!(!text.contains("S3cret-"), "{}", path.display());
    }
    assert_eq!(folder.succeeds(&["runs", "report", "<b>out", "--output", "page.html"]), "page.html\n");
    assert_eq!(folder.read("page.html"), page);
    fs::remove_file(folder.path("<b>out/report.html")).unwrap();
    assert_eq!(folder.succeeds(&["runs", "report", "<b>out"]), "<b>out/report.html\n");
    let error = folder.run(&["runs", "report", "<b>out", "-o", "none/page.html"]);
    assert_eq!(error.code, Some(73), "{error:?}");
}

#[test]
fn a_page_that_cannot_be_written_is_a_warning() {
    let folder = Folder::new(RUN);
    fs::create_dir_all(folder.path("out/report.html/full")).unwrap();
    let ran = folder.run(&["train", "run.yaml"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.stderr.starts_with("warning: the page about the run is missing: cannot write out/report.html"),
        "{ran:?}"
    );
    assert!(folder.path("out/model/model.safetensors").exists());
}

/// `lockstep watch` in a terminal of its own.
struct InTerminal {
    child: Child,
    terminal: OwnedFd,
    output: Receiver<Vec<u8>>,
    seen: Vec<u8>,
}

impl InTerminal {
    fn start(folder: &Folder) -> InTerminal {
        InTerminal::with(folder, &[])
    }

    fn with(folder: &Folder, variables: &[(&str, &str)]) -> InTerminal {
        use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).and_then(|()| unlockpt(&terminal)).unwrap();
        let mut command = folder.command(&["watch", "out", "--interval", "0.1"]);
        command.envs(variables.iter().copied());
        let side = || ioctl_tiocgptpeer(&terminal, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        let child = command.stdin(side()).stdout(side()).stderr(Stdio::null()).spawn().unwrap();
        let (sender, output) = channel();
        let mut reader = File::from(terminal.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // An error when the program has closed its side.
            while let Ok(len @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..len].to_vec()).is_err() {
                    return;
                }
            }
        });
        InTerminal { child, terminal, output, seen: Vec::new() }
    }

    /// Waits until the program has written something.
    fn shows(&mut self, text: &str) {
        self.seen.extend(self.output.try_iter().flatten());
        while !String::from_utf8_lossy(&self.seen).contains(text) {
            match self.output.recv_timeout(DEADLINE) {
                Ok(bytes) => self.seen.extend(bytes),
                Err(_) => panic!("no {text:?}: {}", String::from_utf8_lossy(&self.seen)),
            }
        }
    }

    fn press(&mut self, keys: &str) {
        self.seen.clear();
        File::from(self.terminal.try_clone().unwrap()).write_all(keys.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.terminal).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// Waits for the end, and returns the exit code. The terminal is as it was.
    fn ends(mut self) -> Option<i32> {
        self.shows("\x1b[?1049l");
        let code = ends(&mut self.child);
        assert!(!self.is_raw(), "the terminal is restored");
        assert!(String::from_utf8_lossy(&self.seen).contains("\x1b[?25h"), "the cursor is back");
        code
    }
}

#[test]
fn in_a_terminal() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    let mut watch = InTerminal::start(&folder);
    watch.shows("finished");
    assert!(watch.is_raw());
    watch.press("\t");
    watch.shows("grad_norm");
    watch.press("?");
    watch.shows("logarithmic axis");
    // A line that is written now appears.
    let log = folder.path("out/logs/training.log");
    watch.press("?");
    let mut log = fs::OpenOptions::new().append(true).open(log).unwrap();
    log.write_all(b"2026-03-01T09:05:07.250Z something \x1b[2J new\n").unwrap();
    watch.shows("something");
    watch.press("q");
    assert_eq!(watch.ends(), Some(0));
    let mut watch = InTerminal::start(&folder);
    watch.shows("finished");
    watch.press("\x03");
    assert_eq!(watch.ends(), Some(0));
}

#[test]
fn a_panic_restores_the_terminal() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    let mut watch = InTerminal::with(&folder, &[("LOCKSTEP_FAILPOINT", "0/watch.frame")]);
    watch.shows("finished");
    assert_eq!(watch.ends(), Some(70));
}

#[test]
fn a_signal_restores_the_terminal() {
    let folder = Folder::new(RUN);
    folder.succeeds(&["train", "run.yaml"]);
    for number in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut watch = InTerminal::start(&folder);
        watch.shows("finished");
        signal(&watch.child, number);
        assert_eq!(watch.ends(), Some(0), "{number:?}");
    }
}
