//! Ranks as real processes: the same weights with every strategy, checkpoints that any world can load, and two hosts
//! with their own addresses.

use std::fs;
use std::process::Command;

use crate::launch::{TOKEN, ran, run_all};
use crate::support::{Folder, RUN};
use crate::tensors;

/// The bytes of every tensor of the exported model, and the losses.
fn result(folder: &Folder) -> (Vec<tensors::Tensor>, Vec<String>) {
    let numbers = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {} {}", record["step"], record["loss"], record["grad_norm"])
    };
    let losses = folder.read("out/metrics.jsonl").lines().map(numbers).collect();
    (tensors::read(&folder.path("out/model/model.safetensors")), losses)
}

fn trained(settings: &[&str], nproc: &str) -> (Vec<tensors::Tensor>, Vec<String>) {
    let folder = Folder::new(RUN);
    let base = ["train", "run.yaml", "threads=1", "max_steps=4", "--nproc", nproc];
    folder.succeeds(&[&base, settings].concat());
    result(&folder)
}

#[test]
fn processes_agree_whatever_the_strategy() {
    let order = "accumulation_order=local";
    let ddp = trained(&["gradient_accumulation_steps=2", order], "3");
    assert_eq!(ddp.1.len(), 4);
    for settings in [
        &["strategy=zero1", "carrier=tcp"][..],
        &["strategy=zero2", "offload_optimizer=cpu"],
        &["strategy=shard_grad_op", "prefetch=3"],
        &["strategy=zero3", "offload_optimizer=nvme", "offload_param=nvme", "nvme_path=spilled"],
        &["strategy=full_shard", "offload_param=cpu", "recompute=full", "carrier=shm"],
    ] {
        let other = trained(&[settings, &["gradient_accumulation_steps=2", order]].concat(), "3");
        assert!(other == ddp, "{settings:?}: {:?}, ddp {:?}", other.1, ddp.1);
    }
}

/// With gradient accumulation, strategies sum in different orders by default: ddp and zero1 over micro-batches first, zero2
/// and zero3 over ranks first. The fingerprint says so, and `accumulation_order` makes them equal.
#[test]
fn equal_fingerprints_give_equal_bits() {
    let two = "gradient_accumulation_steps=2";
    let run = |settings: &[&str]| {
        let folder = Folder::new(&RUN.replace("max_steps: 2", "max_steps: 3"));
        let base = ["train", "run.yaml", "threads=1", "--nproc", "2", "per_device_train_batch_size=1"];
        folder.succeeds(&[&base[..], settings].concat());
        let metrics = folder.read("out/metrics.jsonl");
        let first: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        (first["fingerprint"].as_str().unwrap().to_string(), result(&folder))
    };
    let once = run(&["strategy=ddp"]);
    assert!(run(&["strategy=zero3"]) == once, "of one micro-batch there is one order");
    let (ddp, zero3) = (run(&["strategy=ddp", two]), run(&["strategy=zero3", two]));
    assert_ne!(ddp.0, zero3.0);
    assert!(ddp.1 != zero3.1, "the fingerprints differ for a reason");
    for order in ["local", "reduced"] {
        let order = format!("accumulation_order={order}");
        let of = |strategy: &str| run(&[strategy, two, &order]);
        let expected = if order.ends_with("local") { &ddp } else { &zero3 };
        assert!(of("strategy=ddp") == *expected && of("strategy=zero3") == *expected, "{order}");
    }
}

#[test]
fn the_number_of_ranks_changes_only_rounding() {
    let losses = |nproc: &str, rows: &str, micros: &str| -> Vec<f64> {
        let rows = format!("per_device_train_batch_size={rows}");
        let micros = format!("gradient_accumulation_steps={micros}");
        let (_, lines) = trained(&[&rows, &micros], nproc);
        lines.iter().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect()
    };
    let one = losses("1", "4", "1");
    for (nproc, rows, micros) in [("2", "1", "2"), ("4", "1", "1"), ("2", "2", "1")] {
        for (a, b) in losses(nproc, rows, micros).iter().zip(&one) {
            assert!((a - b).abs() < 1e-5 * b, "{nproc} ranks: {a} for {b}");
        }
    }
}

/// Written by four ranks under zero3, read by one, by two under ddp, and by three under zero2.
#[test]
fn a_checkpoint_loads_on_any_world() {
    let folder = Folder::new(RUN);
    let four = ["train", "run.yaml", "threads=1", "save_steps=2", "per_device_train_batch_size=3"];
    folder.succeeds(&[&four[..], &["max_steps=2", "strategy=zero3", "--nproc", "4"]].concat());
    let saved = folder.path("out/checkpoints/step-2");
    let resume = format!("resume_from_checkpoint={}", saved.display());
    let weights = tensors::read(&folder.path("out/model/model.safetensors"));
    for (nproc, rows, strategy) in
        [("1", "12", "ddp"), ("2", "6", "ddp"), ("3", "4", "zero2"), ("4", "3", "zero3")]
    {
        let rows = format!("per_device_train_batch_size={rows}");
        let strategy = format!("strategy={strategy}");
        // No step is left, so that the model folder is what was loaded.
        let settings =
            ["max_steps=2", &resume, &rows, &strategy, "output_dir=again", "overwrite_output_dir=true"];
        folder.succeeds(&[&["train", "run.yaml", "threads=1", "--nproc", nproc][..], &settings].concat());
        let second = tensors::read(&folder.path("again/model/model.safetensors"));
        assert!(second == weights, "{nproc} ranks, {strategy}");
    }
}

#[test]
fn ranks_resume_bit_for_bit() {
    for strategy in ["strategy=ddp", "strategy=zero3"] {
        let whole = Folder::new(RUN);
        let base = ["train", "run.yaml", "threads=1", strategy, "lr_scheduler_type=constant", "--nproc", "2"];
        whole.succeeds(&[&base[..], &["max_steps=6"]].concat());
        let cut = Folder::new(RUN);
        cut.succeeds(&[&base[..], &["max_steps=3", "save_steps=3"]].concat());
        cut.succeeds(&[&base[..], &["max_steps=6", "resume_from_checkpoint=true"]].concat());
        assert!(result(&whole) == result(&cut), "{strategy}");
    }
}

/// Two hosts of two ranks each, joined by a pair of virtual interfaces. Nothing is shared but the file system.
#[test]
fn two_hosts_with_addresses_of_their_own() {
    let hosts = match Hosts::make("w") {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: network namespaces cannot be made here ({why})"),
    };
    let one_host = trained(&["strategy=ddp"], "4");
    for strategy in ["strategy=zero3", "strategy=hybrid_shard", "strategy=ddp"] {
        let folder = Folder::new(RUN);
        let node = |rank: usize| {
            let mut command = hosts.command(rank);
            let number = rank.to_string();
            command.arg(env!("CARGO_BIN_EXE_lockstep")).args([
                "launch",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "2",
            ]);
            command.args([
                "--node-rank",
                &number,
                "--master-addr",
                Hosts::ADDRESSES[0],
                "--master-port",
                "29500",
            ]);
            command.args(["run.yaml", "threads=1", "max_steps=4", strategy]);
            command.current_dir(folder.path("")).env("LOCKSTEP_TOKEN", TOKEN);
            command
        };
        let ends = run_all(vec![node(0), node(1)]);
        assert!(ends.iter().all(|end| end.code == Some(0)), "{strategy}: {ends:#?}");
        let log = folder.read("out/logs/training.log");
        assert!(
            log.contains("4 ranks over shared memory with 1 of the other ranks, TCP with the rest"),
            "{log}"
        );
        // Ranks fold by the tree of nodes, which for two nodes of two is that of one node of four.
        assert!(result(&folder) == one_host, "{strategy} on two hosts gives other numbers");
    }
}

/// Two network namespaces, removed when the test ends.
pub(crate) struct Hosts {
    pub(crate) names: [String; 2],
}

impl Hosts {
    pub(crate) const ADDRESSES: [&str; 2] = ["10.213.7.1", "10.213.7.2"];

    /// `tag`: a letter that no other test uses.
    pub(crate) fn make(tag: &str) -> Result<Hosts, String> {
        let id = format!("{}{tag}", std::process::id());
        let hosts = Hosts { names: [0, 1].map(|n| format!("lockstep-{id}-{n}")) };
        let [a, b] = &hosts.names;
        let (left, right) = (format!("ls{id}a"), format!("ls{id}b"));
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["link", "add", &left, "netns", a, "type", "veth", "peer", "name", &right, "netns", b])?;
        for (name, link, address) in [(a, &left, Self::ADDRESSES[0]), (b, &right, Self::ADDRESSES[1])] {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", link])?;
            ip(&["-n", name, "link", "set", link, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    /// A command that runs its arguments in one of them.
    pub(crate) fn command(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]);
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|e| format!("ip: {e}"))?;
    let end = ran(output);
    if end.code == Some(0) { Ok(()) } else { Err(end.stderr.trim().to_string()) }
}

/// A world that is killed as a whole resumes from its last checkpoint.
#[test]
fn a_killed_world_goes_on() {
    let base = ["train", "run.yaml", "threads=1", "strategy=zero3", "save_steps=1", "--nproc", "2"];
    let whole = Folder::new(RUN);
    whole.succeeds(&[&base[..], &["max_steps=40"]].concat());
    let cut = Folder::new(RUN);
    let mut child = cut.start(&[&base[..], &["max_steps=40"]].concat());
    let checkpoint = cut.path("out/checkpoints/step-5");
    let start = std::time::Instant::now();
    while !checkpoint.exists() {
        assert!(start.elapsed().as_secs() < 30, "no checkpoint in half a minute");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Ranks die with their launcher; the lock of the output folder goes with rank 0.
    while fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let cwd = fs::read_link(entry.path().join("cwd"));
        cwd.is_ok_and(|cwd| cwd.starts_with(cut.path("").canonicalize().unwrap()))
    }) {
        assert!(start.elapsed().as_secs() < 60, "a rank outlived its launcher");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    cut.succeeds(&[&base[..], &["max_steps=40", "resume_from_checkpoint=true"]].concat());
    assert!(result(&whole) == result(&cut));
}
