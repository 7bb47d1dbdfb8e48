//! Compares generation with transformers, with scoring, and with itself in other batches.

use std::path::{Path, PathBuf};

use lockstep_device::Machine;
use lockstep_train::generate::{Completion, FinishReason, Generator, GeneratorSpec, SamplingParams};
use serde_json::Value;

const SPEC: GeneratorSpec =
    GeneratorSpec { storage: None, machine: Machine::cpu(2), slots: 2, capacity: 128, score_tokens: 128 };

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens")
}

/// A copy of a golden's model folder with 128 positions, the EOS token `end`, and a tokenizer.
fn folder(case: &str, end: Option<u32>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(goldens().join(case)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("config.json");
    let mut keys: Value = serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
    keys["max_position_embeddings"] = 128.into();
    keys["eos_token_id"] = end.into();
    std::fs::write(&config, keys.to_string()).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), "{}").unwrap();
    let tokenizer = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"b"}}"#;
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    dir
}

fn generate(
    generator: &mut Generator,
    prompts: &[Vec<u32>],
    new: usize,
    how: SamplingParams,
) -> Vec<Completion> {
    generator.generate(prompts, new, how, &mut |_| true).unwrap()
}

#[test]
fn greedy_tokens_match_transformers() {
    let text = std::fs::read_to_string(goldens().join("generate.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    assert!(cases.as_object().unwrap().len() >= 4);
    for (case, rows) in cases.as_object().unwrap() {
        let ids = |v: &Value| -> Vec<u32> {
            v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let dir = folder(case, None);
        let mut generator = Generator::open(dir.path(), None, &SPEC).unwrap();
        let rows = rows.as_array().unwrap();
        let prompts: Vec<Vec<u32>> = rows.iter().map(|row| ids(&row["prompt"])).collect();
        // Three prompts in two slots: the third begins when one of the others has ended.
        let ours = generate(&mut generator, &prompts, 64, SamplingParams::default());
        for (row, ours) in rows.iter().zip(&ours) {
            assert_eq!(ours.tokens, ids(&row["tokens"]), "{case}");
            assert_eq!(ours.end, FinishReason::Length);
        }
    }
}

#[test]
fn log_probs_equal_scoring_and_do_not_depend_on_the_batch() {
    let dir = folder("qwen3", None);
    let mut generator = Generator::open(dir.path(), None, &SPEC).unwrap();
    let prompts: Vec<Vec<u32>> =
        (0..7).map(|p| (0..3 + 5 * p).map(|i| (i * 7 + p) % 120).collect()).collect();
    let how = SamplingParams { temperature: 1.3, top_k: 40, top_p: 0.95, ..SamplingParams::default() };
    let batched = generate(&mut generator, &prompts, 30, how);
    for (prompt, completion) in prompts.iter().zip(&batched) {
        let whole: Vec<u32> = prompt.iter().chain(&completion.tokens).copied().collect();
        let scored = generator.score(&whole).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&scored[prompt.len() - 1..]), bits(&completion.log_probs));
    }
    let spec = GeneratorSpec { slots: 5, machine: Machine::cpu(1), ..SPEC };
    assert_eq!(generate(&mut Generator::open(dir.path(), None, &spec).unwrap(), &prompts, 30, how), batched);
    let other = generate(&mut generator, &prompts, 30, SamplingParams { seed: 43, ..how });
    assert_ne!(other, batched);
}

#[test]
fn finish_reasons_are_distinguished() {
    let dir = folder("llama-untied", None);
    let mut generator = Generator::open(dir.path(), None, &SPEC).unwrap();
    let prompts = [vec![5, 6, 7], vec![1]];
    let free = generate(&mut generator, &prompts, 20, SamplingParams::default());
    // Use the third token of the first completion as the EOS token.
    let end = free[0].tokens[2];
    let first = free[0].tokens.iter().position(|t| *t == end).unwrap();
    let dir = folder("llama-untied", Some(end));
    let mut generator = Generator::open(dir.path(), None, &SPEC).unwrap();
    let ended = generate(&mut generator, &prompts[..1], 20, SamplingParams::default());
    assert_eq!((ended[0].end, &ended[0].tokens[..]), (FinishReason::EndToken, &free[0].tokens[..first]));
    assert_eq!(ended[0].log_probs.len(), first + 1);
    let mut calls = 0;
    let mut stop_after_one = |_| {
        calls += 1;
        false
    };
    let stopped =
        generator.generate(&prompts[1..], 20, SamplingParams::default(), &mut stop_after_one).unwrap();
    assert_eq!((stopped[0].end, stopped[0].tokens.len(), calls), (FinishReason::Stopped, 1, 1));
    // The capacity of the KV cache also limits the length.
    let full = generate(&mut generator, &[vec![3; 120]], 1000, SamplingParams::default());
    assert!(full[0].end != FinishReason::Length || full[0].tokens.len() == 8);
    let error = generator.generate(&[vec![3; 128]], 1, SamplingParams::default(), &mut |_| true).unwrap_err();
    assert_eq!(
        error.to_string(),
        "prompt 0 has 128 tokens; the context has 128, and the reply needs at least one of them"
    );
}

#[test]
fn a_conversation_gives_the_same_replies_as_whole_prompts() {
    let dir = folder("llama-tied", None);
    let mut generator = Generator::open(dir.path(), None, &SPEC).unwrap();
    // Each prompt is the previous one, its reply and something new. The last one shares only its first tokens.
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    let mut replies: Vec<Vec<u32>> = Vec::new();
    let mut turn = |reply: &[u32]| {
        if !prompts.is_empty() {
            replies.push(reply.to_vec());
        }
        let prompt = match prompts.len() {
            0 => vec![4, 5, 6],
            1 | 2 => [&prompts[prompts.len() - 1][..], reply, &[9, 8, 7]].concat(),
            3 => vec![4, 5, 9],
            _ => return None,
        };
        prompts.push(prompt.clone());
        Some(prompt)
    };
    generator.converse(10, SamplingParams::default(), &mut turn, &mut |_| true).unwrap();
    assert_eq!((prompts.len(), replies.len()), (4, 4));
    let alone = generate(&mut generator, &prompts, 10, SamplingParams::default());
    for (reply, alone) in replies.iter().zip(alone) {
        assert_eq!(*reply, alone.tokens);
    }
}
