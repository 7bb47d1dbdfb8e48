//! Trying a model: text from prompts, on the engine that trains it.
//!
//! A [`Generator`] has a plan with a generate and a score phase, its memory and the weights of a model
//! folder. Prompts grow in slots of a key-value cache; log-probabilities are those of training, bit for bit.

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

pub use batch::{Completion, Drawn, End, Listener};
pub use dialogue::NextTurn;
pub use sample::Sampling;
pub use text::{StopStrings, TextStream};

use batch::{Batcher, Limits};
use dialogue::Dialogue;

/// New tokens in one pass: long enough for products to be fast, short enough for memory to stay small.
const PASS_TOKENS: usize = 512;

/// What a generator is made for.
#[derive(Clone, Copy, Debug)]
pub struct GeneratorSpec {
    /// How weights and activations are stored; `None`: as the folder's weights are.
    pub storage: Option<DType>,
    pub machine: Machine,
    /// Documents that grow at once.
    pub slots: usize,
    /// Tokens of a document, its prompt included; the model's positions if those are fewer.
    pub capacity: usize,
    /// Tokens of documents that are scored at once; 0 if none are.
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
    defaults: Sampling,
}

impl Generator {
    /// Opens a model folder, or the folder of a run that has one.
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

    /// To keep: a listener decodes while the generator is at work.
    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Bytes of weights, cache and work.
    pub fn memory(&self) -> Bytes {
        self.engine.arena_bytes()
    }

    /// Tokens of a document, its prompt included.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What `generation_config.json` asks for; greedy if it asks for nothing.
    pub fn default_sampling(&self) -> Sampling {
        self.defaults
    }

    fn limits(&self, max_new_tokens: usize) -> Limits {
        Limits {
            slots: self.slots,
            pass_tokens: self.engine.model(ModelId::FIRST).plan().bounds.tokens,
            capacity: self.capacity,
            max_new_tokens,
            end_ids: self.end_ids.clone(),
        }
    }

    /// Grows every prompt to its end. `listener` hears tokens as they are drawn.
    pub fn generate<'a>(
        &mut self,
        prompts: &'a [Vec<u32>],
        max_new_tokens: usize,
        sampling: Sampling,
        listener: &'a mut Listener<'a>,
    ) -> Result<Vec<Completion>, TrainError> {
        for (i, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() || prompt.len() >= self.capacity {
                return Err(TrainError::Prompt { index: i, tokens: prompt.len(), capacity: self.capacity });
            }
        }
        let limits = self.limits(max_new_tokens);
        let mut batcher = Batcher::new(prompts, limits, sampling, listener);
        self.engine.model_mut(ModelId::FIRST).generate(&mut batcher)?;
        Ok(batcher.done.into_iter().map(|one| one.expect("every prompt has ended")).collect())
    }

    /// A conversation: `turn` is given the last reply and gives the next prompt, whole; of that only what is
    /// new runs. A prompt that does not fit, or is empty, is asked for again.
    pub fn converse<'a>(
        &mut self,
        max_new_tokens: usize,
        sampling: Sampling,
        turn: &'a mut NextTurn<'a>,
        listener: &'a mut Listener<'a>,
    ) -> Result<(), TrainError> {
        let mut dialogue = Dialogue::new(self.limits(max_new_tokens), sampling, turn, listener);
        Ok(self.engine.model_mut(ModelId::FIRST).generate(&mut dialogue)?)
    }

    /// The log-probability of every token of a document after its first.
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

/// `generation_config.json`, as far as it is read. What is not JSON asks for nothing.
struct GenerationConfig(Value);

impl GenerationConfig {
    fn read(folder: &Path) -> Result<GenerationConfig, TrainError> {
        let text = ModelFolder::read_generation_config(folder)?.unwrap_or_default();
        Ok(GenerationConfig(serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// One id or a list of them; else what the model or its tokenizer says.
    fn end_ids(&self, shape: &ModelShape, tokenizer: &Tokenizer) -> Vec<u32> {
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let given: Vec<u32> = match self.0.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(one) => id(one).into_iter().collect(),
            None => vec![],
        };
        if given.is_empty() { shape.eos_id.or(tokenizer.eos_id()).into_iter().collect() } else { given }
    }

    fn sampling(&self) -> Sampling {
        let greedy = Sampling::default();
        if self.0.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return greedy;
        }
        let number = |key: &str, default: f32| {
            self.0.get(key).and_then(Value::as_f64).map_or(default, |value| value as f32)
        };
        Sampling {
            temperature: number("temperature", 1.0),
            top_k: self.0.get("top_k").and_then(Value::as_u64).map_or(50, |k| k as usize),
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            ..greedy
        }
    }
}
