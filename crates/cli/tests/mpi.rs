//! Ranks that communicate by MPI: every strategy, two hosts, and failures. Skipped where there is no MPI with the standard
//! ABI; `.ci/mpi` installs one.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::launch::{free_port, nameless, ran};
use crate::launch_ends::{is_alive, signal};
use crate::support::{Folder, RUN, Ran};
use crate::tensors;
use crate::worlds::Hosts;

/// Gradients of SGD change the weights in proportion, so that weights agree as far as gradients do.
const BASE: [&str; 4] = ["threads=1", "max_steps=4", "optim=sgd", "learning_rate=0.5"];

/// The mpiexec of the library, or why there is none.
fn installed() -> Result<PathBuf, String> {
    let remedy = ".ci/mpi installs MPICH and prints the folder for LOCKSTEP_MPI_DIR";
    let folder = std::env::var_os("LOCKSTEP_MPI_DIR").map(PathBuf::from);
    let folder = folder.ok_or_else(|| format!("LOCKSTEP_MPI_DIR is not set ({remedy})"))?;
    let mpiexec = folder.with_file_name("bin").join("mpiexec");
    if folder.join("libmpi_abi.so.1").exists() && mpiexec.exists() {
        return Ok(mpiexec);
    }
    Err(format!("{} has no MPI library, or no mpiexec beside it ({remedy})", folder.display()))
}

/// The environment that a folder's commands have.
fn environment(folder: &Folder, command: &mut Command) {
    let variables = folder.command(&[]);
    command.current_dir(folder.path("")).stdin(Stdio::null());
    command.envs(variables.get_envs().filter_map(|(name, value)| Some((name, value?))));
}

/// Trains on ranks that mpiexec starts. `before` is a shell command that runs in each rank first.
fn by_mpiexec(folder: &Folder, mpiexec: &PathBuf, ranks: u32, before: &str, settings: &[&str]) -> Ran {
    let mut command = Command::new(mpiexec);
    command.args(["-n", &ranks.to_string(), "/bin/sh", "-c", &format!("{before}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_lockstep")).args(["train", "run.yaml"]).args(BASE).args(settings);
    environment(folder, &mut command);
    command.env("MASTER_PORT", free_port());
    ran(command.output().unwrap())
}

struct Outcome {
    /// The loss and the norm of the gradient of every step.
    steps: Vec<[f64; 2]>,
    weights: Vec<f32>,
    log: String,
}

fn outcome(folder: &Folder) -> Outcome {
    let numbers = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        ["loss", "grad_norm"].map(|key| record[key].as_f64().unwrap())
    };
    let tensors = tensors::read(&folder.path("out/model/model.safetensors"));
    let values = |tensor: &tensors::Tensor| -> Vec<f32> {
        tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    Outcome {
        steps: folder.read("out/metrics.jsonl").lines().map(numbers).collect(),
        weights: tensors.iter().flat_map(values).collect(),
        log: folder.read("out/logs/training.log"),
    }
}

impl Outcome {
    fn assert_close(&self, other: &Outcome, what: &str) {
        assert_eq!((self.steps.len(), self.weights.len()), (4, other.weights.len()), "{what}");
        for (one, two) in self.steps.iter().flatten().zip(other.steps.iter().flatten()) {
            assert!((one - two).abs() < 1e-5 * two.abs(), "{what}: {one} for {two}");
        }
        let differing = self.weights.iter().zip(&other.weights).find(|(a, b)| (*a - *b).abs() > 1e-5);
        assert_eq!(differing, None, "{what}");
        assert!(
            self.log.contains("ranks over MPICH") && self.log.contains("sum over ranks: MPI, "),
            "{}",
            self.log
        );
    }
}

/// A run over shared memory, to compare with.
fn over_shared_memory(ranks: &str, settings: &[&str]) -> Outcome {
    let folder = Folder::new(RUN);
    folder.succeeds(&[&["train", "run.yaml", "--nproc", ranks][..], &BASE, settings].concat());
    outcome(&folder)
}

#[test]
fn every_strategy_agrees_with_shared_memory_to_rounding() {
    let mpiexec = match installed() {
        Ok(mpiexec) => mpiexec,
        Err(why) => return println!("skipped: {why}"),
    };
    for ranks in [2, 4] {
        let expected = over_shared_memory(&ranks.to_string(), &[]);
        for strategy in ["ddp", "zero1", "zero2", "zero3", "full_shard", "shard_grad_op"] {
            let folder = Folder::new(RUN);
            let ended = by_mpiexec(&folder, &mpiexec, ranks, ":", &[&format!("strategy={strategy}")]);
            assert!(ended.code == Some(0) && ended.stderr.is_empty(), "{strategy}: {ended:#?}");
            outcome(&folder).assert_close(&expected, &format!("{strategy} on {ranks} ranks"));
        }
    }
}

/// Two nodes of two ranks, as far as the variables say; MPI sees one host.
#[test]
fn shards_within_nodes() {
    let mpiexec = match installed() {
        Ok(mpiexec) => mpiexec,
        Err(why) => return println!("skipped: {why}"),
    };
    let expected = over_shared_memory("4", &[]);
    let folder = Folder::new(RUN);
    let nodes = "export RANK=$PMI_RANK WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 LOCAL_RANK=$((PMI_RANK % 2)) \
                 MASTER_ADDR=127.0.0.1 LOCKSTEP_TOKEN=0123456789012345678901234567890123456789";
    let settings = ["strategy=hybrid_shard", "carrier=mpi"];
    let ended = by_mpiexec(&folder, &mpiexec, 4, nodes, &settings);
    assert!(ended.code == Some(0) && ended.stderr.is_empty(), "{ended:#?}");
    outcome(&folder).assert_close(&expected, "hybrid_shard");
}

/// Our own launcher starts mpiexec, and gathers move bf16.
#[test]
fn half_precision_through_our_launcher() {
    if let Err(why) = installed() {
        return println!("skipped: {why}");
    }
    let half = ["mixed_precision=bf16", "strategy=zero3"];
    let expected = over_shared_memory("2", &half);
    let folder = Folder::new(RUN);
    let args = ["train", "run.yaml", "--nproc", "2", "carrier=mpi"];
    folder.succeeds(&[&args[..], &BASE, &half].concat());
    let found = outcome(&folder);
    for (one, two) in found.steps.iter().flatten().zip(expected.steps.iter().flatten()) {
        assert!((one - two).abs() < 1e-2 * two.abs(), "{one} for {two}");
    }
}

/// Two hosts with names and addresses of their own, or why they cannot be made.
fn two_hosts(tag: &str, folder: &Folder) -> Result<Hosts, String> {
    let hosts = Hosts::make(tag).map_err(|why| format!("network namespaces cannot be made here ({why})"))?;
    if !Command::new("unshare").args(["--uts", "true"]).status().is_ok_and(|status| status.success()) {
        return Err("a host's name cannot be changed here (unshare --uts)".into());
    }
    // mpiexec starts its proxies through this, in place of ssh: options, the host and the command.
    let [first, second] = Hosts::ADDRESSES;
    let enter = format!(
        "#!/bin/sh\nwhile [ \"$1\" != {first} ] && [ \"$1\" != {second} ]; do shift; done\n\
         case $1 in {first}) in={} name=alpha;; *) in={} name=beta;; esac; shift\n\
         exec ip netns exec $in unshare --uts sh -c \"hostname $name; exec $*\"\n",
        hosts.names[0], hosts.names[1]
    );
    folder.write("enter", enter);
    assert!(Command::new("chmod").arg("755").arg(folder.path("enter")).status().unwrap().success());
    folder.write("hosts", format!("{first}\n{second}\n"));
    Ok(hosts)
}

/// A command on the first host, whose mpiexec starts ranks on both.
fn on_first_host(hosts: &Hosts, folder: &Folder, args: &[&str]) -> Command {
    let mut command = hosts.command(0);
    command.args(["unshare", "--uts", "sh", "-c", "hostname alpha; exec \"$0\" \"$@\""]).args(args);
    environment(folder, &mut command);
    command.envs([
        ("HYDRA_HOST_FILE", "hosts"),
        ("HYDRA_LAUNCHER", "ssh"),
        ("HYDRA_LAUNCHER_EXEC", "./enter"),
    ]);
    command
}

/// Nothing but MPI tells a rank where rank 0 is.
#[test]
fn two_hosts_find_each_other_through_mpi() {
    let mpiexec = match installed() {
        Ok(mpiexec) => mpiexec,
        Err(why) => return println!("skipped: {why}"),
    };
    let folder = Folder::new(RUN);
    let hosts = match two_hosts("m", &folder) {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: {why}"),
    };
    let expected = over_shared_memory("4", &[]);
    for strategy in ["hybrid_shard", "zero3"] {
        let program =
            [mpiexec.to_str().unwrap(), "-n", "4", "-ppn", "2", env!("CARGO_BIN_EXE_lockstep"), "train"];
        let strategy_is = format!("strategy={strategy}");
        let settings = ["run.yaml", "overwrite_output_dir=true", &strategy_is];
        let mut command = on_first_host(&hosts, &folder, &[&program[..], &settings, &BASE].concat());
        let ended = ran(command.output().unwrap());
        assert_eq!(ended.code, Some(0), "{strategy}: {ended:#?}");
        let found = outcome(&folder);
        found.assert_close(&expected, strategy);
        let between = "between steps shared memory with 1 of the other ranks, TCP with the rest";
        assert!(found.log.contains(between), "{}", found.log);
    }
}

/// One launcher for the ranks of both hosts. A rank that is killed on the other host is named.
#[test]
fn our_launcher_starts_mpiexec_for_two_hosts() {
    if let Err(why) = installed() {
        return println!("skipped: {why}");
    }
    let folder = Folder::new(RUN);
    let hosts = match two_hosts("n", &folder) {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: {why}"),
    };
    let launch = [env!("CARGO_BIN_EXE_lockstep"), "train", "run.yaml", "--nnodes", "2", "--nproc", "2"];
    let settings =
        ["--master-addr", Hosts::ADDRESSES[0], "carrier=mpi", "threads=1", "strategy=hybrid_shard"];
    let endless = ["max_steps=1000000", "save_steps=20"];
    let mut command = on_first_host(&hosts, &folder, &[&launch[..], &settings, &endless].concat());
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_checkpoint(&folder, 0);
    let last = rank_process(&folder, 3, &[]);
    signal("-KILL", last);
    let ended = ran(launcher.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(71), "{ended:#?}");
    let lost = format!("error: lost rank 3 (pid {last} on beta): its connection closed unexpectedly\nhint: ");
    assert!(ended.stderr.contains(&lost), "{ended:#?}");
}

// ---- where there is no MPI -----------------------------------------------------------------------------------

#[test]
fn mpi_that_is_asked_for_and_missing_is_an_error() {
    let folder = Folder::new(RUN);
    let refused = |args: &[&str], code: i32| {
        let mut command =
            folder.command(&[&["train", "run.yaml", "--nproc", "2", "carrier=mpi"], args].concat());
        let ended = ran(command.env("LOCKSTEP_MPI_DIR", "/nowhere").output().unwrap());
        assert_eq!(ended.code, Some(code), "{ended:#?}");
        ended.stderr
    };
    assert_snapshot!(refused(&[], 69), @r"
    error: `carrier: mpi` cannot be used: a library with MPI's standard ABI was not found (looked for libmpi_abi.so.1, libmpi_abi.so.0): there is none in /nowhere
    hint: install an MPI with the standard ABI of MPI 5 (MPICH 5, Open MPI 6, or the Python package `mpich`), set LOCKSTEP_MPI_DIR to the folder of libmpi_abi.so.1, and start ranks with its mpiexec. `carrier: auto` does without.
    ");
    assert_snapshot!(refused(&["--tee", "3"], 64), @r"
    error: --tee 3 does not go with `carrier: mpi`, for which mpiexec starts the ranks
    hint: remove --tee: give the command on one host only, or start the ranks with mpiexec or srun yourself.
    ");
}

#[test]
fn ranks_of_an_mpi_launcher_start_no_others() {
    let folder = Folder::new(RUN);
    let mut command = folder.command(&["train", "run.yaml", "--nproc", "2"]);
    command.envs([("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")]);
    let ended = ran(command.output().unwrap());
    assert_eq!(ended.code, Some(64));
    assert_snapshot!(ended.stderr, @r"
    error: cannot start ranks: this process is already a rank (an MPI launcher started it as rank 1 of 2)
    hint: under torchrun or another launcher, remove --nproc and the other launcher flags; otherwise unset RANK.
    ");
}

/// One rank without the library: all of them do without.
#[test]
fn one_rank_without_the_library_keeps_all_from_it() {
    let mpiexec = match installed() {
        Ok(mpiexec) => mpiexec,
        Err(why) => return println!("skipped: {why}"),
    };
    let folder = Folder::new(RUN);
    let before = "test $PMI_RANK = 0 || export LOCKSTEP_MPI_DIR=/nowhere";
    let ended = by_mpiexec(&folder, &mpiexec, 2, before, &[]);
    assert!(ended.code == Some(0) && ended.stderr.is_empty(), "{ended:#?}");
    let log = folder.read("out/logs/training.log");
    let expected = "2 ranks over shared memory (MPI is not used: rank 1: a library with MPI's standard ABI was not found";
    assert!(log.contains(expected) && log.contains("sum over ranks: fixed tree over 2 ranks"), "{log}");
    let asked_for = by_mpiexec(&folder, &mpiexec, 2, before, &["carrier=mpi", "overwrite_output_dir=true"]);
    assert_ne!(asked_for.code, Some(0), "{asked_for:#?}");
    let text =
        "error: `carrier: mpi` cannot be used: rank 1: a library with MPI's standard ABI was not found";
    assert!(asked_for.stderr.contains(text), "{asked_for:#?}");
}

// ---- failures ------------------------------------------------------------------------------------------------

/// Waits for a rank that has joined after `known` ones, by its number, and for a step of it.
fn rank_process(folder: &Folder, rank: u32, known: &[u32]) -> u32 {
    let cwd = folder.path("").canonicalize().unwrap();
    let is_rank = |pid: &u32| {
        let root = PathBuf::from(format!("/proc/{pid}"));
        let environ = std::fs::read(root.join("environ")).unwrap_or_default();
        let name = format!("PMI_RANK={rank}");
        std::fs::read_link(root.join("cwd")).is_ok_and(|link| link == cwd)
            && std::fs::read_link(root.join("exe")).is_ok_and(|exe| exe.ends_with("lockstep"))
            && environ.split(|byte| *byte == 0).any(|variable| variable == name.as_bytes())
    };
    let start = Instant::now();
    loop {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        if let Some(pid) = pids.filter(is_rank).find(|pid| !known.contains(pid)) {
            return pid;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "rank {rank} does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn wait_for_checkpoint(folder: &Folder, after: u64) -> u64 {
    let start = Instant::now();
    loop {
        let steps = std::fs::read_dir(folder.path("out/checkpoints")).into_iter().flatten().flatten();
        let number = |name: String| name.strip_prefix("step-")?.parse::<u64>().ok();
        let newest = steps.filter_map(|entry| number(entry.file_name().into_string().ok()?)).max();
        if let Some(step) = newest.filter(|step| *step > after) {
            return step;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint after step {after}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Killed once, all ranks restart from the checkpoint; killed again, the launcher reports which rank was lost.
#[test]
fn a_killed_rank_restarts_all_and_is_named() {
    if let Err(why) = installed() {
        return println!("skipped: {why}");
    }
    let folder = Folder::new(RUN);
    let args = ["train", "run.yaml", "--nproc", "3", "carrier=mpi", "threads=1", "max_steps=1000000"];
    let mut command = folder.command(&[&args[..], &["save_steps=20", "--max-restarts", "1"]].concat());
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_checkpoint(&folder, 0);
    let first = rank_process(&folder, 1, &[]);
    signal("-KILL", first);
    // The restarted ranks save a checkpoint of their own.
    let second = rank_process(&folder, 1, &[first]);
    let newest = wait_for_checkpoint(&folder, 0);
    wait_for_checkpoint(&folder, newest);
    let others: Vec<u32> = [0, 2].iter().map(|rank| rank_process(&folder, *rank, &[])).collect();
    signal("-KILL", second);
    let ended = ran(launcher.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(71), "{ended:#?}");
    let stderr = nameless(&ended.stderr);
    let lost = "lost rank 1 (pid [pid] on [host]): its connection closed unexpectedly";
    assert!(stderr.contains(&format!("{lost}\nrestarting all ranks in 1 s (restart 1 of 1)\n")), "{stderr}");
    assert!(stderr.contains(&format!("error: {lost}\nhint: ")), "{stderr}");
    assert!(ended.stdout.contains("resumed from "), "{ended:#?}");
    let start = Instant::now();
    while others.iter().any(|pid| is_alive(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(60), "a rank is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A rank that fails is reported with its error and its exit code.
#[test]
fn a_failing_rank_is_reported() {
    if let Err(why) = installed() {
        return println!("skipped: {why}");
    }
    let folder = Folder::new(RUN);
    let mut command = folder.command(&[
        "train",
        "run.yaml",
        "--nproc",
        "3",
        "carrier=mpi",
        "threads=1",
        "max_steps=1000000",
    ]);
    let ended = ran(command.env("LOCKSTEP_FAILPOINT", "1/lane.comm:40").output().unwrap());
    assert_eq!(ended.code, Some(70), "{ended:#?}");
    assert!(ended.stderr.contains("error: rank 1 (pid "), "{ended:#?}");
}

/// A stop request reaches the ranks through mpiexec: they save a checkpoint.
#[test]
fn a_stop_saves_a_checkpoint() {
    if let Err(why) = installed() {
        return println!("skipped: {why}");
    }
    let folder = Folder::new(RUN);
    let args = ["train", "run.yaml", "--nproc", "2", "carrier=mpi", "threads=1", "max_steps=1000000"];
    let mut command = folder.command(&[&args[..], &["save_steps=20"]].concat());
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_checkpoint(&folder, 0);
    signal("-TERM", launcher.id());
    let ended = ran(launcher.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(143), "{ended:#?}");
    assert!(ended.stdout.contains("stopped"), "{ended:#?}");
}
