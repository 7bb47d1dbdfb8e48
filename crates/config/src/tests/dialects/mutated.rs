//! Real files and command lines with random damage: no panic, no control characters in errors, and little time.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use super::guide_configs::{DISTRIBUTED, DS_CONFIG, FSDP_YAML, USE_FSDP, ZERO1, zero3};
use super::hostile::check;
use super::words;
use crate::{Inputs, convert, launch_settings, load_inputs, referenced_files, translate_launch_line};
use crate::{MAX_TEXT_BYTES, Purpose};

/// Far more than any text needs, and far less than anybody waits.
const LONG: Duration = Duration::from_secs(60);

const OURS: &str = "\
model: {architectures: [LlamaForCausalLM], hidden_size: 32, num_hidden_layers: 2}
algorithm: grpo
train_files: [a.jsonl, 'b c.parquet']
reward_funcs: [numeric_match, {regex: {pattern: '^[0-9]+$'}}]
fp16: {enabled: true, loss_scale: 0}
offload_optimizer: {device: cpu, ratio: 0.7}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
base: &base {a: 1}
columns: {prompt: question}
training:
  learning_rate: 2e-5
  warmup_ratio: 0.03
output_dir: \"out\"
";

const ACCELERATE: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 8
same_network: true
";

const LINES: [&str; 5] = [
    "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=192.168.1.100 train.py --config run.yaml",
    "deepspeed --num_gpus=4 --module training.run_clm --model_name_or_path /path/to/llama-7b --deepspeed ds.json",
    "NCCL_DEBUG=INFO accelerate launch --config_file acc.yaml --num_processes 4 train.py --bf16 --lr 1e-4",
    "python -m torch.distributed.launch --nproc_per_node=4 main.py --algorithm sft --learning_rate 1e-5",
    "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --num_generations 8 --fsdp 'full_shard auto_wrap'",
];

/// Pieces that are put into texts.
const PIECES: [&str; 24] = [
    ": ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "'",
    "\n",
    "\t",
    "#",
    "&a ",
    "*a",
    "!!binary ",
    "|",
    ">",
    "? ",
    "---\n",
    "\u{0}",
    "\u{1b}[31m",
    "\u{feff}",
    "1e999",
    "99999999999999999999",
    "null",
];

/// One change of a text.
#[derive(Clone, Debug)]
enum Damage {
    Remove(Index, Index),
    Repeat(Index, Index),
    Insert(Index, &'static str),
    Replace(Index, char),
    Cut(Index),
    SwapLines(Index, Index),
}

impl Damage {
    fn apply(&self, text: &str) -> String {
        let chars: Vec<char> = text.chars().collect();
        let at = |index: &Index| index.index(chars.len() + 1);
        let joined = |parts: [&[char]; 3]| parts.concat().into_iter().collect::<String>();
        match self {
            Damage::Remove(a, b) => {
                let (start, end) = (at(a).min(at(b)), at(a).max(at(b)));
                joined([&chars[..start], &[], &chars[end..]])
            }
            Damage::Repeat(a, b) => {
                let (start, end) = (at(a).min(at(b)), at(a).max(at(b)));
                joined([&chars[..end], &chars[start..end], &chars[end..]])
            }
            Damage::Insert(index, piece) => {
                let piece: Vec<char> = piece.chars().collect();
                joined([&chars[..at(index)], &piece, &chars[at(index)..]])
            }
            Damage::Replace(index, c) => {
                let mut chars = chars.clone();
                let last = at(index).min(chars.len().saturating_sub(1));
                if let Some(slot) = chars.get_mut(last) {
                    *slot = *c;
                }
                chars.into_iter().collect()
            }
            Damage::Cut(index) => joined([&chars[..at(index)], &[], &[]]),
            Damage::SwapLines(a, b) => {
                let mut lines: Vec<&str> = text.lines().collect();
                if !lines.is_empty() {
                    let (a, b) = (a.index(lines.len()), b.index(lines.len()));
                    lines.swap(a, b);
                }
                lines.join("\n")
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<Index>;
    prop_oneof![
        (index(), index()).prop_map(|(a, b)| Damage::Remove(a, b)),
        (index(), index()).prop_map(|(a, b)| Damage::Repeat(a, b)),
        (index(), prop::sample::select(PIECES.to_vec())).prop_map(|(a, piece)| Damage::Insert(a, piece)),
        (index(), any::<char>()).prop_map(|(a, c)| Damage::Replace(a, c)),
        index().prop_map(Damage::Cut),
        (index(), index()).prop_map(|(a, b)| Damage::SwapLines(a, b)),
    ]
}

fn damaged(text: &str, damages: &[Damage]) -> String {
    damages.iter().fold(text.to_owned(), |text, damage| damage.apply(&text))
}

/// Fails if the work takes long.
fn quickly<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    assert!(start.elapsed() < LONG, "{what} took {:?}", start.elapsed());
    result
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn files(
        idx in 0..8usize,
        damages in prop::collection::vec(damage(), 1..4),
        other in prop::option::of(prop::collection::vec(damage(), 0..2)),
    ) {
        let zero3 = zero3();
        let samples = [OURS, ACCELERATE, ZERO1, DS_CONFIG, &zero3, FSDP_YAML, USE_FSDP, DISTRIBUTED];
        let text = damaged(samples[idx], &damages);
        quickly(&text, || match &other {
            // A second file of another dialect, which may contradict the first.
            Some(damages) => {
                let second = damaged(samples[(idx + 2) % samples.len()], damages);
                check(&[("run.yaml", &text), ("ds.json", &second)], "");
            }
            None => check(&[("run.yaml", &text)], ""),
        });
    }

    #[test]
    fn launch_lines(idx in 0..LINES.len(), damages in prop::collection::vec(damage(), 1..4)) {
        let line = words(&damaged(LINES[idx], &damages));
        quickly(&line.join(" "), || {
            if let Ok(line) = translate_launch_line(&line) {
                let inputs = Inputs { launch_line: Some(&line), ..Inputs::default() };
                drop(convert(&inputs));
                drop(load_inputs(Purpose::Plan, &inputs));
                launch_settings(&inputs);
                referenced_files(&inputs);
            }
        });
    }
}

/// Texts as large as allowed, made of one piece.
#[test]
fn one_piece_without_end() {
    for start in ["", "steps_per_print: 1\n", "x: {"] {
        for piece in PIECES.iter().copied().chain([
            "a: {",
            "[[",
            "- - ",
            "a: &a b\n",
            "x: *a\n",
            "\"\\u0000\" ",
            "# \n",
            "a: 1, ",
        ]) {
            let count = (MAX_TEXT_BYTES - start.len()) / piece.len();
            let text = format!("{start}{}", piece.repeat(count));
            quickly(piece, || check(&[("run.yaml", &text)], ""));
        }
    }
}
