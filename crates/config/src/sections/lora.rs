//! Low-rank adapters (LoRA): TRL's `use_peft` with its `lora_*` keys, PEFT's `peft_config`, or the folder of an adapter.

use std::path::PathBuf;

use crate::error::Problem;
use crate::reader::Reader;
use crate::yaml::{Node, Value};

/// The adapters that a run trains instead of the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of the adapters.
    pub r: u32,
    pub alpha: f64,
    pub dropout: f64,
    /// Names or patterns of modules; `all-linear` for every projection of every block.
    pub target_modules: Vec<String>,
    /// Modules that are trained as a whole.
    pub modules_to_save: Vec<String>,
    /// Scale by alpha / √r instead of alpha / r.
    pub use_rslora: bool,
    /// The folder of the adapter that training starts from. It defines all of the above.
    pub folder: Option<PathBuf>,
}

/// PEFT's default for the families that Lockstep trains.
const DEFAULT_TARGETS: [&str; 2] = ["q_proj", "v_proj"];

/// TRL's keys, besides `use_peft`.
const KEYS: [&str; 6] =
    ["lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora"];

const FRACTION: &str = "at least 0 and below 1";

/// Fields of PEFT's `LoraConfig` that change results and are not implemented, with their values that change nothing.
const REFUSED: [(&str, &[&str]); 21] = [
    ("use_dora", &["false"]),
    ("bias", &["none"]),
    ("rank_pattern", &["{}"]),
    ("alpha_pattern", &["{}"]),
    ("layers_to_transform", &[]),
    ("layers_pattern", &[]),
    ("exclude_modules", &[]),
    ("fan_in_fan_out", &["false"]),
    ("init_lora_weights", &["true"]),
    ("lora_bias", &["false"]),
    ("use_qalora", &["false"]),
    ("trainable_token_indices", &[]),
    ("target_parameters", &["[]"]),
    ("layer_replication", &[]),
    ("loftq_config", &["{}"]),
    ("eva_config", &[]),
    ("corda_config", &[]),
    ("alora_invocation_tokens", &[]),
    ("megatron_config", &[]),
    ("arrow_config", &[]),
    ("ensure_weight_tying", &["false"]),
];

/// Fields that change nothing here.
const IGNORED: [&str; 11] = [
    "peft_type",
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "peft_version",
    "peft_library",
];

const FIELDS: [&str; 6] =
    ["r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora"];

impl LoraConfig {
    /// `None` if the run trains the weights themselves.
    pub(crate) fn read(r: &mut Reader<'_>) -> Option<LoraConfig> {
        let wanted = r.given("use_peft");
        let is_on = r.bool("use_peft").unwrap_or(false);
        let flat: Vec<_> = KEYS.iter().filter_map(|key| r.given(key)).collect();
        let (map, folder) = (r.given("peft_config"), r.given("adapter_name_or_path"));
        if let (Some(map), Some(folder)) = (&map, &folder) {
            r.conflict(map, folder, "the folder defines the adapter; keep one.");
        }
        for whole in [&map, &folder].into_iter().flatten() {
            if let Some(one) = flat.first() {
                r.conflict(whole, one, "both describe the adapter; keep one.");
            }
            if let Some(wanted) = wanted.as_ref().filter(|_| !is_on) {
                r.conflict(whole, wanted, "an adapter is trained only with `use_peft: true`.");
            }
        }
        let config = read_flat(r);
        if let Some(folder) = &folder {
            let path = r.text_of(&folder.spelled, "the path of an adapter's folder", &folder.node);
            return Some(LoraConfig { folder: path.map(PathBuf::from), ..config });
        }
        if let Some(map) = &map {
            return read_map(r, &map.node);
        }
        if let (None, Some(one)) = (&wanted, flat.first()) {
            let rule = "left out unless `use_peft: true` is set: without it no adapter is trained";
            r.out_of_range(&one.spelled, rule, &one.node);
        }
        is_on.then_some(config)
    }
}

fn read_flat(r: &mut Reader<'_>) -> LoraConfig {
    let names = "a name such as `q_proj` or `all-linear`, or a list of names";
    let targets = r.list("lora_target_modules", names);
    LoraConfig {
        r: r.count("lora_r", 1).unwrap_or(1),
        alpha: r.float("lora_alpha", "above 0", |x| x > 0.0).unwrap_or(1.0),
        dropout: r.float("lora_dropout", FRACTION, |x| (0.0..1.0).contains(&x)).unwrap_or(0.0),
        target_modules: if targets.is_empty() { default_targets() } else { targets },
        modules_to_save: r.list("lora_modules_to_save", "a list of modules such as `lm_head`"),
        use_rslora: r.bool("use_rslora").unwrap_or(false),
        folder: None,
    }
}

fn default_targets() -> Vec<String> {
    DEFAULT_TARGETS.map(String::from).into()
}

/// Reads the fields of PEFT's `LoraConfig`, with its defaults.
fn read_map(r: &mut Reader<'_>, node: &Node) -> Option<LoraConfig> {
    let Value::Map(entries) = &node.value else {
        r.wrong_type("peft_config", "a map such as `{r: 16, target_modules: all-linear}`", node);
        return None;
    };
    let mut config = LoraConfig {
        r: 8,
        alpha: 8.0,
        dropout: 0.0,
        target_modules: default_targets(),
        modules_to_save: Vec::new(),
        use_rslora: false,
        folder: None,
    };
    for entry in entries {
        let (key, value) = (format!("peft_config.{}", entry.key), &entry.node);
        match entry.key.as_str() {
            "r" => config.r = r.count_of(&key, 1, value).unwrap_or(1),
            "alpha" | "lora_alpha" => {
                config.alpha = r.float_of(&key, "above 0", |x| x > 0.0, value).unwrap_or(1.0);
            }
            "dropout" | "lora_dropout" => {
                let is_fraction = |x: f64| (0.0..1.0).contains(&x);
                config.dropout = r.float_of(&key, FRACTION, is_fraction, value).unwrap_or(0.0);
            }
            "target_modules" => config.target_modules = r.list_of(&key, "a name or a list of names", value),
            "modules_to_save" if value.is_null() => {}
            "modules_to_save" => config.modules_to_save = r.list_of(&key, "a list of names", value),
            "use_rslora" => match value.bool() {
                Some(on) => config.use_rslora = on,
                None => r.wrong_type(&key, "true or false", value),
            },
            other if IGNORED.contains(&other) => {}
            other => match REFUSED.iter().find(|(name, _)| *name == other) {
                Some((_, harmless)) => {
                    let text = value.json().to_string();
                    if !value.is_null() && !harmless.contains(&text.trim_matches('"')) {
                        r.out_of_range(&key, "left out: it is not implemented", value);
                    }
                }
                None => {
                    let closest = lockstep_core::closest(other, FIELDS);
                    r.fail(Problem::UnknownKey { key, closest }, entry.key_at);
                }
            },
        }
    }
    Some(config)
}
