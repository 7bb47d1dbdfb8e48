//! Generates text with the engine that trains the model.
//!
//! A [`Generator`] has a plan with a generate phase and a score phase, its memory, and the weights of a model folder.
//! Sequences are decoded with a KV cache in pages, which completions of the same prompt share. Log-probabilities are
//! bit-identical to those of training. Rollouts use the engine of a training run in the same way ([`generate_on`]).

mod batch;
mod dialogue;
mod pages;
mod request;
mod sample;
#[cfg(test)]
mod tests;
mod text;

use std::path::Path;
use std::sync::Arc;

use lockstep_ckpt::{AdapterFolder, ModelFolder};
use lockstep_core::{Bytes, DType};
use lockstep_data::{Tokenizer, TokenizerSource};
use lockstep_device::Machine;
use lockstep_engine::{Engine, MicroBatch};
use lockstep_plan::{BatchBounds, ModelId};
use lockstep_shape::ModelShape;
use serde_json::Value;

use crate::adapter;
use crate::error::TrainError;
use crate::inference::{Inference, Slots};
use crate::save;

pub use dialogue::NextTurn;
pub use request::{Completion, DecodeLimits, FinishReason, GenerateRequest, SampledToken, TokenCallback};
pub use sample::SamplingParams;
pub use text::{StopStrings, TextStream};

use batch::{Batcher, DecodeBounds};
use dialogue::Dialogue;

/// New tokens in one pass: enough for efficient matmuls, and few enough to need little memory.
const PASS_TOKENS: usize = 512;

/// The size and device of a generator.
#[derive(Clone, Copy, Debug)]
pub struct GeneratorSpec {
    /// The data type of weights and activations; `None`: that of the folder's weights.
    pub storage: Option<DType>,
    pub machine: Machine,
    /// The number of concurrent sequences.
    pub slots: usize,
    /// The most tokens of a sequence, including its prompt. Limited by the model's positions.
    pub capacity: usize,
    /// The most tokens that are scored at once; 0 if scoring is not needed.
    pub score_tokens: usize,
}

/// A model folder, ready to generate and to score.
pub struct Generator {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    shape: ModelShape,
    capacity: usize,
    end_ids: Vec<u32>,
    defaults: SamplingParams,
}

impl Generator {
    /// Opens a model folder, or the output folder of a run that contains one, with an adapter if there is one. If `path`
    /// itself is an adapter, its model is used.
    pub fn open(path: &Path, adapter: Option<&Path>, spec: &GeneratorSpec) -> Result<Generator, TrainError> {
        let (path, adapter) = &adapter::model_and_adapter(path, adapter)?;
        let folder = ModelFolder::open(path)?;
        let origin = path.join("config.json").display().to_string();
        let mut shape = ModelShape::from_hf_text(folder.config_json(), &origin)?;
        save::check_weights(&folder, &shape)?;
        if let Some(adapter) = adapter {
            shape.lora = Some(adapter::of_folder(&AdapterFolder::open(adapter)?, &shape)?);
        }
        let tokenizer = Arc::new(Tokenizer::load(&TokenizerSource::File(path.into()))?);
        if tokenizer.vocab_size() > shape.vocab {
            let (tokenizer, vocab) = (tokenizer.vocab_size(), shape.vocab);
            return Err(TrainError::VocabularyTooSmall { tokenizer, vocab });
        }
        let stored = folder.weights_dtype().unwrap_or(DType::F32);
        let capacity = spec.capacity.min(shape.max_positions);
        let tokens = PASS_TOKENS.max(spec.slots).max(spec.score_tokens).next_multiple_of(256);
        let inference = Inference {
            shape: &shape,
            storage: spec.storage.unwrap_or(stored),
            bounds: BatchBounds { tokens, docs: tokens, max_doc: tokens, shares_rows: false },
            machine: spec.machine,
            scores: spec.score_tokens > 0,
            slots: Some(Slots { docs: spec.slots, capacity, pages: None }),
        };
        let mut engine = inference.engine()?;
        save::load_weights(&mut engine, ModelId::FIRST, &folder, 0)?;
        if let Some(adapter) = adapter {
            adapter::load(&mut engine, ModelId::FIRST, adapter)?;
        }
        let config = GenerationConfig::read(path)?;
        let end_ids = config.end_ids(&shape, &tokenizer);
        let defaults = config.sampling();
        Ok(Generator { engine, tokenizer, shape, capacity, end_ids, defaults })
    }

    /// A shared handle, so that a callback can decode tokens while the generator runs.
    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The memory of weights, KV cache and activations.
    pub fn memory(&self) -> Bytes {
        self.engine.arena_bytes()
    }

    /// The most tokens of a sequence, including its prompt.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The sampling parameters of `generation_config.json`; greedy decoding by default.
    pub fn default_sampling(&self) -> SamplingParams {
        self.defaults
    }

    fn limits(&self, max_new_tokens: usize) -> DecodeLimits {
        DecodeLimits { max_new_tokens, end_ids: self.end_ids.clone() }
    }

    /// Generates the completion of every prompt. `on_token` is called with each token as it is generated.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        sampling: SamplingParams,
        on_token: &mut TokenCallback<'_>,
    ) -> Result<Vec<Completion>, TrainError> {
        let request = |(prompt, first_sample)| GenerateRequest { prompt, completions: 1, first_sample };
        let requests: Vec<GenerateRequest> =
            prompts.iter().map(Vec::as_slice).zip(0..).map(request).collect();
        Ok(self
            .generate_groups(&requests, max_new_tokens, sampling, on_token)?
            .into_iter()
            .flatten()
            .collect())
    }

    /// Generates several completions of each prompt, which is computed once.
    pub fn generate_groups(
        &mut self,
        requests: &[GenerateRequest<'_>],
        max_new_tokens: usize,
        sampling: SamplingParams,
        on_token: &mut TokenCallback<'_>,
    ) -> Result<Vec<Vec<Completion>>, TrainError> {
        let limits = self.limits(max_new_tokens);
        generate_on(&mut self.engine, ModelId::FIRST, requests, limits, sampling, on_token)
    }

    /// Runs a conversation: `turn` gets the last reply and returns the whole next prompt, of which only the new tokens
    /// are computed. If a prompt is empty or does not fit, `turn` is called again.
    pub fn converse<'a>(
        &mut self,
        max_new_tokens: usize,
        sampling: SamplingParams,
        turn: &'a mut NextTurn<'a>,
        on_token: &'a mut TokenCallback<'a>,
    ) -> Result<(), TrainError> {
        let bounds = DecodeBounds::of(self.engine.model(ModelId::FIRST).plan());
        let mut dialogue = Dialogue::new(bounds, self.limits(max_new_tokens), sampling, turn, on_token);
        Ok(self.engine.model_mut(ModelId::FIRST).generate(&mut dialogue)?)
    }

    /// The log-probability of every token of a sequence after the first.
    pub fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, TrainError> {
        let len = tokens.len().saturating_sub(1);
        let positions: Vec<u32> = (0..len as u32).collect();
        let mut all = Vec::new();
        let batch = MicroBatch {
            tokens: &tokens[..len],
            targets: tokens.get(1..).unwrap_or_default(),
            positions: &positions,
            cu_seqlens: &[0, len as u32],
            samples: &[],
            weights: &[],
            shared: &[],
        };
        self.engine
            .model_mut(ModelId::FIRST)
            .score(batch, &mut |outputs| all.extend_from_slice(outputs.log_probs()))?;
        Ok(all)
    }
}

/// Generates the completions of all requests with a model of an engine, which must have a generate phase. The plan
/// decides how many sequences run at once; results do not depend on it. If parameters are sharded, all ranks must call
/// this, each with its own requests, which may be none.
pub(crate) fn generate_on(
    engine: &mut Engine,
    model: ModelId,
    requests: &[GenerateRequest<'_>],
    limits: DecodeLimits,
    sampling: SamplingParams,
    on_token: &mut TokenCallback<'_>,
) -> Result<Vec<Vec<Completion>>, TrainError> {
    let bounds = DecodeBounds::of(engine.model(model).plan());
    let capacity = bounds.capacity();
    for (index, GenerateRequest { prompt, .. }) in requests.iter().enumerate() {
        if prompt.is_empty() || prompt.len() >= capacity {
            return Err(TrainError::Prompt { index, tokens: prompt.len(), capacity });
        }
    }
    let mut batcher = Batcher::new(requests, bounds, limits, sampling, on_token);
    engine.model_mut(model).generate(&mut batcher)?;
    Ok(batcher.finish())
}

/// The supported keys of `generation_config.json`. A file that is not JSON is treated as empty.
#[derive(Default)]
pub(crate) struct GenerationConfig(Value);

impl GenerationConfig {
    pub(crate) fn read(folder: &Path) -> Result<GenerationConfig, TrainError> {
        let text = ModelFolder::read_generation_config(folder)?.unwrap_or_default();
        Ok(GenerationConfig(serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// `eos_token_id`, which is one id or a list; otherwise the EOS id of the model or its tokenizer.
    pub(crate) fn end_ids(&self, shape: &ModelShape, tokenizer: &Tokenizer) -> Vec<u32> {
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let given: Vec<u32> = match self.0.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(one) => id(one).into_iter().collect(),
            None => vec![],
        };
        if given.is_empty() { shape.eos_id.or(tokenizer.eos_id()).into_iter().collect() } else { given }
    }

    fn sampling(&self) -> SamplingParams {
        let greedy = SamplingParams::default();
        if self.0.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return greedy;
        }
        let number = |key: &str, default: f32| {
            self.0.get(key).and_then(Value::as_f64).map_or(default, |value| value as f32)
        };
        SamplingParams {
            temperature: number("temperature", 1.0),
            top_k: self.0.get("top_k").and_then(Value::as_u64).map_or(50, |k| k as usize),
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            ..greedy
        }
    }
}
