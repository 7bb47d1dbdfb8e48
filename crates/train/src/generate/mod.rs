//! Generates text with the engine that trains the model.
//!
//! A [`Generator`] has a plan with a generate phase and a score phase, its memory, and the weights of a model folder.
//! Sequences are decoded in the slots of a KV cache. Log-probabilities are bit-identical to those of training.

mod batch;
mod dialogue;
mod sample;
mod text;

use std::path::Path;
use std::sync::Arc;

use lockstep_ckpt::ModelFolder;
use lockstep_core::{Bytes, DType};
use lockstep_data::{Tokenizer, TokenizerSource};
use lockstep_device::Machine;
use lockstep_engine::{Engine, MicroBatch};
use lockstep_plan::{BatchBounds, ModelId};
use lockstep_shape::ModelShape;
use serde_json::Value;

use crate::error::TrainError;
use crate::inference::Inference;
use crate::save;
use crate::setup::model_folder;

pub use batch::{Completion, FinishReason, SampledToken, TokenCallback};
pub use dialogue::NextTurn;
pub use sample::SamplingParams;
pub use text::{StopStrings, TextStream};

use batch::{Batcher, DecodeLimits};
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
    slots: usize,
    end_ids: Vec<u32>,
    defaults: SamplingParams,
}

impl Generator {
    /// Opens a model folder, or the output folder of a run that contains one.
    pub fn open(path: &Path, spec: &GeneratorSpec) -> Result<Generator, TrainError> {
        if !path.exists() {
            return Err(TrainError::ModelMissing { path: path.into() });
        }
        let path = &model_folder(path);
        let folder = ModelFolder::open(path)?;
        let origin = path.join("config.json").display().to_string();
        let shape = ModelShape::from_hf_text(folder.config_json(), &origin)?;
        save::check_weights(&folder, &shape)?;
        let tokenizer = Arc::new(Tokenizer::load(&TokenizerSource::File(path.into()))?);
        if tokenizer.vocab_size() > shape.vocab {
            let (tokenizer, vocab) = (tokenizer.vocab_size(), shape.vocab);
            return Err(TrainError::VocabularyTooSmall { tokenizer, vocab });
        }
        let stored = folder.tensors().find_map(|t| t.dtype).unwrap_or(DType::F32);
        let capacity = spec.capacity.min(shape.max_positions);
        let tokens = PASS_TOKENS.max(spec.slots).max(spec.score_tokens).next_multiple_of(256);
        let inference = Inference {
            shape: &shape,
            storage: spec.storage.unwrap_or(stored),
            bounds: BatchBounds { tokens, docs: tokens, max_doc: tokens },
            machine: spec.machine,
            scores: spec.score_tokens > 0,
            slots: Some((spec.slots, capacity)),
        };
        let mut engine = inference.engine()?;
        save::load_weights(&mut engine, &folder)?;
        let config = GenerationConfig::read(path)?;
        let end_ids = config.end_ids(&shape, &tokenizer);
        let defaults = config.sampling();
        Ok(Generator { engine, tokenizer, shape, capacity, slots: spec.slots, end_ids, defaults })
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
        DecodeLimits {
            slots: self.slots,
            pass_tokens: self.engine.model(ModelId::FIRST).plan().bounds.tokens,
            capacity: self.capacity,
            max_new_tokens,
            end_ids: self.end_ids.clone(),
        }
    }

    /// Generates the completion of every prompt. `on_token` is called with each token as it is generated.
    pub fn generate<'a>(
        &mut self,
        prompts: &'a [Vec<u32>],
        max_new_tokens: usize,
        sampling: SamplingParams,
        on_token: &'a mut TokenCallback<'a>,
    ) -> Result<Vec<Completion>, TrainError> {
        for (i, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() || prompt.len() >= self.capacity {
                return Err(TrainError::Prompt { index: i, tokens: prompt.len(), capacity: self.capacity });
            }
        }
        let limits = self.limits(max_new_tokens);
        let mut batcher = Batcher::new(prompts, limits, sampling, on_token);
        self.engine.model_mut(ModelId::FIRST).generate(&mut batcher)?;
        Ok(batcher.done.into_iter().map(|one| one.expect("every prompt has ended")).collect())
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
        let mut dialogue = Dialogue::new(self.limits(max_new_tokens), sampling, turn, on_token);
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
        };
        self.engine
            .model_mut(ModelId::FIRST)
            .score(batch, &mut |outputs| all.extend_from_slice(outputs.log_probs()))?;
        Ok(all)
    }
}

/// The supported keys of `generation_config.json`. A file that is not JSON is treated as empty.
struct GenerationConfig(Value);

impl GenerationConfig {
    fn read(folder: &Path) -> Result<GenerationConfig, TrainError> {
        let text = ModelFolder::read_generation_config(folder)?.unwrap_or_default();
        Ok(GenerationConfig(serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// `eos_token_id`, which is one id or a list; otherwise the EOS id of the model or its tokenizer.
    fn end_ids(&self, shape: &ModelShape, tokenizer: &Tokenizer) -> Vec<u32> {
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
