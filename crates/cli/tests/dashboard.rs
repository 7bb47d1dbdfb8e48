//! The web page of runs: `lockstep serve`, and `train --dashboard`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Folder, RUN};

const DEADLINE: Duration = Duration::from_secs(60);

/// A process that serves, ended with the test.
struct Served {
    child: Child,
    url: String,
    port: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a command and waits until it prints where its dashboard is.
fn served(mut command: Command) -> Served {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut lines = Vec::new();
    let url = loop {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "it ends without a dashboard: {lines:?}");
        if let Some(url) = line.strip_prefix("dashboard at ") {
            break url.trim().to_owned();
        }
        lines.push(line);
    };
    // What it prints later must not fill the pipe.
    std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    let port = url.split(':').nth(2).and_then(|rest| rest.split('/').next()).unwrap().to_owned();
    Served { child, url, port }
}

fn get(port: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    (text.split(' ').nth(1).unwrap().parse().unwrap(), text)
}

fn json(port: &str, path: &str) -> Value {
    let (status, text) = get(port, path, "");
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// Waits until the only run has made some steps, and returns its entry in the list.
fn after_steps(port: &str, steps: u64) -> Value {
    let start = Instant::now();
    let mut revision = 0;
    loop {
        let list = json(port, &format!("/api/wait?revision={revision}"));
        revision = list["revision"].as_u64().unwrap();
        if let Some(run) = list["runs"].get(0).filter(|run| run["step"].as_u64() >= Some(steps)) {
            return run.clone();
        }
        assert!(start.elapsed() < DEADLINE, "{list}");
    }
}

#[test]
fn a_run_is_served_while_it_trains() {
    // One rank serves itself; the launcher serves several.
    for ranks in [&[][..], &["--nproc", "2", "threads=1"]] {
        let folder = Folder::new(RUN);
        let run = ["train", "run.yaml", "--dashboard", "0", "max_steps=1000000", "save_strategy=no"];
        let served = served(folder.command(&[&run[..], ranks].concat()));
        let run = after_steps(&served.port, 2);
        assert_eq!((&run["state"], &run["total_steps"]), (&"running".into(), &1_000_000.into()));
        after_steps(&served.port, run["step"].as_u64().unwrap() + 1);
        assert_eq!(get(&served.port, "/healthz", "").0, 200);
        let details = json(&served.port, "/api/runs/0");
        let command = details["command"].as_str().unwrap();
        assert!(
            command.starts_with("lockstep train ") && command.contains(" max_steps=1000000"),
            "{command}"
        );
        assert_eq!(command.contains("--nproc 2"), !ranks.is_empty(), "{command}");
        let curve = &details["plan"]["memory_over_step"]["live_bytes"];
        assert_eq!(curve.as_array().unwrap().len(), details["plan"]["operations"].as_array().unwrap().len());
        let settings = json(&served.port, "/api/config?runs=0");
        let row = settings.as_array().unwrap().iter().find(|row| row["key"] == "max_steps").unwrap();
        assert_eq!(row["runs"][0]["origin"], "argument max_steps=1000000");
    }
}

#[test]
fn a_run_whose_page_cannot_be_served_goes_on() {
    let folder = Folder::new(RUN);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = folder.run(&["train", "run.yaml", "--dashboard", &port]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    let warning =
        format!("the run goes on without its dashboard: cannot serve the dashboard at 127.0.0.1:{port}: ");
    assert!(ran.stderr.starts_with(&warning), "{}", ran.stderr);
    assert!(folder.path("out/model/model.safetensors").exists());
}

#[test]
fn the_plan_covers_the_page() {
    let folder = Folder::new(RUN);
    let ran = folder.run(&["train", "run.yaml", "--dashboard=0"]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    let url = ran.stdout.lines().next().unwrap().strip_prefix("dashboard at http://127.0.0.1:").unwrap();
    assert!(url.trim_end_matches('/').parse::<u16>().is_ok(), "{url}");
    let without = folder.succeeds(&["train", "run.yaml", "output_dir=other"]);
    let planned = |text: &str| {
        text.split("(planned ").nth(1).unwrap().split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let more = planned(&ran.stdout) - planned(&without);
    assert!((31.0..33.0).contains(&more), "{more} MiB");
}

#[test]
fn no_secret_is_served() {
    let folder = Folder::new(RUN);
    let secrets = [
        ("HF_TOKEN", "hidden-hub"),
        ("WANDB_API_KEY", "hidden-wandb"),
        ("LOCKSTEP_DASHBOARD_TOKEN", "hidden-dashboard-token"),
        ("LOCKSTEP_TOKEN", "hidden-token-of-the-ranks"),
    ];
    let mut train = folder.command(&["train", "run.yaml", "--nproc", "2", "threads=1", "--dashboard", "0"]);
    train.envs(secrets);
    let output = train.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("hidden-"), "{output:?}");
    // As a file of another version, or of another program, may have it.
    let config = "hub_token: hidden-in-file\n";
    let shown = folder.read("out/run.json");
    assert!(!shown.contains("hidden-"), "{shown}");
    folder.write("other.yaml", format!("{RUN}{config}"));
    folder.refused(&["train", "other.yaml"], 64);
    let mut serve = folder.command(&["serve", "out", "--port", "0"]);
    serve.envs(secrets);
    let served = served(serve);
    assert!(!served.url.contains("hidden-"), "{}", served.url);
    assert_eq!(get(&served.port, "/api/runs", "").0, 401);
    for path in
        ["/api/runs", "/api/runs/0", "/api/runs/0/log", "/api/config?runs=0", "/metrics", "/healthz", "/"]
    {
        let (status, text) = get(&served.port, path, "Authorization: Bearer hidden-dashboard-token\r\n");
        assert_eq!(status, 200, "{path}");
        assert!(!text.contains("hidden-"), "{path}: {text}");
    }
}

#[test]
fn bad_tokens_and_addresses_are_refused() {
    let folder = Folder::new(RUN);
    let mut command = folder.command(&["serve", "--port", "0"]);
    let output = command.env("LOCKSTEP_DASHBOARD_TOKEN", "hunter2").output().unwrap();
    assert_eq!(output.status.code(), Some(77));
    insta::assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @r"
    error: the token in LOCKSTEP_DASHBOARD_TOKEN has 7 characters; at least 16 are required
    hint: create one with `openssl rand -hex 32`.
    ");
    folder.write("token", "0123456789abcdef");
    std::fs::set_permissions(folder.path("token"), std::fs::Permissions::from_mode(0o644)).unwrap();
    insta::assert_snapshot!(folder.refused(&["serve", "--port", "0", "--token-file", "token"], 77), @r"
    error: token file token can be read by other users (mode 0644)
    hint: run `chmod 600 token`.
    ");
    insta::assert_snapshot!(folder.refused(&["serve", "--port", "0", "--token-file=none"], 66), @r"
    error: cannot read the token of the dashboard in none: No such file or directory (os error 2)
    ");
    // An address that is reserved for documents, and so of no machine.
    let error = folder.refused(&["serve", "--address", "192.0.2.1"], 69);
    assert!(error.starts_with("error: cannot serve the dashboard at 192.0.2.1:8420: "), "{error}");
    assert!(error.contains("hint: give an address of this machine"), "{error}");
    folder.refused(&["serve", "--address", "everywhere"], 2);
    folder.refused(&["train", "run.yaml", "dashboard=everywhere"], 64);
}
