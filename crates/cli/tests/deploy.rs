//! The templates in `deploy/`: their files parse, their commands are accepted as the cluster would run them, and the
//! script for Slurm trains under a stand-in for srun.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use insta::assert_snapshot;
use serde_json::Value;

use crate::launch::ran;
use crate::support::{Folder, RUN, rows};
use crate::tidy;
use crate::workflows::yaml;

fn template(name: &str) -> String {
    fs::read_to_string(tidy::root().join("deploy").join(name)).unwrap()
}

fn documents(name: &str) -> Vec<Value> {
    template(name).split("\n---\n").map(yaml).collect()
}

/// All values below `key`, at any depth.
fn all<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    let mut found = Vec::new();
    match value {
        Value::Object(map) => {
            for (name, inner) in map {
                found.extend((name == key).then_some(inner));
                found.extend(all(inner, key));
            }
        }
        Value::Array(items) => items.iter().for_each(|item| found.extend(all(item, key))),
        _ => {}
    }
    found
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

fn folder() -> Folder {
    Folder::new(RUN)
}

/// Runs a template's arguments as a dry run in the environment of its node. Returns what it prints.
fn accepted(args: &[String], environment: &[(&str, &str)]) -> String {
    let folder = folder();
    let args: Vec<String> = args
        .iter()
        .map(|arg| arg.replace("/data/run.yaml", "run.yaml").replace("--nproc=gpu", "--nproc=2"))
        .chain(["--dry-run".to_owned()])
        .collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let ran = ran(folder.command(&words).envs(environment.iter().copied()).output().unwrap());
    assert_eq!(ran.code, Some(0), "{words:?} {environment:?}: {ran:#?}");
    ran.stdout
}

#[test]
fn manifests_are_complete_and_their_commands_are_accepted() {
    for (name, environment) in [
        ("kubernetes.yaml", &[("JOB_COMPLETION_INDEX", "1")][..]),
        ("jobset.yaml", &[]),
        (
            "kubeflow.yaml",
            &[
                ("RANK", "1"),
                ("WORLD_SIZE", "2"),
                ("PET_NODE_RANK", "1"),
                ("PET_NNODES", "2"),
                ("PET_NPROC_PER_NODE", "2"),
                ("PET_MASTER_ADDR", "lockstep-master-0"),
            ],
        ),
    ] {
        let documents = documents(name);
        for document in &documents {
            for key in ["apiVersion", "kind", "spec"] {
                assert!(!document[key].is_null(), "{name} has no {key}");
            }
            assert_eq!(document["metadata"]["name"], "lockstep", "{name}");
        }
        let containers: Vec<&Value> = documents
            .iter()
            .flat_map(|document| all(document, "containers"))
            .flat_map(|list| list.as_array().unwrap())
            .collect();
        assert!(!containers.is_empty(), "{name}");
        for container in containers {
            let text = accepted(&strings(&container["args"]), environment);
            assert!(text.contains("nodes: 2") && text.contains("nproc_per_node: 2"), "{name}: {text}");
            assert_eq!(container["env"][0]["name"], "LOCKSTEP_TOKEN", "{name}");
        }
    }
}

#[test]
fn skypilot_starts_as_many_ranks_as_there_are_gpus() {
    let task = yaml(&template("skypilot.yaml"));
    let run = task["run"].as_str().unwrap();
    let args: Vec<String> =
        run.trim().strip_prefix("lockstep ").unwrap().split_whitespace().map(str::to_owned).collect();
    let environment = [
        ("SKYPILOT_NUM_NODES", "2"),
        ("SKYPILOT_NODE_RANK", "1"),
        ("SKYPILOT_NODE_IPS", "10.0.0.4\n10.0.0.5"),
        ("SKYPILOT_NUM_GPUS_PER_NODE", "8"),
    ];
    let text = accepted(&args, &environment);
    assert!(text.contains("nodes: 2") && text.contains("nproc_per_node: 8"), "{text}");
}

#[test]
fn contradictions_of_the_scheduler_are_refused() {
    let folder = folder();
    let refused = |flags: &[&str], environment: &[(&str, &str)]| {
        let mut command = folder.command(&[&["train", "run.yaml", "--dry-run"], flags].concat());
        let ran = ran(command.envs(environment.iter().copied()).output().unwrap());
        assert_eq!(ran.code, Some(64), "{ran:#?}");
        ran.stderr
    };
    let step = [
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_NODEID", "1"),
        ("SLURM_PROCID", "1"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
    ];
    assert_snapshot!(refused(&["--nnodes", "2"], &step), @r"
    error: `--nnodes` is 2, but the scheduler set SLURM_STEP_NUM_NODES to 4
    hint: remove `--nnodes`: the scheduler's value is then used. With --standalone, every node trains alone.
    ");
    assert_snapshot!(refused(&["--nproc", "2", "--node-rank", "3"], &step), @r"
    error: `--node-rank` is 3, but the scheduler set SLURM_NODEID to 1
    hint: remove `--node-rank`: the scheduler's value is then used. With --standalone, every node trains alone.
    ");
    let mut tasks = step;
    (tasks[5].1, tasks[6].1) = ("8", "2(x4)");
    (tasks[3].1, tasks[4].1) = ("3", "1");
    assert_snapshot!(refused(&["--nproc", "2"], &tasks), @r"
    error: cannot start ranks: this process is already a rank (srun started it as rank 3 of 8)
    hint: under torchrun or another launcher, remove --nproc and the other launcher flags; otherwise unset RANK.
    ");
}

/// `docs/exit-codes.md` says which codes another attempt cannot help.
#[test]
fn exit_codes_are_those_of_the_documentation() {
    let page = fs::read_to_string(tidy::root().join("docs/exit-codes.md")).unwrap();
    assert!(page.contains("does not restart after 2, 64, 65, 66 and 77"));
    for name in ["kubernetes.yaml", "jobset.yaml"] {
        for document in documents(name) {
            for rules in all(&document, "podFailurePolicy") {
                let rule = &rules["rules"][0];
                assert_eq!(rule["action"], "FailJob", "{name}");
                assert_eq!(strings(&rule["onExitCodes"]["values"]), ["2", "64", "65", "66", "77"], "{name}");
            }
        }
    }
    assert!(template("slurm.sbatch").contains("-eq 143"));
}

#[test]
fn the_image_is_built_from_what_there_is() {
    let text = template("Dockerfile");
    let joined = text.replace("\\\n", " ");
    let known = ["ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"];
    let mut stages = Vec::new();
    for line in joined.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(known.contains(&words[0]), "{line}");
        if let ["FROM", _, "AS", stage] = words[..] {
            stages.push(stage);
        }
        if let Some(from) = words[1].strip_prefix("--from=") {
            assert!(stages.contains(&from), "{line}");
        }
    }
    assert!(joined.contains("cargo build --release --locked") && tidy::root().join("Cargo.lock").is_file());
    assert!(joined.trim_end().ends_with(r#"ENTRYPOINT ["lockstep"]"#));
}

/// Starts a task on each of two hosts of loopback, with the variables of a step, as srun does.
const SRUN: &str = r#"#!/bin/bash
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=127.0.0.[2-3]
tasks=$((2 * PER_NODE))
export SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_TASKS_PER_NODE="$PER_NODE(x2)" SLURM_NTASKS=$tasks
pids=()
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$((task / PER_NODE)) SLURM_LOCALID=$((task % PER_NODE)) "$@" &
    pids+=($!)
done
trap 'kill -USR1 "${pids[@]}"' USR1
code=0
for pid in "${pids[@]}"; do
    wait "$pid"; one=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; one=$?; done
    [ $one -ne 0 ] && code=$one
done
exit $code
"#;

fn program(folder: &Folder, name: &str, text: &str) -> PathBuf {
    folder.write(name, text);
    let path = folder.path(name);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A job whose programs are the stand-in and this build.
fn job(folder: &Folder, script: &str, per_node: u32) -> Command {
    fs::create_dir(folder.path("bin")).unwrap();
    program(folder, "bin/srun", SRUN);
    program(folder, "bin/scontrol", "#!/bin/bash\necho \"$@\" >> requeued\n");
    let lockstep = format!("#!/bin/bash\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_lockstep"));
    program(folder, "bin/lockstep", &lockstep);
    let script = program(folder, "job.sbatch", script);
    let path = format!("{}:{}", folder.path("bin").display(), std::env::var("PATH").unwrap());
    // `command` sets the folder and a clean environment.
    let plain = folder.command(&[]);
    let mut bash = Command::new("bash");
    bash.arg(script).current_dir(plain.get_current_dir().unwrap());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => bash.env(name, value),
            None => bash.env_remove(name),
        };
    }
    bash.env("PATH", path).env("PER_NODE", per_node.to_string()).env("NPROC", "2");
    bash.env("SLURM_JOB_ID", (20_000 + std::process::id() % 10_000 + per_node).to_string());
    bash
}

#[test]
fn the_script_for_slurm_trains_on_two_nodes() {
    // A launcher on each node, or every rank by srun itself: the same run.
    let mut losses = Vec::new();
    for (per_node, script) in [
        (1, template("slurm.sbatch")),
        (2, "#!/bin/bash\nexport LOCKSTEP_TOKEN=0123456789abcdef0123456789abcdef\nsrun lockstep train run.yaml\n".into()),
    ] {
        let folder = folder();
        folder.write("data.jsonl", rows(16));
        let ran = ran(job(&folder, &script, per_node).output().unwrap());
        assert_eq!(ran.code, Some(0), "{per_node}: {ran:#?}");
        let metrics = folder.read("out/metrics.jsonl");
        let of_step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].to_string();
        losses.push(metrics.lines().map(of_step).collect::<Vec<_>>());
        assert!(ran.stdout.contains("4 ranks") || ran.stdout.contains("ranks     4"), "{ran:#?}");
        assert!(!folder.path("requeued").exists());
    }
    assert_eq!(losses[0].len(), 2);
    assert_eq!(losses[0], losses[1]);
}
