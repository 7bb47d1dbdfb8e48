//! Reads and describes PEFT's folder of a LoRA adapter: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Fields that would change results and are not implemented are errors, not ignored.

use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_core::Bytes;
use serde_json::{Map, Value, json};

use crate::durable::read_bytes;
use crate::model_folder::open_inside;
use crate::{CkptError, SafetensorsFile, TensorInfo};

pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG_CAP: Bytes = Bytes(16 << 20);
/// PEFT wraps the model twice, and every tensor's name says so.
const PREFIX: &str = "base_model.model.";

/// Fields that change results and are not implemented, with the values that change nothing besides `null`.
const UNSUPPORTED: [(&str, &[&str]); 19] = [
    ("use_dora", &["false"]),
    ("bias", &["\"none\""]),
    ("rank_pattern", &["{}"]),
    ("alpha_pattern", &["{}"]),
    ("fan_in_fan_out", &["false"]),
    ("lora_bias", &["false"]),
    ("use_qalora", &["false"]),
    ("trainable_token_indices", &[]),
    ("target_parameters", &["[]"]),
    ("layer_replication", &[]),
    ("layers_to_transform", &[]),
    ("layers_pattern", &[]),
    ("exclude_modules", &["[]"]),
    ("loftq_config", &["{}"]),
    ("eva_config", &[]),
    ("corda_config", &[]),
    ("alora_invocation_tokens", &[]),
    ("megatron_config", &[]),
    ("arrow_config", &[]),
];

/// What `adapter_config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    pub rank_stabilized: bool,
    pub target_modules: Vec<String>,
    pub modules_to_save: Vec<String>,
    /// The model that the adapter belongs to: a folder or a name on the Hub.
    pub base_model: Option<String>,
    /// Whether the model is a classifier, as reward models are.
    pub is_classifier: bool,
}

impl AdapterConfig {
    /// The text of `adapter_config.json`.
    pub fn to_text(&self) -> String {
        // PEFT's own files have whole numbers where they can.
        let alpha = if self.alpha.fract() == 0.0 { json!(self.alpha as i64) } else { json!(self.alpha) };
        let modules_to_save =
            if self.modules_to_save.is_empty() { Value::Null } else { json!(self.modules_to_save) };
        let config = json!({
            "peft_type": "LORA",
            "task_type": if self.is_classifier { "SEQ_CLS" } else { "CAUSAL_LM" },
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rank_stabilized,
            "target_modules": self.target_modules,
            "modules_to_save": modules_to_save,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "use_dora": false,
        });
        format!("{config:#}\n")
    }

    /// Reads the text of `adapter_config.json`; `file` is its name in errors.
    pub fn parse(file: &Path, text: &[u8]) -> Result<AdapterConfig, CkptError> {
        let invalid = |why: String| CkptError::AdapterConfig { file: file.into(), why };
        let map: Map<String, Value> =
            serde_json::from_slice(text).map_err(|e| invalid(format!("it is not a JSON object: {e}")))?;
        let kind = map.get("peft_type").and_then(Value::as_str).unwrap_or("LORA");
        if kind != "LORA" {
            return Err(invalid(format!("`peft_type` is {kind}, but only LORA is supported")));
        }
        for (field, harmless) in UNSUPPORTED {
            let Some(value) = map.get(field).filter(|value| !value.is_null()) else { continue };
            if !harmless.contains(&value.to_string().as_str()) {
                return Err(invalid(format!("`{field}: {value}` is not supported")));
            }
        }
        let number = |field: &str, default: f64| match map.get(field) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|number| number.is_finite())
                .ok_or_else(|| invalid(format!("`{field}: {value}` is not a number"))),
        };
        let (rank, alpha, dropout) =
            (number("r", 8.0)?, number("lora_alpha", 8.0)?, number("lora_dropout", 0.0)?);
        if rank < 1.0 || rank.fract() != 0.0 || rank > 65_536.0 {
            return Err(invalid(format!("`r: {rank}` is not a rank")));
        }
        if alpha <= 0.0 || !(0.0..1.0).contains(&dropout) {
            return Err(invalid(
                "`lora_alpha` must be above 0, and `lora_dropout` at least 0 and below 1".into(),
            ));
        }
        let names = |field: &str| match map.get(field) {
            Some(Value::String(one)) => vec![one.clone()],
            Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            _ => vec![],
        };
        Ok(AdapterConfig {
            rank: rank as usize,
            alpha,
            dropout,
            rank_stabilized: map.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            target_modules: names("target_modules"),
            modules_to_save: names("modules_to_save"),
            base_model: map.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned),
            is_classifier: map.get("task_type").and_then(Value::as_str) == Some("SEQ_CLS"),
        })
    }
}

/// The name that PEFT gives to a tensor of a model.
pub fn adapter_tensor_name(tensor: &str) -> String {
    format!("{PREFIX}{tensor}")
}

/// The name of a tensor in the model, by its name in an adapter's folder.
pub fn model_tensor_name(stored: &str) -> &str {
    stored.strip_prefix(PREFIX).unwrap_or(stored)
}

/// An open adapter folder.
#[derive(Debug)]
pub struct AdapterFolder {
    path: PathBuf,
    config: AdapterConfig,
    file: SafetensorsFile,
}

impl AdapterFolder {
    /// Whether a folder holds an adapter, not a whole model.
    pub fn is_one(path: &Path) -> bool {
        path.join(ADAPTER_CONFIG).is_file()
    }

    /// Opens a folder and validates its configuration and the header of its weights.
    pub fn open(path: &Path) -> Result<AdapterFolder, CkptError> {
        if !AdapterFolder::is_one(path) {
            return Err(CkptError::NoAdapter { folder: path.into() });
        }
        let config = path.join(ADAPTER_CONFIG);
        let config = AdapterConfig::parse(&config, &read_bytes(&config, CONFIG_CAP)?)?;
        Ok(AdapterFolder { path: path.into(), config, file: open_inside(path, WEIGHTS)? })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> Bytes {
        self.file.bytes_read()
    }

    /// The tensors by the names that the model gives them. Those of other names are none of the model's.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.file.tensors().map(|tensor| (model_tensor_name(&tensor.name), tensor))
    }

    /// Reads a flat range of a tensor, widened to f32.
    pub fn read_f32(
        &self,
        name: &str,
        expected_shape: &[usize],
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let stored = adapter_tensor_name(name);
        let Some(info) = self.file.tensor(&stored) else {
            let names = self.file.tensors().map(|tensor| tensor.name.as_str());
            return Err(CkptError::no_tensor(self.path.clone(), &stored, names));
        };
        if info.shape != expected_shape {
            return Err(CkptError::Shape {
                file: self.file.path().into(),
                tensor: stored,
                expected: expected_shape.into(),
                found: info.shape.clone(),
            });
        }
        self.file.read_f32(&stored, elems, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<AdapterConfig, String> {
        AdapterConfig::parse(Path::new("a.json"), text.as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_written_is_read() {
        let config = AdapterConfig {
            rank: 16,
            alpha: 32.0,
            dropout: 0.05,
            rank_stabilized: true,
            target_modules: vec!["q_proj".into(), "v_proj".into()],
            modules_to_save: vec!["lm_head".into()],
            base_model: Some("org/name".into()),
            is_classifier: false,
        };
        assert_eq!(parsed(&config.to_text()), Ok(config.clone()));
        let other = AdapterConfig { alpha: 1.5, is_classifier: true, modules_to_save: vec![], ..config };
        assert_eq!(parsed(&other.to_text()), Ok(other.clone()));
        assert!(other.to_text().contains("\"SEQ_CLS\""), "{}", other.to_text());
    }

    #[test]
    fn fields_that_would_change_results_are_errors() {
        for text in [
            r#"{"use_dora": true}"#,
            r#"{"bias": "all"}"#,
            r#"{"rank_pattern": {"q_proj": 4}}"#,
            r#"{"peft_type": "ADALORA"}"#,
            r#"{"layers_to_transform": [0]}"#,
            r#"{"r": 0}"#,
            r#"{"r": 2.5}"#,
            r#"{"lora_alpha": "x"}"#,
            r#"{"lora_dropout": 1}"#,
            "[]",
            "{",
        ] {
            assert!(parsed(text).is_err(), "{text}");
        }
        let harmless =
            r#"{"bias": "none", "use_dora": false, "rank_pattern": {}, "eva_config": null, "revision": "x"}"#;
        assert_eq!(parsed(harmless).map(|config| config.rank), Ok(8));
    }
}
