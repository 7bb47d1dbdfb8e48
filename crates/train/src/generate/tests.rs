//! Completions do not depend on what shares a batch, a page or a prompt with them: in a simulated KV cache for many
//! random cases, and in an engine.

use lockstep_core::DType;
use lockstep_device::Machine;
use lockstep_engine::{DecodeDriver, Engine, MicroBatch};
use lockstep_plan::{BatchBounds, GenerationBounds, KvPage, ModelId};
use lockstep_shape::ModelShape;
use proptest::prelude::*;

use super::batch::{Batcher, DecodeBounds};
use super::sample::{Sampler, SamplingParams};
use super::{Completion, DecodeLimits, FinishReason, GenerateRequest, generate_on};
use crate::inference::{Inference, Slots};

const HOW: SamplingParams =
    SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 5 };

/// Logits that depend on every token so far.
fn logits(history: &[u32]) -> Vec<f32> {
    let mut state = history.iter().fold(17u64, |state, token| {
        (state ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    });
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1 << 22) as f32
    };
    (0..9).map(|_| next()).collect()
}

/// The completion of a prompt without any cache.
fn expected(prompt: &[u32], sample: u32, limits: &DecodeLimits, capacity: usize) -> Completion {
    let (mut sampler, mut tokens, mut log_probs) = (Sampler::new(HOW), prompt.to_vec(), vec![]);
    let (end, end_token) = loop {
        let logits = logits(&tokens);
        let token = sampler.sample(&logits, &tokens, sample);
        tokens.push(token);
        log_probs.push(logits[token as usize]);
        if limits.end_ids.contains(&token) {
            break (FinishReason::EndToken, tokens.pop());
        }
        if log_probs.len() >= limits.max_new_tokens || tokens.len() >= capacity {
            break (FinishReason::Length, None);
        }
    };
    Completion { tokens: tokens.split_off(prompt.len()), log_probs, end, end_token }
}

/// Runs a driver with a KV cache that stores tokens, and returns how many tokens were computed.
fn simulate(driver: &mut Batcher, bounds: DecodeBounds) -> usize {
    let GenerationBounds { docs, pages, page_tokens, .. } = bounds.generation;
    let table_len = bounds.generation.pages_per_doc();
    let mut cache = vec![vec![u32::MAX; page_tokens]; pages];
    let mut computed = 0;
    while let Some(batch) = driver.next_batch() {
        assert!(batch.cu_seqlens.len() <= docs + 1 && batch.tokens.len() <= bounds.pass_tokens);
        assert!(!batch.tokens.is_empty(), "every pass computes something");
        for (from, to) in batch.page_copies {
            cache[*to as usize] = cache[*from as usize].clone();
        }
        computed += batch.tokens.len();
        let rows: Vec<_> =
            batch.cu_seqlens.windows(2).map(|rows| rows[0] as usize..rows[1] as usize).collect();
        let tables: Vec<&[u32]> = batch.page_tables.chunks(table_len).collect();
        for (rows, table) in rows.iter().zip(&tables) {
            for row in rows.clone() {
                let position = batch.positions[row] as usize;
                cache[table[position / page_tokens] as usize][position % page_tokens] = batch.tokens[row];
            }
        }
        // Read after all have written, as if they had run in any order.
        let all: Vec<Vec<f32>> = rows
            .iter()
            .zip(&tables)
            .map(|(rows, table)| {
                let len = batch.positions[rows.end - 1] as usize + 1;
                let token = |i: usize| cache[table[i / page_tokens] as usize][i % page_tokens];
                logits(&(0..len).map(token).collect::<Vec<_>>())
            })
            .collect();
        let log_probs: Vec<f32> =
            all.iter().enumerate().map(|(doc, logits)| logits[driver.sample(doc, logits) as usize]).collect();
        driver.sampled(&log_probs);
    }
    computed
}

proptest! {
    #[test]
    fn completions_do_not_depend_on_batches_pages_and_sharing(
        groups in prop::collection::vec((1usize..200, 0usize..6), 0..6),
        docs in 1usize..7, extra_pages in 0usize..20, pass_tokens in 1usize..300,
        max_new_tokens in 1usize..120, ends in any::<bool>(), capacity in 200usize..260,
    ) {
        let page = KvPage { tokens: 64, elems: 1 };
        let generation = GenerationBounds::of_docs(docs, capacity, page);
        let generation = generation.with_pages(generation.pages_per_doc() + extra_pages, page);
        let bounds = DecodeBounds { pass_tokens, generation };
        let limits = DecodeLimits { max_new_tokens, end_ids: if ends { vec![0] } else { vec![] } };
        let prompts: Vec<Vec<u32>> =
            groups.iter().zip(0..).map(|((len, _), p)| (0..*len as u32).map(|i| (i * 7 + p) % 9).collect()).collect();
        let requests: Vec<GenerateRequest> = prompts
            .iter()
            .zip(&groups)
            .zip(0..)
            .map(|((prompt, (_, completions)), i)| GenerateRequest { prompt, completions: *completions, first_sample: 100 * i })
            .collect();
        let mut on_token = |_| true;
        let mut driver = Batcher::new(&requests, bounds, limits.clone(), HOW, &mut on_token);
        let computed = simulate(&mut driver, bounds);
        prop_assert_eq!(driver.num_free_pages(), generation.pages, "pages that are still in use");
        let all = driver.finish();
        let mut most = 0;
        for (request, completions) in requests.iter().zip(&all) {
            prop_assert_eq!(completions.len(), request.completions);
            most += if completions.is_empty() { 0 } else { request.prompt.len() - 1 };
            for (completion, sample) in completions.iter().zip(request.first_sample..) {
                prop_assert_eq!(completion, &expected(request.prompt, sample, &limits, capacity));
                most += completion.log_probs.len();
            }
        }
        prop_assert_eq!(computed, most, "every prompt is computed once");
    }
}

/// An engine with random weights, for sequences of at most 200 tokens.
fn engine(docs: usize, pages: Option<usize>, pass_tokens: usize) -> Engine {
    let inference = Inference {
        shape: &ModelShape { layers: 2, ..ModelShape::named("tiny", 101).unwrap() },
        storage: DType::F32,
        bounds: BatchBounds { tokens: pass_tokens, docs: 8, max_doc: 256, shares_rows: false },
        machine: Machine::cpu(2),
        scores: true,
        slots: Some(Slots { docs, capacity: 200, pages }),
    };
    let mut engine = inference.engine().unwrap();
    engine.model_mut(ModelId::FIRST).initialise(7).unwrap();
    engine
}

fn score(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let len = tokens.len() - 1;
    let positions: Vec<u32> = (0..len as u32).collect();
    let batch = MicroBatch {
        tokens: &tokens[..len],
        targets: &tokens[1..],
        positions: &positions,
        cu_seqlens: &[0, len as u32],
        samples: &[],
        weights: &[],
        shared: &[],
    };
    let mut all = Vec::new();
    let mut keep = |outputs: lockstep_engine::Outputs<'_>| all.extend_from_slice(outputs.log_probs());
    engine.model_mut(ModelId::FIRST).score(batch, &mut keep).unwrap();
    all
}

/// With shared prompts, without, with many pages and with few: the same tokens and the bits of scoring.
#[test]
fn groups_have_the_bits_of_single_prompts_and_of_scoring() {
    let limits = DecodeLimits { max_new_tokens: 40, end_ids: vec![3] };
    let prompts: Vec<Vec<u32>> =
        [1, 2, 65, 100, 130].iter().map(|len| (0..*len).map(|i| (i * 11 + len) % 101).collect()).collect();
    let run = |engine: &mut Engine, shares: bool| {
        let (count, completions) = if shares { (1, 4) } else { (4, 1) };
        let requests: Vec<GenerateRequest> = prompts
            .iter()
            .zip(0..)
            .flat_map(|(prompt, p)| (0..count).map(move |i| (prompt, 10 * p + i)))
            .map(|(prompt, first_sample)| GenerateRequest { prompt, completions, first_sample })
            .collect();
        let mut on_token = |_| true;
        let all = generate_on(engine, ModelId::FIRST, &requests, limits.clone(), HOW, &mut on_token).unwrap();
        all.into_iter().flatten().collect::<Vec<Completion>>()
    };
    let mut alone = engine(1, None, 256);
    let expected = run(&mut alone, false);
    assert!(expected.iter().any(|one| one.end == FinishReason::EndToken));
    assert!(expected[1] != expected[2], "completions of a prompt differ");
    for (completion, prompt) in expected.iter().zip(prompts.iter().flat_map(|prompt| [prompt; 4])) {
        let mut whole: Vec<u32> = prompt.iter().chain(&completion.tokens).copied().collect();
        whole.extend((completion.end == FinishReason::EndToken).then_some(3));
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&score(&mut alone, &whole)[prompt.len() - 1..]), bits(&completion.log_probs));
    }
    for (docs, pages, pass_tokens) in [(1, None, 256), (3, Some(4), 256), (8, Some(9), 256), (20, None, 512)]
    {
        let mut engine = engine(docs, pages, pass_tokens);
        assert!(run(&mut engine, true) == expected, "{docs} sequences, {pages:?} pages, shared prompts");
        assert!(run(&mut engine, false) == expected, "{docs} sequences, {pages:?} pages");
    }
}
