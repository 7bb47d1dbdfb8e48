//! Several ranks: started by our launcher or with torchrun's variables, on one node and on two.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::support::{Folder, RUN, Ran, steady};

pub(crate) const TOKEN: &str = "a token that is long enough to be one";

pub(crate) fn free_port() -> String {
    free_ports().to_string()
}

/// A port that is free, like the one after it. It is below the range that the system gives to connections, so that no
/// other test takes it before it is used.
fn free_ports() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 10_000) as u16;
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut candidates = std::iter::repeat_with(|| first + NEXT.fetch_add(2, Ordering::Relaxed) % 10_000);
    candidates.find(|port| is_free(*port) && is_free(port + 1)).expect("there are free ports")
}

/// Replaces what differs between runs and hosts.
pub(crate) fn nameless(text: &str) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("pid ") {
        let digits = rest[at + 4..].chars().take_while(char::is_ascii_digit).count();
        out.push_str(&rest[..at]);
        out.push_str("pid [pid]");
        rest = &rest[at + 4 + digits..];
    }
    out.push_str(rest);
    out.replace(&format!("on {}", host.trim()), "on [host]")
        .replace(&format!("({})", host.trim()), "([host])")
}

pub(crate) fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Starts all commands at the same time, and waits for them.
pub(crate) fn run_all(commands: Vec<Command>) -> Vec<Ran> {
    let started: Vec<_> = commands
        .into_iter()
        .map(|mut command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    started.into_iter().map(|child| ran(child.wait_with_output().unwrap())).collect()
}

/// The losses of a run, as its log has them.
fn losses(folder: &Folder) -> Vec<String> {
    let line = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        record["loss"].to_string()
    };
    folder.read("out/metrics.jsonl").lines().map(line).collect()
}

#[test]
fn rank_zero_speaks_for_all() {
    let folder = Folder::new(RUN);
    let start = Instant::now();
    let text = folder.succeeds(&["train", "run.yaml", "threads=1", "--nproc", "2"]);
    println!("two ranks trained two steps in {:?}", start.elapsed());
    assert_snapshot!(steady(&text).lines().skip(1).collect::<Vec<_>>().join("\n"), @r"
    8 documents in 8 rows, 247 tokens
    step 1/2 | loss: 5.561946 | grad_norm 1.59 | lr 5.00e-5 | [speed] | [time]
    step 2/2 | loss: 5.531653 | grad_norm 1.56 | lr 2.50e-5 | [speed] | [time]
    model in out/model
    checkpoint in out/checkpoints/step-2
    peak memory [size] (planned [size])
    ");
    assert!(
        text.starts_with("LlamaForCausalLM, 37.1 k parameters | f32 ddp on 2 ranks of 1 threads | "),
        "{text}"
    );
}

/// Every spelling of the flags, and the key alone.
#[test]
fn all_ways_to_ask_for_two_ranks() {
    let mut found = Vec::new();
    for args in [
        "train run.yaml --nproc-per-node 2",
        "train --nproc_per_node=2 run.yaml",
        "train run.yaml nproc_per_node=2",
        "launch --nproc-per-node 2 run.yaml",
        "launch --standalone --nproc_per_node=2 run.yaml",
        "launch --nnodes=1 --node_rank=0 --nproc_per_node 2 --master_addr localhost run.yaml",
        // Flags take precedence over the file and its overrides.
        "launch --nproc-per-node 2 run.yaml nproc_per_node=4",
    ] {
        let folder = Folder::new(RUN);
        let args: Vec<&str> = args.split(' ').collect();
        let text = folder.succeeds(&args);
        assert!(text.contains(" on 2 ranks of 2 threads | "), "{args:?}: {text}");
        found.push(losses(&folder));
    }
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{found:?}");
}

/// Any strategy and any carrier gives the same losses.
#[test]
fn strategies_and_carriers_train_alike() {
    let mut found = Vec::new();
    for settings in [
        "strategy=ddp accumulation_order=reduced",
        "strategy=zero1 accumulation_order=reduced",
        "strategy=zero2",
        "strategy=zero3",
        "strategy=zero3 carrier=tcp",
        "strategy=zero2 offload_optimizer=cpu",
    ] {
        let folder = Folder::new(RUN);
        let args: Vec<&str> = "train run.yaml --nproc 2".split(' ').chain(settings.split(' ')).collect();
        folder.succeeds(&args);
        found.push(losses(&folder));
    }
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{found:?}");
}

#[test]
fn a_loop_in_a_shell() {
    let folder = Folder::new(RUN);
    let port = free_port();
    let rank = |rank: &str| {
        let mut command = folder.command(&["train", "run.yaml"]);
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("MASTER_PORT", &port);
        command
    };
    let ranks = run_all(vec![rank("1"), rank("0")]);
    assert!(ranks.iter().all(|ran| ran.code == Some(0) && ran.stderr.is_empty()), "{ranks:#?}");
    assert_eq!(ranks[0].stdout, "");
    assert_eq!(ranks[1].stdout.lines().filter(|line| line.starts_with("step ")).count(), 2);
    folder.assert_no_partial();
}

/// As with torchrun, whose own store uses the port, and with older launchers, which append `--local-rank`.
#[test]
fn variables_of_torchrun() {
    let folder = Folder::new(RUN);
    let port = free_port();
    let _store = TcpListener::bind(format!("127.0.0.1:{port}")).unwrap();
    let rank = |rank: &str, extra: &[&str]| {
        let mut command = folder.command(&[&["train", "run.yaml"], extra].concat());
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("GROUP_RANK", "0")]);
        command.envs([("MASTER_ADDR", "some-name"), ("MASTER_PORT", &port)]);
        command.envs([("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "none")]);
        command
    };
    let ranks = run_all(vec![rank("0", &["--local-rank=0"]), rank("1", &["--local_rank", "1"])]);
    assert!(ranks.iter().all(|ran| ran.code == Some(0) && ran.stderr.is_empty()), "{ranks:#?}");
}

/// A world of one rank.
#[test]
fn a_world_of_one() {
    let folder = Folder::new(RUN);
    let output = folder.command(&["train", "run.yaml"]).envs([("RANK", "0"), ("WORLD_SIZE", "1")]).output();
    assert_eq!(ran(output.unwrap()).code, Some(0));
    let text = Folder::new(RUN).succeeds(&["launch", "run.yaml"]);
    assert!(text.contains(" on 2 threads | "), "{text}");
}

/// The launcher of one of two nodes, on this host.
pub(crate) fn node<'a>(folder: &'a Folder, port: &'a str) -> impl Fn(&str, &[&str]) -> Command + 'a {
    move |rank, extra| {
        let fixed =
            ["launch", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"];
        let mut command = folder.command(&[&fixed[..], &[rank], extra, &["run.yaml"]].concat());
        command.env("LOCKSTEP_TOKEN", TOKEN);
        command
    }
}

/// The flags of torchrun's rendezvous.
#[test]
fn two_nodes_by_their_endpoint() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let endpoint = format!("--rdzv_endpoint=127.0.0.1:{port}");
    let node = |rank: &str| {
        let fixed = ["train", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv_id=job", "--rdzv-conf=timeout=9"];
        let rank = ["--node-rank", rank, "run.yaml"];
        let mut command = folder.command(&[&fixed[..], &[&endpoint], &rank].concat());
        command.env("LOCKSTEP_TOKEN", TOKEN);
        command
    };
    let nodes = run_all(vec![node("1"), node("0")]);
    assert!(nodes.iter().all(|ran| ran.code == Some(0) && ran.stderr.is_empty()), "{nodes:#?}");
    assert!(nodes[1].stdout.contains(" on 2 ranks of "), "{nodes:#?}");
    for (flags, refused) in [
        (&["--rdzv-backend=etcd"][..], "only static and c10d work"),
        (&["--rdzv-endpoint=:29500"], "expected HOST:PORT"),
        (&["--rdzv-endpoint=a:1", "--master-addr=b"], "cannot be used with"),
    ] {
        let ran = folder.run(&[&["train", "run.yaml"], flags].concat());
        assert!(ran.code == Some(2) && ran.stderr.contains(refused), "{ran:#?}");
    }
}

#[test]
fn two_nodes() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let start = Instant::now();
    let nodes = run_all(vec![node("1", &["--nproc-per-node", "2"]), node("0", &["--nproc-per-node", "2"])]);
    println!("two launchers with two ranks each trained two steps in {:?}", start.elapsed());
    assert!(nodes.iter().all(|ran| ran.code == Some(0) && ran.stderr.is_empty()), "{nodes:#?}");
    assert_eq!(nodes[0].stdout, "");
    assert!(nodes[1].stdout.contains(" on 4 ranks of "), "{nodes:#?}");
    folder.assert_no_partial();
}

#[test]
fn what_ranks_print_is_copied() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["launch", "--nproc-per-node", "2", "--tee", "3", "run.yaml"]);
    assert_eq!(folder.read("out/logs/rank-0.stdout.log"), text);
    assert_eq!(folder.read("out/logs/rank-1.stdout.log"), "");
    let folder = Folder::new(RUN);
    let args =
        ["launch", "--nproc_per_node=2", "--tee=1", "--log_dir=here", "--local_ranks_filter=1", "run.yaml"];
    assert_eq!(folder.succeeds(&args), "");
    assert!(folder.read("here/rank-0.stdout.log").contains("step 2/2"));
}

/// The token is only in the environment of ranks.
#[test]
fn the_token_is_in_no_output_and_no_file() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let tee = ["--tee", "3", "--nproc-per-node", "1"];
    let runs = run_all(vec![node("0", &tee), node("1", &tee)]);
    let mut printed: String = runs.iter().map(|ran| format!("{}{}", ran.stdout, ran.stderr)).collect();
    assert!(printed.contains("step 2/2"), "{runs:#?}");
    let wrong = folder
        .command(&["train", "run.yaml", "overwrite_output_dir=true"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", &port), ("LOCKSTEP_JOIN_TIMEOUT", "0.3")])
        .env("LOCKSTEP_TOKEN", TOKEN)
        .output();
    let wrong = ran(wrong.unwrap());
    assert_eq!(wrong.code, Some(72), "{wrong:#?}");
    printed.push_str(&wrong.stderr);
    assert!(!printed.contains(TOKEN), "{printed}");
    for (path, content) in folder.tree() {
        let content = content.unwrap_or_default();
        let found = content.windows(TOKEN.len()).any(|part| part == TOKEN.as_bytes());
        assert!(!found, "{} holds the token", path.display());
    }
}

/// Each rank is pinned to its share of the cores.
#[test]
fn ranks_share_the_cores() {
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores < 2 {
        return println!("skipped: one core cannot be shared");
    }
    let folder = Folder::new(&RUN.replace("threads: 2\n", ""));
    let args = ["train", "run.yaml", "max_steps=1000000", "save_strategy=no", "--nproc", "2"];
    let mut launcher = folder.start(&args);
    let allowed = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        list.unwrap_or_default().trim().to_string()
    };
    let whole = allowed(std::process::id());
    let start = Instant::now();
    let shares = loop {
        let ranks = crate::launch_ends::children(launcher.id());
        let shares: Vec<String> = ranks.iter().map(|pid| allowed(*pid)).collect();
        let settled = shares.len() == 2 && shares.iter().all(|share| *share != whole && !share.is_empty());
        if settled || start.elapsed() > Duration::from_secs(10) {
            break shares;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_ne!(shares[0], shares[1]);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
}
