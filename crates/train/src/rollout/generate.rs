//! Completes prompts with the policy.

use lockstep_config::{RunConfig, SamplingConfig};
use lockstep_data::Tokenizer;
use lockstep_engine::Engine;
use lockstep_model::KernelBackend;
use lockstep_plan::{ModelId, WantedGeneration, storage};
use lockstep_shape::ModelShape;

use super::prompts::{Prompt, PromptShare, Share};
use super::schedule::RolloutSchedule;
use super::sequence::Sequence;
use crate::error::TrainError;
use crate::generate::{
    Completion, DecodeLimits, FinishReason, GenerateRequest, GenerationConfig, SamplingParams, generate_on,
};
use crate::inference::kv_page;
use crate::models::RunModels;
use crate::setup::device_memory;

/// The sequences that the policy would generate at once, for the plan: all of the rank's.
pub(crate) fn wanted_generation(
    config: &RunConfig,
    shape: &ModelShape,
    kernels: KernelBackend,
) -> WantedGeneration {
    let schedule = RolloutSchedule::of(config);
    let world = config.plan.world_size() as usize;
    let storage = storage(config.precision, device_memory(kernels));
    WantedGeneration {
        docs: Share::of(schedule.sequences, 0, world).largest,
        tokens_per_doc: config.data.max_length as usize,
        page: kv_page(shape, storage, kernels),
    }
}

/// How completions are sampled: the settings of Hugging Face's `generate`.
pub(crate) fn sampling_params(sampling: &SamplingConfig, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: sampling.temperature as f32,
        top_k: sampling.top_k as usize,
        top_p: sampling.top_p as f32,
        min_p: sampling.min_p as f32,
        repetition_penalty: sampling.repetition_penalty as f32,
        seed,
    }
}

/// How the policy samples completions.
pub(crate) struct PolicySampler {
    sampling: SamplingConfig,
    /// Tokens that end a completion.
    end_ids: Vec<u32>,
}

impl PolicySampler {
    pub(crate) fn new(
        config: &RunConfig,
        models: &RunModels,
        tokenizer: &Tokenizer,
    ) -> Result<PolicySampler, TrainError> {
        let sampling = *config.algorithm.sampling().expect("an algorithm with rollouts samples");
        let policy = models.policy();
        let generation = match &policy.folder {
            Some(folder) => GenerationConfig::read(folder)?,
            None => GenerationConfig::default(),
        };
        let end_ids = generation.end_ids(&policy.shape, tokenizer);
        Ok(PolicySampler { sampling, end_ids })
    }
}

/// Generates the completions of all prompts. Sampling depends on the seed and the number of a completion. A collective
/// call.
pub(crate) fn complete(
    engine: &mut Engine,
    sampler: &PolicySampler,
    prompts: &[PromptShare],
    seed: u64,
) -> Result<Vec<Sequence>, TrainError> {
    let requests: Vec<GenerateRequest<'_>> = prompts
        .iter()
        .map(|part| GenerateRequest {
            prompt: &part.prompt.tokens,
            completions: part.completions,
            first_sample: part.first_sample,
        })
        .collect();
    let limits = DecodeLimits {
        max_new_tokens: sampler.sampling.max_completion_length as usize,
        end_ids: sampler.end_ids.clone(),
    };
    let params = sampling_params(&sampler.sampling, seed);
    let completions = generate_on(engine, ModelId::FIRST, &requests, limits, params, &mut |_| true)?;
    let sequences = prompts.iter().zip(completions).flat_map(|(part, completions)| {
        completions.into_iter().map(move |completion| sequence(&part.prompt, completion))
    });
    Ok(sequences.collect())
}

fn sequence(prompt: &Prompt, completion: Completion) -> Sequence {
    let mut tokens = prompt.tokens.clone();
    tokens.extend(&completion.tokens);
    tokens.extend(completion.end_token);
    Sequence {
        prompt: prompt.row,
        prompt_len: prompt.tokens.len() as u32,
        tokens,
        truncated: completion.end != FinishReason::EndToken,
        log_probs: completion.log_probs,
        ..Sequence::default()
    }
}
