//! `recipe` and `init`: every configuration that they write loads and plans, and no file is replaced without `--force`.

use std::fs;

use lockstep_testkit::HubStandIn;

use crate::support::{Folder, Ran};

/// As many positions as the recipes need.
const MODEL: &str = "\
model: {architectures: [Qwen3ForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
num_key_value_heads: 2, head_dim: 16, intermediate_size: 64, max_position_embeddings: 2048}
max_steps: 0
";

/// The shape of LLaMA-7B.
const LLAMA_7B: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
"rms_norm_eps": 1e-6, "vocab_size": 32000, "hidden_act": "silu", "tie_word_embeddings": false}"#;

/// A folder, and a Hub with the models that recipes name. It has no data sets: planning reads no data.
struct Starter {
    folder: Folder,
    hub: HubStandIn,
}

impl Starter {
    fn new() -> Starter {
        let folder = Folder::new(&format!("{MODEL}output_dir: made\ntrain_files: data.jsonl\n"));
        folder.succeeds(&["train", "run.yaml"]);
        folder.write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n");
        folder.succeeds(&["reward", "run.yaml", "train_files=pairs.jsonl", "output_dir=reward"]);
        let hub = HubStandIn::start();
        hub.add_model_folder("Qwen/Qwen3-0.6B", &folder.path("made/model"));
        hub.add_model_folder("Skywork/Skywork-Reward-V2-Qwen3-0.6B", &folder.path("reward/model"));
        let tokenizer = fs::read(folder.path("made/model/tokenizer.json")).unwrap();
        let files: [(&str, &[u8]); 2] =
            [("config.json", LLAMA_7B.as_bytes()), ("tokenizer.json", tokenizer.as_slice())];
        hub.add_model("huggyllama/llama-7b", &files);
        fs::remove_file(folder.path("run.yaml")).unwrap();
        Starter { folder, hub }
    }

    fn plan(&self, file: &str) -> String {
        let mut command = self.folder.command(&["plan", file]);
        command.env_remove("HF_HUB_OFFLINE").env("CUDA_VISIBLE_DEVICES", "");
        command.env("HF_ENDPOINT", self.hub.endpoint()).env("HF_HOME", self.folder.path("hf"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{file}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The names that `recipe ls` prints.
fn names(folder: &Folder) -> Vec<String> {
    let text = folder.succeeds(&["recipe", "ls"]);
    let lines = text.lines().take_while(|line| !line.is_empty());
    lines.map(|line| line.split_once("  ").unwrap().0.to_owned()).collect()
}

#[test]
fn every_recipe_plans() {
    let starter = Starter::new();
    let names = names(&starter.folder);
    assert!(names.len() >= 11, "{names:?}");
    for name in &names {
        starter.folder.succeeds(&["recipe", "cp", name]);
        let file = format!("{name}.yaml");
        assert_eq!(starter.folder.read(&file), starter.folder.succeeds(&["recipe", "show", name]));
        let plan = starter.plan(&file);
        assert!(plan.contains("bytes per rank"), "{name}: {plan}");
        let words: &[&str] = match name.as_str() {
            "90m" => &["85.35 M parameters", "ranks     4"],
            "300m" => &["M parameters", "ranks     4"],
            "llama-7b" => &["6.74 B parameters", "ranks     4"],
            "llama-7b-fsdp" => &["6.74 B parameters", "ranks     8"],
            "ppo" => &["policy", "reference", "reward", "value"],
            _ => &["policy"],
        };
        assert!(words.iter().all(|word| plan.contains(word)), "{name}: {plan}");
    }
}

#[test]
fn a_recipe_replaces_no_file() {
    let folder = Folder::new("");
    folder.write("sft.yaml", "mine");
    let error = folder.refused(&["recipe", "cp", "sft"], 73);
    assert!(error.contains("sft.yaml already exists"), "{error}");
    folder.succeeds(&["recipe", "cp", "sft", "other.yaml"]);
    fs::create_dir(folder.path("configs")).unwrap();
    folder.succeeds(&["recipe", "cp", "dpo", "configs"]);
    assert!(folder.read("configs/dpo.yaml").contains("algorithm: dpo"));
    folder.succeeds(&["recipe", "cp", "sft", "--force"]);
    assert_eq!(folder.read("sft.yaml"), folder.read("other.yaml"));
    let error = folder.refused(&["recipe", "show", "ddpo"], 64);
    assert!(error.contains("did you mean `dpo`?"), "{error}");
}

/// Every algorithm with the default answers, and with a model to train from scratch on files.
#[test]
fn init_writes_files_that_plan() {
    let starter = Starter::new();
    let folder = &starter.folder;
    for algorithm in ["sft", "clm", "reward", "dpo", "ppo", "grpo", "rloo"] {
        let file = format!("{algorithm}.yaml");
        let text = folder.succeeds(&["init", &file, "--yes", "--algorithm", algorithm]);
        assert!(text.contains(&format!("wrote {file}")), "{text}");
        starter.plan(&file);
        let reward = if algorithm == "ppo" { "reward/model" } else { "exact_match,format" };
        let line =
            ["init", &file, "--force", "--algorithm", algorithm, "--model", "tiny", "--data", "rows.jsonl"];
        let rest = ["--reward", reward, "--nproc", "2", "--output-dir", "out: 1"];
        folder.succeeds(&[&line[..], &rest].concat());
        let plan = starter.plan(&file);
        assert!(plan.contains("ranks     2"), "{algorithm}: {plan}");
    }
    // What it writes also trains.
    let line = ["init", "run.yaml", "--yes", "--model", "made/model", "--data", "data.jsonl", "--nproc", "1"];
    folder.succeeds(&line);
    folder.succeeds(&["train", "run.yaml", "max_steps=1"]);
}

#[test]
fn init_asks_nobody_without_a_terminal() {
    let folder = Folder::new("");
    let error = folder.refused(&["init", "new.yaml", "--model", "tiny"], 64);
    assert!(error.contains("--algorithm, --data, --nproc, --output-dir"), "{error}");
    let error = folder.refused(&["init", "--yes"], 73);
    assert!(error.contains("run.yaml already exists") && error.contains("--force"), "{error}");
    let Ran { code, stderr, .. } = folder.run(&["init", "new.yaml", "--yes", "--model", "tinny"]);
    assert_eq!(code, Some(64), "{stderr}");
    assert!(stderr.contains("--model tinny: expected a Hub name"), "{stderr}");
    assert!(!folder.path("new.yaml").exists());
}

/// The file that a user gets who accepts everything on a machine without a GPU.
#[test]
fn the_file_of_init() {
    let folder = Folder::new("");
    let mut command = folder.command(&["init", "new.yaml", "--yes", "--algorithm", "grpo"]);
    assert!(command.env("CUDA_VISIBLE_DEVICES", "").status().unwrap().success());
    let text = folder.read("new.yaml");
    let is_machine = |line: &&str| line.starts_with("# Written by");
    let found = text.lines().find(is_machine).unwrap();
    insta::assert_snapshot!("init_grpo", text.replace(found, "# Written by `lockstep init` on [machine]"));
}
