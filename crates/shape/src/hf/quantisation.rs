//! The `quantization_config` of a folder: weights in the 4-bit format of bitsandbytes, with double quantisation.

use serde_json::Value;

use crate::hf::keys::Keys;
use crate::{Projection, ShapeError, WeightFormat};

/// Keys with the only values that are supported.
const REQUIRED: [(&str, &str); 4] = [
    ("quant_method", "bitsandbytes"),
    ("load_in_4bit", "true"),
    ("bnb_4bit_quant_type", "nf4"),
    ("bnb_4bit_use_double_quant", "true"),
];

/// The same for keys that may be absent.
const OPTIONAL: [(&str, &str); 5] = [
    ("_load_in_4bit", "true"),
    ("load_in_8bit", "false"),
    ("_load_in_8bit", "false"),
    ("bnb_4bit_quant_storage", "uint8"),
    ("llm_int8_has_fp16_weight", "false"),
];

/// Keys that change nothing here.
const IGNORED: [&str; 3] =
    ["bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload"];

/// Modules that are not quantised. Embeddings and heads never are.
const SKIPPED: &str = "llm_int8_skip_modules";

/// The format of a folder's projections.
pub(super) fn read(keys: &Keys) -> Result<WeightFormat, ShapeError> {
    let Some(config) = keys.object("quantization_config", "quantization_config.")? else {
        return Ok(WeightFormat::Storage);
    };
    for (key, only) in REQUIRED {
        let value = config.get(key).ok_or_else(|| config.missing(key))?;
        if !is(value, only) {
            return Err(config.unsupported(key, value));
        }
    }
    for (key, value) in config.map.iter().filter(|(_, value)| !value.is_null()) {
        let known = REQUIRED.iter().chain(&OPTIONAL).find(|(name, _)| name == key);
        let is_fine = match known {
            Some((_, only)) => is(value, only),
            None if key == SKIPPED => skips_no_projection(value),
            None => IGNORED.contains(&key.as_str()),
        };
        if !is_fine {
            return Err(config.unsupported(key, value));
        }
    }
    Ok(WeightFormat::Nf4)
}

/// Whether a value is this word, or `true` or `false`.
fn is(value: &Value, word: &str) -> bool {
    match value {
        Value::Bool(on) => word == if *on { "true" } else { "false" },
        Value::String(text) => text == word,
        _ => false,
    }
}

/// bitsandbytes leaves a module as it is if its name contains one of these, or ends with it.
fn skips_no_projection(names: &Value) -> bool {
    let Value::Array(names) = names else { return false };
    names.iter().all(|name| {
        let name = name.as_str().unwrap_or_default();
        let skips = |of: &Projection| format!(".{}", of.module(0)).contains(name) || name.contains("layers.");
        !name.is_empty() && !Projection::ALL.iter().any(skips)
    })
}
