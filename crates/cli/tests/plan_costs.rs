//! What `plan` adds to the memory table: strategies, changes that fit, clusters on paper, pictures, origins.

use std::io::Write as _;
use std::process::Stdio;

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

/// A run of 7 billion parameters on paper, whose numbers depend on no machine.
const PAPER: [&str; 8] =
    ["plan", "model=7b", "per_device_train_batch_size=1", "max_length=2048", "--gpus", "8", "--gpu", "l40s"];

fn paper(settings: &[&str]) -> String {
    Folder::new(RUN).succeeds(&[&PAPER[..], settings].concat())
}

/// The part of the output above the memory table.
fn comparison(text: &str) -> &str {
    text.split_once("\npolicy ").map_or(text, |(above, _)| above)
}

#[test]
fn strategies_on_a_cluster_on_paper() {
    let text = paper(&["strategy=zero3", "recompute=full"]);
    assert_snapshot!("paper_cluster", comparison(&text));
}

#[test]
fn changes_that_make_a_run_fit() {
    let text = paper(&["strategy=ddp", "recompute=full"]);
    assert!(text.contains("Changes that make it fit") && text.contains("\n1. "), "{text}");
    // A configured budget is a refusal: the same changes, and the error.
    let args = [&PAPER[..], &["strategy=ddp", "memory_budget_gib=30"]].concat();
    let ran = Folder::new(RUN).run(&args);
    assert_eq!(ran.code, Some(64), "{ran:#?}");
    assert!(ran.stdout.contains("Changes that make it fit"), "{ran:#?}");
    assert!(ran.stderr.starts_with("error: the plan needs "), "{ran:#?}");
}

#[test]
fn strategies_of_this_machine() {
    let text = Folder::new(RUN).succeeds(&["plan", "run.yaml", "device=cpu", "--nproc", "2"]);
    for name in ["* ddp", "  zero1", "  zero2", "  zero3"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name}: {text}");
    }
    assert!(text.contains("* ddp: The configuration sets it"), "{text}");
    assert!(text.contains("Times are rough predictions for 2 cores"), "{text}");
}

/// Without `threads` a plan assumes what a launched rank gets: its share of the cores.
#[test]
fn ranks_share_the_cores() {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let folder = Folder::new(&RUN.replace("threads: 2\n", ""));
    let text = folder.succeeds(&["plan", "run.yaml", "device=cpu", "--nproc", &cores.max(2).to_string()]);
    assert!(text.contains("Times are rough predictions for 1 cores"), "{text}");
}

#[test]
fn the_strategy_auto() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["plan", "run.yaml", "device=cpu", "--nproc", "2", "strategy=auto"]);
    let chosen = text.lines().find(|line| line.starts_with("* ")).unwrap();
    let name = chosen.split_whitespace().nth(1).unwrap();
    let printed = folder.succeeds(&["train", "run.yaml", "device=cpu", "--nproc", "2", "strategy=auto"]);
    assert!(printed.contains(&format!(" {name} on 2 ranks")), "{chosen}: {printed}");
    assert!(printed.contains(&format!("strategy {name}, chosen automatically. It")), "{printed}");
    let text = folder.succeeds(&["train", "run.yaml", "--nproc", "2", "strategy=auto", "--dry-run"]);
    assert!(text.contains(&format!("strategy: {name}  # chosen automatically. It")), "{text}");
}

/// Rows of a micro-batch that the cost model chooses: `plan`, `--dry-run` and `train` agree, and the batch stays whole.
#[test]
fn the_batch_size_auto() {
    let folder = Folder::new(RUN);
    let open =
        ["run.yaml", "device=cpu", "per_device_train_batch_size=auto", "train_batch_size=64", "max_steps=1"];
    let text = folder.succeeds(&[&["train", "--dry-run"], &open[..]].concat());
    let chosen =
        "per_device_train_batch_size: 64  # chosen automatically. The shortest predicted step that fits, ";
    assert!(text.contains(chosen), "{text}");
    let plan = folder.succeeds(&[&["plan"], &open[..]].concat());
    assert!(plan.contains("1 micro-batch of"), "{plan}");
    // Less memory than 64 rows need: more micro-batches of fewer rows.
    let total = plan.lines().find(|line| line.starts_with("total ")).unwrap();
    let needed: f64 = total.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(total.contains(" MiB "), "{total}");
    let budget = format!("memory_budget_gib={}", (needed - 1.0) / 1024.0);
    let small = [&open[..], &[budget.as_str()]].concat();
    let text = folder.succeeds(&[&["train", "--dry-run"], &small[..]].concat());
    let rows = ["1", "2", "4", "8", "16", "32"]
        .into_iter()
        .find(|rows| text.contains(&format!("per_device_train_batch_size: {rows}  # chosen automatically.")));
    let rows: u32 = rows.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
    let printed = folder.succeeds(&[&["train"], &small[..]].concat());
    let note = format!("{rows} rows in a micro-batch, chosen automatically.");
    assert!(printed.contains(&note), "{printed}");
}

#[test]
fn as_json() {
    let text = paper(&["--json", "--network", "100Gbps", "--gpus-per-node", "4", "strategy=auto"]);
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let strategies = all["comparison"]["strategies"].as_array().unwrap();
    assert_eq!(strategies.len(), 6, "hybrid_shard applies to two nodes: {text}");
    assert_eq!(strategies.iter().filter(|row| row["chosen"] == true).count(), 1);
    assert_eq!(all["scaling"]["rows"].as_array().unwrap().len(), 4);
    assert!(all["memory_over_step"]["peak_bytes"].as_u64() > Some(1 << 30));
    assert!(all["refusal"].is_null());
}

#[test]
fn pictures_of_memory() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["plan", "run.yaml", "device=cpu", "--curve", "--svg", "memory.svg"]);
    assert!(text.contains("operations of phase train; residents "), "{text}");
    assert!(folder.read("memory.svg").starts_with("<svg "), "{}", folder.read("memory.svg"));
    assert_snapshot!(folder.refused(&["plan", "run.yaml", "--svg", "no/such/folder.svg"], 73), @r"
    error: cannot write no/such/folder.svg: No such file or directory (os error 2)
    hint: give a file in a folder that exists and can be written to.
    ");
}

fn explained(message: &str, settings: &[&str]) -> (Option<i32>, String, String) {
    let folder = Folder::new(RUN);
    let mut command = folder.command(&[&PAPER[..], &["--explain-oom"], settings].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(message.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn an_out_of_memory_message() {
    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total \
                   capacity of 44.43 GiB of which 101.31 MiB is free. Including non-PyTorch memory, this process has \
                   44.32 GiB memory in use. Of the allocated memory 43.1 GiB is allocated by PyTorch, and 300.00 MiB is \
                   reserved by PyTorch but unallocated.";
    let (code, text, _) = explained(message, &["strategy=ddp", "recompute=full"]);
    assert_eq!(code, Some(0), "{text}");
    assert_snapshot!("explained_oom", text);
    let (_, text, _) = explained(message, &["strategy=zero3", "recompute=full"]);
    assert!(text.contains("and fits into 43.1 GiB"), "{text}");
    let (code, _, error) = explained("Segmentation fault", &[]);
    assert_eq!(code, Some(66));
    assert_snapshot!(error, @r"
    error: standard input has no out-of-memory message with sizes
    hint: paste the whole message of PyTorch (`CUDA out of memory. Tried to allocate …`) or of Lockstep (`the plan needs …`), as in `lockstep plan run.yaml --explain-oom < message.txt`.
    ");
}

#[test]
fn clusters_that_cannot_be() {
    let folder = Folder::new(RUN);
    let refused = |flags: &[&str]| folder.refused(&[&["plan", "run.yaml"], flags].concat(), 64);
    assert_snapshot!(refused(&["--gpus", "16", "--gpu", "h100"]), @r"
    error: there are no published figures of a GPU `h100` here
    hint: did you mean `h100-80g`? Known: b200, h200, h100-80g, h100-pcie, a100-80g, a100-40g, l40s, a40, rtx-a6000, rtx-4090, rtx-3090, a10, l4.
    ");
    assert_snapshot!(refused(&["--gpus", "12", "--gpu", "h200"]), @r"
    error: 12 GPUs do not fill nodes of 8
    hint: use a multiple of 8, or set the number of GPUs per node.
    ");
    assert_snapshot!(refused(&["--gpus", "16", "--gpu", "h200"]), @r"
    error: --network is missing: the cluster has 2 nodes, and they exchange data over it
    hint: give its speed, such as --network 400Gbps, or --gpus-per-node for one larger node.
    ");
    assert_snapshot!(refused(&["--gpus", "16", "--gpu", "h200", "--network", "fast"]), @r"
    error: `fast` is not a network speed
    hint: write a number and a unit, such as 100Gbps (one port per node), 400Gbps/gpu (one port per GPU) or 25GB/s.
    ");
}

#[test]
fn origins_of_settings() {
    let folder = Folder::new(RUN);
    folder.write("ds.json", "{\"zero_optimization\": {\"stage\": 2, \"reduce_bucket_size\": \"auto\"}}\n");
    let text = folder.succeeds(&["plan", "run.yaml", "ds.json", "seed=7", "--origins"]);
    let kept = ["strategy ", "reduce_bucket_size ", "max_steps ", "seed ", "learning_rate "];
    let lines: Vec<&str> = text.lines().filter(|line| kept.iter().any(|key| line.starts_with(key))).collect();
    assert_snapshot!(lines.join("\n"), @r"
    max_steps                      2                     run.yaml:5:1
    seed                           7                     argument seed=7
    learning_rate                  5e-5                  default
    strategy                       zero2                 ds.json:1:24
    reduce_bucket_size             1024                  auto (ds.json:1:58)
    ");
    let text = folder.succeeds(&["plan", "run.yaml", "--origins", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(
        all.as_array().unwrap().iter().any(|row| row["key"] == "max_steps" && row["value"] == "2"),
        "{text}"
    );
    let text = folder.succeeds(&["train", "run.yaml", "seed=7", "--dry-run"]);
    assert!(
        text.contains("seed: 7  # argument seed=7") && text.contains("max_steps: 2  # run.yaml:5"),
        "{text}"
    );
}
