//! Reads and writes the `config.json` of a Hugging Face model folder.
//!
//! Keys have the meaning they have in transformers 5, and an absent key has the family's default. An option that would
//! change the results and is not supported is an error, never ignored.

mod keys;
mod quantisation;
mod rope;
mod sliding_window;

use lockstep_core::DType;
use serde_json::{Map, Value, json};

use crate::{Architecture, Biases, Dropout, Head, ModelShape, ShapeError};
use keys::Keys;

impl ModelShape {
    /// Reads the text of a `config.json`; `origin` is its path, for error messages.
    pub fn from_hf_text(text: &str, origin: &str) -> Result<ModelShape, ShapeError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| ShapeError::NotJson { origin: origin.into(), cause: e.to_string() })?;
        ModelShape::from_hf(&value, origin)
    }

    /// Reads the keys of a `config.json`, in old and new spellings.
    pub fn from_hf(value: &Value, origin: &str) -> Result<ModelShape, ShapeError> {
        let Value::Object(map) = value else {
            return Err(ShapeError::NotJson { origin: origin.into(), cause: "not an object".into() });
        };
        let keys = Keys { map, origin, within: "" };
        let (architecture, head) = keys.architecture()?;
        if head == Head::Score && keys.num_labels()? != 1 {
            return Err(keys.unsupported("num_labels", &keys.num_labels()?.into()));
        }
        reject_unsupported(&keys)?;
        let dim = keys.positive("hidden_size")?;
        let heads = keys.positive("num_attention_heads")?;
        let layers = keys.positive("num_hidden_layers")?;
        let max_positions =
            keys.positive_or("max_position_embeddings", architecture.default_max_positions())?;
        let shape = ModelShape {
            head,
            architecture,
            vocab: keys.positive("vocab_size")?,
            dim,
            layers,
            heads,
            kv_heads: match map.get("num_key_value_heads") {
                None => architecture.default_kv_heads(heads),
                Some(_) => keys.positive_or("num_key_value_heads", heads)?,
            },
            head_dim: match keys.get("head_dim") {
                Some(_) => keys.positive("head_dim")?,
                None if architecture == Architecture::Qwen3 => 128,
                None => dim / heads,
            },
            ffn: keys.positive("intermediate_size")?,
            norm_eps: keys.number_or("rms_norm_eps", 1e-6)?,
            rope: rope::read(keys, max_positions)?,
            biases: biases(&keys, architecture)?,
            window: sliding_window::read(keys, architecture, layers)?,
            dropout: dropout(&keys)?,
            tied: keys.bool_or("tie_word_embeddings", false)?,
            max_positions,
            lora: None,
            frozen_projections: quantisation::read(&keys)?,
            init_std: keys.number_or("initializer_range", 0.02)?,
            bos_id: keys.token_id("bos_token_id")?,
            eos_id: keys.token_id("eos_token_id")?,
        };
        shape.check(origin)?;
        Ok(shape)
    }

    fn check(&self, origin: &str) -> Result<(), ShapeError> {
        let wrong = |what: String| Err(ShapeError::Inconsistent { origin: origin.into(), what });
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            return wrong(format!(
                "`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"
            ));
        }
        // transformers rejects such a LLaMA, even if `head_dim` is given.
        if self.architecture == Architecture::Llama && !self.dim.is_multiple_of(self.heads) {
            let (dim, heads) = (self.dim, self.heads);
            return wrong(format!("`hidden_size` {dim} is not a multiple of `num_attention_heads` {heads}"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong(format!(
                "`head_dim` {} is odd, but rotary embedding needs an even number",
                self.head_dim
            ));
        }
        if self.rope_inverse_frequencies().iter().any(|f| !f.is_finite()) {
            return wrong(format!("the rotary embedding has infinite frequencies with {:?}", self.rope));
        }
        Ok(())
    }

    /// The text of a `config.json` that transformers can load.
    pub fn to_hf_text(&self, dtype: DType) -> String {
        let mut config = json!({
            "architectures": [self.architecture.class_name(self.head)],
            "attention_dropout": self.dropout.attention,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": self.init_std,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.max_positions,
            "model_type": self.architecture.model_type(),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "dtype": dtype.hf_name(),
            "torch_dtype": dtype.hf_name(),
            "use_cache": true,
            "vocab_size": self.vocab,
        });
        let map = config.as_object_mut().expect("an object was just made");
        rope::write(self, map);
        sliding_window::write(self, map);
        if self.head == Head::Score {
            map.insert("id2label".into(), json!({ "0": "LABEL_0" }));
            map.insert("label2id".into(), json!({ "LABEL_0": 0 }));
            map.insert("tie_word_embeddings".into(), false.into());
        }
        if self.dropout.residual > 0.0 {
            map.insert("resid_pdrop".into(), self.dropout.residual.into());
        }
        if self.architecture.has_attention_bias() {
            map.insert("attention_bias".into(), self.biases.qkv.into());
        }
        if self.architecture.has_mlp_bias() {
            map.insert("mlp_bias".into(), self.biases.mlp.into());
        }
        serde_json::to_string_pretty(&config).expect("plain values serialise") + "\n"
    }

    /// The text of the `generation_config.json` next to it.
    pub fn generation_config_text(&self) -> String {
        let mut map = Map::new();
        for (key, id) in [("bos_token_id", self.bos_id), ("eos_token_id", self.eos_id)] {
            if let Some(id) = id {
                map.insert(key.into(), id.into());
            }
        }
        serde_json::to_string_pretty(&Value::Object(map)).expect("plain values serialise") + "\n"
    }
}

/// Rejects options that would change the results and are not supported.
fn reject_unsupported(keys: &Keys) -> Result<(), ShapeError> {
    match keys.get("hidden_act") {
        None => {}
        Some(Value::String(name)) if name == "silu" || name == "swish" => {}
        Some(other) => return Err(keys.unsupported("hidden_act", other)),
    }
    match keys.get("pretraining_tp") {
        Some(value) if value.as_u64() != Some(1) => Err(keys.unsupported("pretraining_tp", value)),
        _ => Ok(()),
    }
}

/// None of these families has residual dropout in transformers; the accepted keys are those of other families.
fn dropout(keys: &Keys) -> Result<Dropout, ShapeError> {
    const RESIDUAL: [&str; 4] = ["resid_pdrop", "resid_dropout", "residual_dropout", "hidden_dropout"];
    let mut residual = keys.fraction(RESIDUAL[0])?;
    for key in &RESIDUAL[1..] {
        let other = keys.fraction(key)?;
        if other > 0.0 && residual > 0.0 && other != residual {
            return Err(keys.inconsistent(format!("`{key}` {other} contradicts another key with {residual}")));
        }
        residual = residual.max(other);
    }
    Ok(Dropout { attention: keys.fraction("attention_dropout")?, residual })
}

/// LLaMA and Qwen3 have a key for biases; Qwen2 always has them on queries, keys and values; Mistral never.
fn biases(keys: &Keys, architecture: Architecture) -> Result<Biases, ShapeError> {
    let has = |key: &str, known: bool| match keys.bool_or(key, false)? {
        true if !known => Err(keys.not_of_family(key, &Value::Bool(true), architecture)),
        given => Ok(given),
    };
    let attention = has("attention_bias", architecture.has_attention_bias())?;
    let mlp = has("mlp_bias", architecture.has_mlp_bias())?;
    Ok(Biases { qkv: attention || architecture == Architecture::Qwen2, out: attention, mlp })
}

#[cfg(test)]
mod tests;
