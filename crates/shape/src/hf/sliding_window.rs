//! The keys of sliding windows. Mistral: `sliding_window`, in every layer. Qwen: the same, if
//! `use_sliding_window`, in the layers that `layer_types` names, or else from `max_window_layers` on.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use crate::{Architecture, ModelShape, ShapeError, SlidingWindow};

const DEFAULT_WINDOW: usize = 4096;
const DEFAULT_MAX_WINDOW_LAYERS: usize = 28;

pub(super) fn read(
    keys: Keys,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<SlidingWindow>, ShapeError> {
    let slides = match architecture {
        Architecture::Llama => {
            refuse(&keys, architecture, "sliding_window", None)?;
            refuse(&keys, architecture, "use_sliding_window", Some(false))?;
            None
        }
        Architecture::Mistral => {
            let window = size(&keys)?;
            refuse(&keys, architecture, "use_sliding_window", Some(window.is_some()))?;
            refuse(&keys, architecture, "max_window_layers", None)?;
            window
        }
        Architecture::Qwen2 | Architecture::Qwen3 if keys.bool_or("use_sliding_window", false)? => {
            size(&keys)?
        }
        Architecture::Qwen2 | Architecture::Qwen3 => None,
    };
    let which = match layer_types(&keys, layers)? {
        Some(types) => types,
        None if architecture.chooses_windows() => {
            let first = first_layer(&keys)?;
            (0..layers).map(|layer| slides.is_some() && layer >= first).collect()
        }
        None => vec![slides.is_some(); layers],
    };
    // In the families whose layers do not choose, the list can only repeat what holds anyway.
    if !architecture.chooses_windows() && which.iter().any(|layer| *layer != slides.is_some()) {
        let value = keys.get("layer_types").expect("it made the difference");
        return Err(keys.not_of_family("layer_types", value, architecture));
    }
    match slides {
        None if which.contains(&true) => {
            Err(keys
                .inconsistent("`layer_types` has sliding layers, but no `sliding_window` is in use".into()))
        }
        _ => Ok(slides.filter(|_| which.contains(&true)).map(|keys| SlidingWindow { keys, layers: which })),
    }
}

/// A key absent is the default; null is no window.
fn size(keys: &Keys) -> Result<Option<usize>, ShapeError> {
    match keys.map.get("sliding_window") {
        None => Ok(Some(DEFAULT_WINDOW)),
        Some(Value::Null) => Ok(None),
        Some(_) => keys.positive("sliding_window").map(Some),
    }
}

fn first_layer(keys: &Keys) -> Result<usize, ShapeError> {
    match keys.get("max_window_layers") {
        None => Ok(DEFAULT_MAX_WINDOW_LAYERS),
        // Zero is allowed: every layer slides.
        Some(value) => match value.as_u64() {
            Some(n) => Ok(n.min(u64::from(u32::MAX)) as usize),
            None => Err(keys.wrong("max_window_layers", "a number of layers", value)),
        },
    }
}

/// Refuses a key that the family does not have, unless it says what holds without it.
fn refuse(keys: &Keys, family: Architecture, key: &str, harmless: Option<bool>) -> Result<(), ShapeError> {
    match keys.get(key) {
        Some(value) if harmless.is_none() || value.as_bool() != harmless => {
            Err(keys.not_of_family(key, value, family))
        }
        _ => Ok(()),
    }
}

/// For each layer, whether it slides.
fn layer_types(keys: &Keys, layers: usize) -> Result<Option<Vec<bool>>, ShapeError> {
    let Some(value) = keys.get("layer_types") else { return Ok(None) };
    let Some(kinds) = value.as_array() else { return Err(keys.wrong("layer_types", "a list", value)) };
    if kinds.len() != layers {
        return Err(keys.inconsistent(format!(
            "`layer_types` names {} layers, `num_hidden_layers` is {layers}",
            kinds.len()
        )));
    }
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(keys.unsupported("layer_types", kind)),
    };
    kinds.iter().map(slides).collect::<Result<_, _>>().map(Some)
}

pub(super) fn write(shape: &ModelShape, config: &mut Map<String, Value>) {
    let size = shape.window.as_ref().map(|w| w.keys);
    if shape.architecture == Architecture::Mistral {
        config.insert("sliding_window".into(), json!(size));
    }
    if shape.architecture.chooses_windows() {
        let slides = |layer: usize| shape.window_of(layer).is_some();
        let kind = |layer| if slides(layer) { "sliding_attention" } else { "full_attention" };
        let first = (0..shape.layers).find(|layer| slides(*layer)).unwrap_or(shape.layers);
        config.insert("layer_types".into(), (0..shape.layers).map(kind).collect());
        config.insert("max_window_layers".into(), first.into());
        config.insert("sliding_window".into(), json!(size));
        config.insert("use_sliding_window".into(), size.is_some().into());
    }
}
