//! Worlds that cannot start, and their errors.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::launch::{free_port, nameless, node, ran, run_all};
use crate::support::{Folder, RUN};

/// `train run.yaml` as a rank, refused before a step.
fn refused(config: &str, variables: &str, code: i32) -> String {
    let folder = Folder::new(config);
    let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let output = folder.command(&["train", "run.yaml"]).envs(pairs).output().unwrap();
    let ran = ran(output);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), ""), "{ran:#?}");
    ran.stderr
}

/// Flags of the launcher, refused.
fn flags(args: &str, code: i32) -> String {
    let args: Vec<&str> = ["train"].into_iter().chain(args.split_whitespace()).chain(["run.yaml"]).collect();
    Folder::new(RUN).refused(&args, code)
}

#[test]
fn variables_that_contradict_each_other() {
    assert_snapshot!(refused(RUN, "RANK=2 WORLD_SIZE=2", 64), @"[rank 2] error: environment variables contradict each other: RANK is 2, but WORLD_SIZE is 2 and ranks count from 0");
    assert_snapshot!(refused(RUN, "RANK=x WORLD_SIZE=2", 64), @"error: environment variable RANK is `x`: expected a whole number, 0 or greater");
    assert_snapshot!(refused(RUN, "RANK=0", 64), @"error: environment variable WORLD_SIZE is not set, but RANK is 0");
}

#[test]
fn a_file_that_contradicts_the_launcher() {
    let config = format!("{RUN}nproc_per_node: 4\n");
    assert_snapshot!(refused(&config, "RANK=0 WORLD_SIZE=2", 64), @r"
    [rank 0] error: `nproc_per_node: 4` (run.yaml:8:1), but the launcher started 2 (LOCAL_WORLD_SIZE)
    [rank 0] hint: remove `nproc_per_node` from the configuration, or start that many.
    ");
    let config = format!("{RUN}nodes: 2\n");
    assert_snapshot!(refused(&config, "RANK=0 WORLD_SIZE=2", 64), @r"
    [rank 0] error: `nodes: 2` (run.yaml:8:1), but the launcher started 1 (WORLD_SIZE / LOCAL_WORLD_SIZE)
    [rank 0] hint: remove `nodes` from the configuration, or start that many.
    ");
}

#[test]
fn flags_that_cannot_be() {
    assert_snapshot!(flags("--nnodes 1:4", 2), @r"
    error: invalid value '1:4' for '--nnodes <N>': a range (min:max) is not implemented yet; give one number

    For more information, try '--help'.
    ");
    assert_snapshot!(flags("--nproc-per-node many", 2), @r"
    error: invalid value 'many' for '--nproc <N>': expected a number from 1 to 65535, auto, cpu or gpu

    For more information, try '--help'.
    ");
    assert_snapshot!(flags("--tee 0:3", 2), @r"
    error: invalid value '0:3' for '--tee <0..3>': a map of ranks is not implemented yet; give 0, 1, 2 or 3

    For more information, try '--help'.
    ");
    assert_snapshot!(flags("--nnodes 2", 64), @r"
    error: --node-rank is missing: the run has 2 nodes, and this could be any of them
    hint: run the same command on every node, with --node-rank 0, 1 and so on.
    ");
    assert_snapshot!(flags("--nnodes 2 --node-rank 2", 64), @r"
    error: --node-rank 2 is too large: the run has 2 nodes, counted from 0
    hint: run the same command on every node, with --node-rank 0, 1 and so on.
    ");
    assert_snapshot!(flags("--nnodes 2 --node-rank 1", 64), @r"
    error: --master-addr is missing: the run has 2 nodes, and they must find node 0
    hint: give the host name or address of node 0 with --master-addr.
    ");
    let folder = Folder::new(RUN);
    let nested = folder.command(&["train", "run.yaml", "--nproc", "2"]).env("RANK", "0").output().unwrap();
    assert_snapshot!(String::from_utf8(nested.stderr).unwrap(), @r"
    error: cannot start ranks: this process is already a rank (RANK is 0)
    hint: under torchrun or another launcher, remove --nproc and the other launcher flags; otherwise unset RANK.
    ");
}

/// The launcher reports it, once.
#[test]
fn a_bad_configuration_starts_no_rank() {
    let args = ["launch", "--nproc-per-node", "4", "run.yaml", "max_setps=3"];
    assert_snapshot!(Folder::new(RUN).refused(&args, 64), @r"
    error: argument max_setps=3: unknown key `max_setps`
      hint: did you mean `max_steps`?
    ");
}

#[test]
fn tokens() {
    let nodes = "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1";
    assert_snapshot!(flags(nodes, 77), @r"
    error: a run on 2 nodes needs a token, but none is set
    hint: create one with `openssl rand -hex 32 > token; chmod 600 token`, copy it to every node, and set LOCKSTEP_TOKEN_FILE=token there.
    ");
    let folder = Folder::new(RUN);
    folder.write("token", "0123456789abcdef0123456789abcdef");
    std::fs::set_permissions(folder.path("token"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let args: Vec<&str> = ["launch"].into_iter().chain(nodes.split(' ')).chain(["run.yaml"]).collect();
    let open = ran(folder.command(&args).env("LOCKSTEP_TOKEN_FILE", "token").output().unwrap());
    assert_eq!(open.code, Some(77));
    assert_snapshot!(open.stderr, @r"
    error: token file token can be read by other users (mode 0644)
    hint: run `chmod 600 token`.
    ");
    let short = ran(folder.command(&args).env("LOCKSTEP_TOKEN", "hunter2").output().unwrap());
    assert_eq!(short.code, Some(77));
    assert!(!short.stderr.contains("hunter2"));
    assert!(
        short
            .stderr
            .starts_with("error: the token in LOCKSTEP_TOKEN has 7 characters; at least 16 are required\n")
    );
}

#[test]
fn a_port_in_use() {
    let holder = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let folder = Folder::new(RUN);
    let mut best = Duration::MAX;
    let mut text = String::new();
    // Best of several: other tests run beside this one.
    for _ in 0..10 {
        if best < Duration::from_millis(300) {
            break;
        }
        let start = Instant::now();
        let ran = ran(node(&folder, &port)("0", &[]).output().unwrap());
        best = best.min(start.elapsed());
        assert_eq!(ran.code, Some(69), "{ran:#?}");
        text = ran.stderr;
    }
    println!("a port in use is told in {best:?}");
    assert!(best < Duration::from_millis(300), "{best:?}");
    let own = std::fs::read_to_string("/proc/self/comm").unwrap();
    let text = nameless(&text).replace(&port, "[port]").replace(own.trim(), "[name]");
    assert_snapshot!(text, @r"
    error: port [port] is already in use (by pid [pid], [name])
    hint: choose another port with --master-port (without a launcher: MASTER_PORT or LOCKSTEP_PORT), the same on every node.
    ");
}

#[test]
fn a_node_that_never_comes() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let extra = ["--nproc-per-node", "2", "--join-timeout", "0.5"];
    let zero = ran(node("0", &extra).output().unwrap());
    assert_eq!(zero.code, Some(72), "{zero:#?}");
    assert_snapshot!(zero.stderr, @r"
    error: ranks 2, 3 (node 1) did not join within 0.5 s; ranks 0, 1 did
    hint: start the launcher on every node with the same --nnodes, --nproc-per-node, --master-addr and --master-port. Raise --join-timeout if some nodes start slowly.
    ");
    let one = ran(node("1", &["--join-timeout", "0.3"]).output().unwrap());
    assert_eq!(one.code, Some(72), "{one:#?}");
    assert_snapshot!(nameless(&one.stderr).replace(&port, "[port]"), @r"
    error: rank 1 could not reach the rendezvous at 127.0.0.1:[port] within 0.3 s: Connection refused (os error 111)
    hint: check that node 0 is running, that --master-addr and --master-port point to it, and that no firewall blocks the port. Raise --join-timeout if node 0 starts slowly.
    ");
    assert!(!folder.path("out").exists());
}

#[test]
fn nodes_of_different_worlds() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let nodes = run_all(vec![node("0", &["--nproc-per-node", "2"]), node("1", &["--nproc-per-node", "1"])]);
    for node in &nodes {
        assert_eq!(node.code, Some(64), "{nodes:#?}");
    }
    assert_snapshot!(nameless(&nodes[0].stderr), @r"
    error: nodes were started with different world sizes: node 1 ([host]) with --nnodes 2 --nproc-per-node 1, node 0 with --nnodes 2 --nproc-per-node 2
    hint: start every node with the same --nnodes and --nproc-per-node.
    ");
}

/// The same rank twice: the second is refused, and the first continues.
#[test]
fn nodes_with_the_same_number() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let mut commands = vec![node("1", &[]), node("1", &[]), node("0", &[])];
    let last = commands.pop().unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        run_all(vec![last]).remove(0)
    });
    let ones = run_all(commands);
    let zero = late.join().unwrap();
    assert_eq!(zero.code, Some(0), "{zero:#?}");
    let (well, twice): (Vec<_>, Vec<_>) = ones.iter().partition(|ran| ran.code == Some(0));
    assert_eq!((well.len(), twice[0].code), (1, Some(64)), "{ones:#?}");
    assert_snapshot!(nameless(&twice[0].stderr), @r"
    error: rank 1 was started twice: first as pid [pid] on [host], then as pid [pid] on [host]
    hint: give every node its own --node-rank. Without a launcher, give every process its own RANK.
    ");
}

#[test]
fn another_token() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let node = node(&folder, &port);
    let mut wrong = node("1", &["--join-timeout", "5"]);
    wrong.env("LOCKSTEP_TOKEN", "another token, and long enough too");
    let nodes = run_all(vec![node("0", &["--join-timeout", "2"]), wrong]);
    assert_eq!((nodes[0].code, nodes[1].code), (Some(72), Some(77)), "{nodes:#?}");
    assert!(nodes[0].stderr.contains(": wrong token\n"), "the address is logged: {nodes:#?}");
    let text = nameless(&nodes[1].stderr).replace(&port, "[port]");
    assert_snapshot!(text, @r"
    error: rank 1 (pid [pid] on [host]) failed with exit code 77: the rendezvous at 127.0.0.1:[port] has a different token
    hint: set the same LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE on every node. If it is the same, another run may be using this port: choose another with --master-port.
    ");
}

#[test]
fn ranks_with_different_configurations() {
    let (folder, port) = (Folder::new(RUN), free_port());
    let rank = |rank: &str, setting: &str| {
        let mut command = folder.command(&["train", "run.yaml", setting]);
        command.envs([("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_PORT", &port)]);
        command
    };
    let ranks =
        run_all(vec![rank("0", "strategy=zero3"), rank("1", "strategy=zero3"), rank("2", "strategy=zero2")]);
    assert!(ranks.iter().all(|ran| ran.code == Some(64)), "{ranks:#?}");
    let expected = "[rank 0] error: ranks do not agree on the configuration: rank 2 has strategy zero2, the others zero3; ";
    assert!(ranks[0].stderr.starts_with(expected), "{ranks:#?}");
    assert!(ranks[1..].iter().all(|ran| ran.stderr.is_empty()), "told once");
}
