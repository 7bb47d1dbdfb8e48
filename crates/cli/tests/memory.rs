//! The peak memory of the process matches the plan.

use crate::support::{Folder, RUN, rows};

/// 5.3 million parameters.
const LARGER: &str = "\
model: {architectures: [LlamaForCausalLM], hidden_size: 256, num_hidden_layers: 6, num_attention_heads: 8, \
num_key_value_heads: 4, intermediate_size: 768, max_position_embeddings: 256, vocab_size: 1024}
train_files: data.jsonl
max_length: 256
packing: bfd
per_device_train_batch_size: 4
max_steps: 2
save_strategy: no
output_dir: out
threads: 2
";

/// Peak, planned, arena and other memory in bytes, from the last such line of the log.
fn logged(folder: &Folder) -> [u64; 4] {
    let log = folder.read("out/logs/training.log");
    let line = log.lines().rfind(|line| line.contains(" peak memory ")).unwrap_or_else(|| panic!("{log}"));
    let numbers: Vec<u64> = line[24..]
        .split(|c: char| !c.is_ascii_digit())
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().unwrap())
        .collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

/// Memory does not grow with the data: tokens stay in their file.
#[test]
fn data_does_not_fill_the_memory() {
    let folder_of = |count: usize| {
        let folder = Folder::new(LARGER);
        folder.write("data.jsonl", rows(count));
        folder
    };
    let peak = |folder: &Folder| {
        folder.succeeds(&["train", "run.yaml", "max_length=64", "threads=1", "overwrite_output_dir=true"]);
        if cfg!(target_os = "linux") { logged(folder) } else { [0; 4] }
    };
    // Peaks differ by a MiB or two from run to run: pages of the file that were just read count as held, and so does
    // what the allocator keeps while it prepares the data. What a run keeps is there in all of them.
    let lowest = |folder: &Folder| {
        peak(folder);
        [0, 1, 2].map(|_| peak(folder)).into_iter().min_by_key(|all| all[0]).unwrap()
    };
    let (small, large) = (lowest(&folder_of(2_000)), lowest(&folder_of(40_000)));
    let tokens = 38_000 * 30 * 4;
    let (grown, planned) = (large[0] as i64 - small[0] as i64, large[3] as i64 - small[3] as i64);
    println!("grown by {grown} bytes, {planned} planned; the tokens are {tokens}");
    assert!(planned <= 38_000 * 32, "{large:?} {small:?}");
    assert!(grown < planned + tokens / 2, "{grown} of {tokens}");
}

/// Returns the peak.
fn holds_what_was_planned(config: &str, settings: &[&str]) -> u64 {
    let folder = Folder::new(config);
    folder.write("data.jsonl", rows(400));
    holds_its_plan(&folder, settings)
}

/// The same for the run in a folder with its data.
fn holds_its_plan(folder: &Folder, settings: &[&str]) -> u64 {
    let printed = folder.succeeds(&[&["train", "run.yaml"], settings].concat());
    if !cfg!(target_os = "linux") {
        return 0;
    }
    assert!(printed.lines().last().unwrap().starts_with("peak memory "), "{printed}");
    // That the arena taken is the arena planned is asserted by the run itself.
    let [peak, planned, arena, foreign] = logged(folder);
    println!("peak {peak}, arena {arena}, beyond it {}, foreign {foreign}", peak as i64 - arena as i64);
    assert_eq!(planned, arena + foreign);
    // The plan is for optimised builds. The code of other builds is larger, and so is what of it is in memory.
    let code = if cfg!(debug_assertions) { 3 << 20 } else { 0 };
    assert!(
        peak as f64 <= arena as f64 * 1.02 + (foreign + code) as f64,
        "peak {peak} is over {arena} + {foreign}"
    );
    assert!(peak as f64 >= arena as f64 * 0.98, "peak {peak} is under the arena {arena}");
    // The constant must not be several times the real value.
    assert!(
        peak as f64 >= arena as f64 + foreign as f64 * 0.3,
        "peak {peak} is far under {arena} + {foreign}"
    );
    peak
}

#[test]
fn tiny_f32() {
    holds_what_was_planned(RUN, &["recompute=none"]);
}

#[test]
fn recompute_selective() {
    holds_what_was_planned(LARGER, &["recompute=selective"]);
}

#[test]
fn bf16_recompute_full_accumulation() {
    let settings =
        ["recompute=full", "mixed_precision=bf16", "gradient_accumulation_steps=2", "save_strategy=steps"];
    holds_what_was_planned(LARGER, &settings);
}

/// Formats of masters, gradients and optimizer states: each takes what is planned, and less than the one before.
#[test]
fn formats_of_states() {
    let bf16 = "mixed_precision=bf16";
    let lean = ["master_weights=none", "gradient_dtype=bf16", "optimizer_state_dtype=bf16"];
    let planned = [
        holds_what_was_planned(LARGER, &[bf16]),
        holds_what_was_planned(LARGER, &[bf16, "gradient_dtype=bf16"]),
        holds_what_was_planned(LARGER, &[&[bf16], &lean[..]].concat()),
        holds_what_was_planned(LARGER, &[&[bf16], &lean[..2], &["optim=adamw_8bit"]].concat()),
    ];
    assert!(planned.is_sorted_by(|more, less| less < more), "{planned:?}");
}

#[test]
fn from_a_model_folder() {
    let folder = Folder::new(LARGER);
    folder.succeeds(&["train", "run.yaml", "max_steps=0"]);
    let model = folder.path("out/model").display().to_string();
    let config = LARGER.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>();
    holds_what_was_planned(&format!("model_name_or_path: {model}\n{config}"), &[]);
}

/// Frozen weights in 4 bits: random ones, and those of a folder, which are quantised piece by piece.
#[test]
fn weights_in_4_bits() {
    let lora = ["use_peft=true", "lora_target_modules=all-linear", "load_in_4bit=true", "recompute=full"];
    let peak = |settings: &[&str]| holds_what_was_planned(LARGER, settings);
    let (plain, quantised) = (peak(&lora[..2]), peak(&lora));
    let (codes, weights) = (4.13 / 8.0, 4.0);
    // A block of the six exists dequantised.
    let saved = 4.5e6 * (weights - codes) - 0.76e6 * weights;
    assert!(plain as f64 - quantised as f64 > 0.5 * saved, "{plain} to {quantised}");
    let folder = Folder::new(LARGER);
    folder.succeeds(&["train", "run.yaml", "max_steps=0"]);
    let model = folder.path("out/model").display().to_string();
    let config = LARGER.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>();
    holds_what_was_planned(&format!("model_name_or_path: {model}\n{config}"), &lora);
}

/// Policy, reference, reward and value model, and the pages of the KV cache. The data has short prompts: no memory is
/// taken for the long ones that `max_prompt_length` allows.
#[test]
fn four_models_and_a_kv_cache() {
    let folder = Folder::new(LARGER);
    let prompts = (0..64).map(|i| format!("{{\"prompt\": \"{i} and {}\", \"answer\": \"{i}\"}}\n", i % 7));
    folder.write("data.jsonl", prompts.collect::<String>());
    folder.write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(4));
    let reward =
        ["algorithm=reward", "packing=none", "train_files=pairs.jsonl", "output_dir=reward", "max_steps=0"];
    folder.succeeds(&[&["train", "run.yaml"], &reward[..]].concat());
    let settings = ["packing=none", "recompute=full", "max_prompt_length=200", "max_completion_length=24"];
    let ppo = ["algorithm=ppo", "reward_model_path=reward/model", "per_device_train_batch_size=8"];
    let peak = holds_its_plan(&folder, &[&settings[..], &ppo].concat());
    folder.write("data.jsonl", format!("{{\"prompt\": \"{}\"}}\n", "0123456789".repeat(16)).repeat(32));
    let long = holds_its_plan(&folder, &[&settings[..], &ppo, &["overwrite_output_dir=true"]].concat());
    if cfg!(target_os = "linux") {
        assert!(peak + (16 << 20) < long, "{peak} of {long}");
    }
    let grpo = ["algorithm=grpo", "reward_funcs=[{regex: a}]", "num_generations=4", "beta=0.1"];
    let grpo = [&settings[..], &grpo, &["overwrite_output_dir=true"]].concat();
    holds_its_plan(&folder, &grpo);
    if cfg!(target_os = "linux") {
        let plan = folder.succeeds(&[&["plan", "run.yaml"], &grpo[..]].concat());
        assert!(plan.contains("KV cache"), "{plan}");
    }
}

/// The memory of every rank matches its plan, and zero3 on four ranks holds a quarter of the states.
#[test]
fn ranks_hold_what_was_planned() {
    let states = |settings: &[&str]| {
        holds_what_was_planned(LARGER, &[settings, &["threads=1", "recompute=full"]].concat())
    };
    let ranks = ["--nproc", "4"];
    let alone = states(&["per_device_train_batch_size=1"]);
    let ddp = states(&[&ranks[..], &["per_device_train_batch_size=1"]].concat());
    let zero3 =
        states(&[&ranks[..], &["per_device_train_batch_size=1", "strategy=zero3", "prefetch=0"]].concat());
    // 5.3 million parameters. their gradients and two moments in f32 are 80 MiB; three units in flight and what backward recomputes are 26.
    let all_states = 16.0 * 5_253_376.0;
    // One of the four ranks prepares the data, not always the largest.
    assert!(ddp as f64 >= alone as f64 * 0.99, "ddp holds all that one rank does: {ddp} of {alone}");
    let saved = ddp as f64 - zero3 as f64;
    assert!(saved > 0.5 * all_states, "zero3 on four ranks saves {saved} of {all_states}");
}

/// State that is offloaded to a disk is not in memory.
#[test]
fn offloaded_states_leave_memory() {
    let base = ["threads=1", "recompute=full", "per_device_train_batch_size=1"];
    let held = |settings: &[&str]| holds_what_was_planned(LARGER, &[&base[..], settings].concat());
    let (resident, host) = (held(&[]), held(&["offload_optimizer=cpu"]));
    let offloaded = held(&["offload_optimizer=nvme"]);
    let all = held(&["offload_optimizer=nvme", "offload_param=nvme", "strategy=zero3"]);
    let moments = 8.0 * 5_253_376.0;
    assert!(host >= resident, "the host's memory is memory too");
    assert!((resident as f64 - offloaded as f64) > 0.5 * moments, "{resident} to {offloaded}");
    assert!((offloaded as f64 - all as f64) > 0.1 * moments, "{offloaded} to {all}");
}
