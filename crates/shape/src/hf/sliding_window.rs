//! The keys of sliding windows. Mistral has `sliding_window`, for every layer. Qwen has the same key; it applies if
//! `use_sliding_window` is true, to the layers that `layer_types` names or, without that list, to the layers from
//! `max_window_layers` on.

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
    let window = match architecture {
        Architecture::Llama => {
            reject(&keys, architecture, "sliding_window", None)?;
            reject(&keys, architecture, "use_sliding_window", Some(false))?;
            None
        }
        Architecture::Mistral => {
            let window = window_size(&keys)?;
            reject(&keys, architecture, "use_sliding_window", Some(window.is_some()))?;
            reject(&keys, architecture, "max_window_layers", None)?;
            window
        }
        Architecture::Qwen2 | Architecture::Qwen3 if keys.bool_or("use_sliding_window", false)? => {
            window_size(&keys)?
        }
        Architecture::Qwen2 | Architecture::Qwen3 => None,
    };
    let slides_in = match layer_types(&keys, layers)? {
        Some(types) => types,
        None if architecture.has_window_per_layer() => {
            let first = first_sliding_layer(&keys)?;
            (0..layers).map(|layer| window.is_some() && layer >= first).collect()
        }
        None => vec![window.is_some(); layers],
    };
    // In the other families all layers are the same, and the list may only repeat that.
    if !architecture.has_window_per_layer() && slides_in.iter().any(|layer| *layer != window.is_some()) {
        let value = keys.get("layer_types").expect("only `layer_types` can differ");
        return Err(keys.not_of_family("layer_types", value, architecture));
    }
    match window {
        None if slides_in.contains(&true) => {
            Err(keys
                .inconsistent("`layer_types` has sliding layers, but no `sliding_window` is in use".into()))
        }
        _ => Ok(window
            .filter(|_| slides_in.contains(&true))
            .map(|keys| SlidingWindow { keys, layers: slides_in })),
    }
}

/// The size of the window: the default if the key is absent, no window if it is null.
fn window_size(keys: &Keys) -> Result<Option<usize>, ShapeError> {
    match keys.map.get("sliding_window") {
        None => Ok(Some(DEFAULT_WINDOW)),
        Some(Value::Null) => Ok(None),
        Some(_) => keys.positive("sliding_window").map(Some),
    }
}

fn first_sliding_layer(keys: &Keys) -> Result<usize, ShapeError> {
    match keys.get("max_window_layers") {
        None => Ok(DEFAULT_MAX_WINDOW_LAYERS),
        // Zero is allowed: every layer has the window.
        Some(value) => match value.as_u64() {
            Some(n) => Ok(n.min(u64::from(u32::MAX)) as usize),
            None => Err(keys.wrong("max_window_layers", "a number of layers", value)),
        },
    }
}

/// Rejects a key that the family does not have, unless its value is what the family does anyway.
fn reject(keys: &Keys, family: Architecture, key: &str, harmless: Option<bool>) -> Result<(), ShapeError> {
    match keys.get(key) {
        Some(value) if harmless.is_none() || value.as_bool() != harmless => {
            Err(keys.not_of_family(key, value, family))
        }
        _ => Ok(()),
    }
}

/// For each layer, whether it has a sliding window.
fn layer_types(keys: &Keys, layers: usize) -> Result<Option<Vec<bool>>, ShapeError> {
    let Some(value) = keys.get("layer_types") else { return Ok(None) };
    let Some(kinds) = value.as_array() else { return Err(keys.wrong("layer_types", "a list", value)) };
    if kinds.len() != layers {
        return Err(keys.inconsistent(format!(
            "`layer_types` names {} layers, `num_hidden_layers` is {layers}",
            kinds.len()
        )));
    }
    let window = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(keys.unsupported("layer_types", kind)),
    };
    kinds.iter().map(window).collect::<Result<_, _>>().map(Some)
}

pub(super) fn write(shape: &ModelShape, config: &mut Map<String, Value>) {
    let size = shape.window.as_ref().map(|w| w.keys);
    if shape.architecture == Architecture::Mistral {
        config.insert("sliding_window".into(), json!(size));
    }
    if shape.architecture.has_window_per_layer() {
        let window = |layer: usize| shape.window_of(layer).is_some();
        let kind = |layer| if window(layer) { "sliding_attention" } else { "full_attention" };
        let first = (0..shape.layers).find(|layer| window(*layer)).unwrap_or(shape.layers);
        config.insert("layer_types".into(), (0..shape.layers).map(kind).collect());
        config.insert("max_window_layers".into(), first.into());
        config.insert("sliding_window".into(), json!(size));
        config.insert("use_sliding_window".into(), size.is_some().into());
    }
}
