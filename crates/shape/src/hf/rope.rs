//! The keys of rotary embedding: `rope_scaling` and `rope_theta` of older models, and `rope_parameters` of transformers
//! 5.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use crate::{ModelShape, Rope, RopeScaling, ShapeError, Yarn};

const DEFAULT_THETA: f64 = 10_000.0;

/// Reads them as transformers does: `rope_scaling` if it is not empty, otherwise `rope_parameters`. A `rope_theta` inside
/// the object takes precedence over the one next to it.
pub(super) fn read(keys: Keys, max_positions: usize) -> Result<Rope, ShapeError> {
    reject_partial(&keys)?;
    let old = keys.object("rope_scaling", "rope_scaling.")?.filter(|k| !k.map.is_empty());
    let object = match old {
        Some(old) => Some(old),
        None => keys.object("rope_parameters", "rope_parameters.")?,
    };
    let theta = keys.number_or("rope_theta", DEFAULT_THETA)?;
    let Some(object) = object else { return Ok(Rope::plain(theta)) };
    reject_partial(&object)?;
    if let Some((name, value)) = object.map.iter().find(|(name, v)| v.is_object() || *name == "mrope_section")
    {
        return Err(object.unsupported(name, value));
    }
    // Some models have this key next to the object, where it takes precedence.
    let original = || match keys.get("original_max_position_embeddings") {
        Some(_) => keys.positive("original_max_position_embeddings"),
        None => object.positive_or("original_max_position_embeddings", max_positions),
    };
    let kind = object.get("rope_type").or_else(|| object.get("type"));
    let scaling = match kind.map(|kind| kind.as_str().unwrap_or_default()) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: object.number("factor")? },
        Some("llama3") => llama3(&object, original()?)?,
        Some("yarn") => RopeScaling::Yarn(yarn(&object, original()?, max_positions)?),
        Some(_) => return Err(object.unsupported("rope_type", kind.expect("just seen"))),
    };
    Ok(Rope { theta: object.number_or("rope_theta", theta)?, scaling })
}

/// Rejects heads that are rotated only in part.
fn reject_partial(keys: &Keys) -> Result<(), ShapeError> {
    match keys.get("partial_rotary_factor") {
        Some(value) if value.as_f64() != Some(1.0) => Err(keys.unsupported("partial_rotary_factor", value)),
        _ => Ok(()),
    }
}

fn llama3(object: &Keys, original_max_positions: usize) -> Result<RopeScaling, ShapeError> {
    let (low, high) = (object.number("low_freq_factor")?, object.number("high_freq_factor")?);
    if high <= low {
        return Err(object.inconsistent(format!(
            "`{0}high_freq_factor` {high} is not above `{0}low_freq_factor` {low}",
            object.within
        )));
    }
    Ok(RopeScaling::Llama3 {
        factor: object.number("factor")?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_positions,
    })
}

fn yarn(object: &Keys, original_max_positions: usize, max_positions: usize) -> Result<Yarn, ShapeError> {
    // Zero means "not set" in these keys.
    let optional = |key: &str| match object.get(key) {
        Some(value) if value.as_f64() != Some(0.0) => object.number(key).map(Some),
        _ => Ok(None),
    };
    let factor = match object.map.get("factor") {
        Some(Value::Null) => max_positions as f64 / original_max_positions as f64,
        _ => object.number("factor")?,
    };
    Ok(Yarn {
        factor,
        original_max_positions,
        beta_fast: optional("beta_fast")?.unwrap_or(32.0),
        beta_slow: optional("beta_slow")?.unwrap_or(1.0),
        truncate: match object.map.get("truncate") {
            Some(Value::Null) => false,
            _ => object.bool_or("truncate", true)?,
        },
        attention_factor: object
            .get("attention_factor")
            .map(|_| object.number("attention_factor"))
            .transpose()?,
        mscale: optional("mscale")?.zip(optional("mscale_all_dim")?),
    })
}

/// Writes `rope_parameters` with the base, and, if frequencies are scaled, `rope_scaling` without it, which transformers
/// before version 5 reads.
pub(super) fn write(shape: &ModelShape, config: &mut Map<String, Value>) {
    let mut object = match shape.rope.scaling {
        RopeScaling::None => json!({ "rope_type": "default" }),
        RopeScaling::Linear { factor } => json!({ "factor": factor, "rope_type": "linear" }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => json!({
            "factor": factor,
            "high_freq_factor": high_freq_factor,
            "low_freq_factor": low_freq_factor,
            "original_max_position_embeddings": original_max_positions,
            "rope_type": "llama3",
        }),
        RopeScaling::Yarn(yarn) => yarn_object(&yarn),
    };
    if shape.rope.scaling != RopeScaling::None {
        config.insert("rope_scaling".into(), object.clone());
    }
    object["rope_theta"] = shape.rope.theta.into();
    config.insert("rope_parameters".into(), object);
    config.insert("rope_theta".into(), shape.rope.theta.into());
}

fn yarn_object(yarn: &Yarn) -> Value {
    let mut object = json!({
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "rope_type": "yarn",
        "truncate": yarn.truncate,
    });
    if let Some(factor) = yarn.attention_factor {
        object["attention_factor"] = factor.into();
    }
    if let Some((mscale, all_dim)) = yarn.mscale {
        object["mscale"] = mscale.into();
        object["mscale_all_dim"] = all_dim.into();
    }
    object
}
