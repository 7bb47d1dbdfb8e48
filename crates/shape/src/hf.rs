//! `config.json` of a Hugging Face folder, in and out.

use lockstep_core::{DType, Fault, FaultClass};
use serde_json::{Map, Value, json};

/// The decoder families this build can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    /// LLaMA with norms on queries and keys.
    Qwen3,
}

impl Architecture {
    pub const ALL: [Architecture; 2] = [Architecture::Llama, Architecture::Qwen3];

    pub const fn class_name(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    const fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen3 => "qwen3",
        }
    }

    const fn default_norm_eps(self) -> f64 {
        1e-6
    }

    const fn default_rope_theta(self) -> f64 {
        10_000.0
    }
}

/// Everything that decides a model's tensors and arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub architecture: Architecture,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub tied: bool,
    pub max_positions: usize,
    /// Standard deviation of random weights.
    pub init_std: f64,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
}

/// A `config.json` that cannot be used. Each variant names the key.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    #[error("{origin}: not valid JSON: {cause}")]
    NotJson { origin: String, cause: String },
    #[error("{origin}: `{key}` is missing")]
    Missing { origin: String, key: &'static str },
    #[error("{origin}: `{key}` should be {expected}, found {found}")]
    WrongType { origin: String, key: &'static str, expected: &'static str, found: String },
    #[error("{origin}: architecture {name} is not implemented")]
    UnknownArchitecture { origin: String, name: String },
    #[error("{origin}: `{key}` = {value} is not implemented")]
    Unsupported { origin: String, key: String, value: String },
    #[error("{origin}: {what}")]
    Inconsistent { origin: String, what: String },
    #[error("`{name}` is not a model size")]
    UnknownSize { name: String },
}

impl Fault for ShapeError {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        match self {
            ShapeError::UnknownArchitecture { .. } => {
                let known: Vec<_> = Architecture::ALL.iter().map(|a| a.class_name()).collect();
                Some(format!("Implemented: {}.", known.join(", ")))
            }
            ShapeError::UnknownSize { .. } => {
                let known: Vec<_> = crate::NAMED_SIZES.iter().map(|s| s.name).collect();
                Some(format!("Known sizes: {}. Or give a map of config.json keys.", known.join(", ")))
            }
            ShapeError::Unsupported { .. } => {
                Some("Using the model without it would compute something else, so it is refused.".into())
            }
            _ => None,
        }
    }
}

impl ModelShape {
    /// Reads the text of a `config.json`; `origin` is its path, for messages.
    pub fn from_hf_text(text: &str, origin: &str) -> Result<ModelShape, ShapeError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| ShapeError::NotJson { origin: origin.into(), cause: e.to_string() })?;
        ModelShape::from_hf(&value, origin)
    }

    /// Reads `config.json` keys, old and new spellings.
    pub fn from_hf(value: &Value, origin: &str) -> Result<ModelShape, ShapeError> {
        let Value::Object(map) = value else {
            return Err(ShapeError::NotJson { origin: origin.into(), cause: "not an object".into() });
        };
        let keys = Keys { map, origin };
        let architecture = keys.architecture()?;
        keys.refuse_unsupported()?;
        let dim = keys.positive("hidden_size")?;
        let heads = keys.positive("num_attention_heads")?;
        let shape = ModelShape {
            architecture,
            vocab: keys.positive("vocab_size")?,
            dim,
            layers: keys.positive("num_hidden_layers")?,
            heads,
            kv_heads: keys.positive_or("num_key_value_heads", heads)?,
            head_dim: match keys.get("head_dim") {
                Some(_) => keys.positive("head_dim")?,
                None if architecture == Architecture::Qwen3 => 128,
                None => dim / heads,
            },
            ffn: keys.positive("intermediate_size")?,
            norm_eps: keys.number_or("rms_norm_eps", architecture.default_norm_eps())?,
            rope_theta: keys.rope_theta(architecture.default_rope_theta())?,
            tied: keys.bool_or("tie_word_embeddings", false)?,
            max_positions: keys.positive_or("max_position_embeddings", 2048)?,
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
        if !self.head_dim.is_multiple_of(2) {
            return wrong(format!("head width {} is odd; rotary embedding needs pairs", self.head_dim));
        }
        if self.vocab > u32::MAX as usize {
            return wrong(format!("`vocab_size` {} does not fit 32 bits", self.vocab));
        }
        Ok(())
    }

    /// The `config.json` that transformers loads unchanged.
    pub fn to_hf_text(&self, dtype: DType) -> String {
        let mut config = json!({
            "architectures": [self.architecture.class_name()],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": self.init_std,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": false,
            "model_type": self.architecture.model_type(),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": { "rope_theta": self.rope_theta, "rope_type": "default" },
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "dtype": dtype.hf_name(),
            "torch_dtype": dtype.hf_name(),
            "use_cache": true,
            "vocab_size": self.vocab,
        });
        if self.architecture == Architecture::Qwen3 {
            let map = config.as_object_mut().expect("an object was just made");
            map.remove("mlp_bias");
            map.insert("use_sliding_window".into(), false.into());
        }
        serde_json::to_string_pretty(&config).expect("plain values serialise") + "\n"
    }

    /// `generation_config.json` beside it.
    pub fn generation_config_text(&self) -> String {
        let mut map = Map::new();
        for (key, id) in [("bos_token_id", self.bos_id), ("eos_token_id", self.eos_id)] {
            if let Some(id) = id {
                map.insert(key.into(), id.into());
            }
        }
        serde_json::to_string_pretty(&Value::Object(map)).expect("plain values serialise") + "\n"
    }

    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Inverse frequencies of the rotary embedding, one per pair of a head.
    pub fn rope_inverse_frequencies(&self) -> Vec<f64> {
        let pairs = self.head_dim / 2;
        (0..pairs)
            // transformers computes these in f32; following it keeps angles equal at long positions.
            .map(|i| {
                let exponent = (2 * i) as f32 / self.head_dim as f32;
                f64::from(1.0f32 / (self.rope_theta as f32).powf(exponent))
            })
            .collect()
    }
}

/// Typed access to the keys, with errors that say which.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    origin: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &'static str, expected: &'static str, found: &Value) -> ShapeError {
        ShapeError::WrongType { origin: self.origin.into(), key, expected, found: found.to_string() }
    }

    fn architecture(&self) -> Result<Architecture, ShapeError> {
        let name = match (self.get("architectures"), self.get("architecture"), self.get("model_type")) {
            (Some(Value::Array(names)), _, _) if names.len() == 1 => names[0].as_str().unwrap_or_default(),
            (None, Some(name), _) | (None, None, Some(name)) => name.as_str().unwrap_or_default(),
            (Some(other), _, _) => return Err(self.wrong("architectures", "a list of one name", other)),
            (None, None, None) => {
                return Err(ShapeError::Missing { origin: self.origin.into(), key: "architectures" });
            }
        };
        let known = Architecture::ALL.into_iter().find(|a| a.class_name() == name || a.model_type() == name);
        known.ok_or_else(|| ShapeError::UnknownArchitecture { origin: self.origin.into(), name: name.into() })
    }

    /// Options that would change the arithmetic and are not implemented: refused, never ignored.
    fn refuse_unsupported(&self) -> Result<(), ShapeError> {
        let refuse = |key: &str, value: &Value| {
            Err(ShapeError::Unsupported {
                origin: self.origin.into(),
                key: key.into(),
                value: value.to_string(),
            })
        };
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            match self.get(key) {
                None | Some(Value::Bool(false)) => {}
                Some(other) => return refuse(key, other),
            }
        }
        for key in ["attention_dropout", "resid_pdrop", "hidden_dropout"] {
            match self.get(key) {
                Some(value) if value.as_f64() != Some(0.0) => return refuse(key, value),
                _ => {}
            }
        }
        match self.get("hidden_act") {
            None => {}
            Some(Value::String(name)) if name == "silu" || name == "swish" => {}
            Some(other) => return refuse("hidden_act", other),
        }
        match self.get("pretraining_tp") {
            Some(value) if value.as_u64() != Some(1) => return refuse("pretraining_tp", value),
            _ => {}
        }
        if let Some(value) = self.get("quantization_config") {
            return refuse("quantization_config", value);
        }
        if let Some(Value::Array(kinds)) = self.get("layer_types")
            && let Some(kind) = kinds.iter().find(|k| *k != "full_attention")
        {
            return refuse("layer_types", kind);
        }
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(Value::Object(rope)) = self.get(key) else { continue };
            let kind = rope.get("rope_type").or_else(|| rope.get("type"));
            if kind.is_some_and(|kind| kind != "default") {
                return refuse(&format!("{key}.rope_type"), kind.expect("just seen"));
            }
            if let Some(factor) = rope.get("partial_rotary_factor").filter(|f| f.as_f64() != Some(1.0)) {
                return refuse(&format!("{key}.partial_rotary_factor"), factor);
            }
        }
        Ok(())
    }

    fn rope_theta(&self, default: f64) -> Result<f64, ShapeError> {
        if let Some(Value::Object(rope)) = self.get("rope_parameters")
            && let Some(theta) = rope.get("rope_theta")
        {
            return theta.as_f64().ok_or_else(|| self.wrong("rope_theta", "a number", theta));
        }
        self.number_or("rope_theta", default)
    }

    fn positive(&self, key: &'static str) -> Result<usize, ShapeError> {
        let value = self.get(key).ok_or_else(|| ShapeError::Missing { origin: self.origin.into(), key })?;
        match value.as_u64() {
            Some(n) if (1..=u64::from(u32::MAX)).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, "a positive integer", value)),
        }
    }

    fn positive_or(&self, key: &'static str, default: usize) -> Result<usize, ShapeError> {
        if self.get(key).is_some() { self.positive(key) } else { Ok(default) }
    }

    fn number_or(&self, key: &'static str, default: f64) -> Result<f64, ShapeError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => match value.as_f64() {
                Some(n) if n.is_finite() && n > 0.0 => Ok(n),
                _ => Err(self.wrong(key, "a positive number", value)),
            },
        }
    }

    fn bool_or(&self, key: &'static str, default: bool) -> Result<bool, ShapeError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false", value)),
        }
    }

    /// One id; of a list, the first.
    fn token_id(&self, key: &'static str) -> Result<Option<u32>, ShapeError> {
        let value = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(ids)) if !ids.is_empty() => &ids[0],
            Some(value) => value,
        };
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(Some).ok_or_else(|| self.wrong(key, "a token id", value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"num_attention_heads":4,
        "num_key_value_heads":2,"num_hidden_layers":2,"intermediate_size":96,"vocab_size":100,
        "rms_norm_eps":1e-5,"rope_theta":5000.0,"torch_dtype":"bfloat16","eos_token_id":[7,8]}"#;

    fn with(key: &str, value: &str) -> Result<ModelShape, ShapeError> {
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        ModelShape::from_hf(&config, "config.json")
    }

    #[test]
    fn reads_old_and_new_spellings_and_writes_what_it_reads() {
        let shape = ModelShape::from_hf_text(CONFIG, "config.json").unwrap();
        assert_eq!(
            (shape.head_dim, shape.kv_heads, shape.rope_theta, shape.eos_id),
            (16, 2, 5000.0, Some(7))
        );
        let again = ModelShape::from_hf_text(&shape.to_hf_text(DType::BF16), "out").unwrap();
        assert_eq!(again, shape);
        let new = with("rope_parameters", r#"{"rope_theta": 123.0, "rope_type": "default"}"#).unwrap();
        assert_eq!(new.rope_theta, 123.0);
    }

    #[test]
    fn what_is_not_implemented_is_named() {
        let text = |r: Result<ModelShape, ShapeError>| r.unwrap_err().to_string();
        insta::assert_snapshot!(text(with("architectures", r#"["MixtralForCausalLM"]"#)), @"config.json: architecture MixtralForCausalLM is not implemented");
        insta::assert_snapshot!(text(with("attention_bias", "true")), @"config.json: `attention_bias` = true is not implemented");
        insta::assert_snapshot!(text(with("hidden_act", r#""gelu""#)), @r#"config.json: `hidden_act` = "gelu" is not implemented"#);
        insta::assert_snapshot!(text(with("rope_scaling", r#"{"type":"yarn","factor":4}"#)), @r#"config.json: `rope_scaling.rope_type` = "yarn" is not implemented"#);
        insta::assert_snapshot!(text(with("hidden_size", r#""64""#)), @r#"config.json: `hidden_size` should be a positive integer, found "64""#);
        insta::assert_snapshot!(text(with("num_key_value_heads", "3")), @"config.json: `num_attention_heads` 4 is not a multiple of `num_key_value_heads` 3");
        insta::assert_snapshot!(text(with("vocab_size", "null")), @"config.json: `vocab_size` is missing");
    }
}
