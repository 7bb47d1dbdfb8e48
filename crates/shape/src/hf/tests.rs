use super::*;
use crate::{Rope, WeightFormat};

const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"num_attention_heads":4,
    "num_key_value_heads":2,"num_hidden_layers":2,"intermediate_size":96,"vocab_size":100,
    "rms_norm_eps":1e-5,"rope_theta":5000.0,"torch_dtype":"bfloat16","eos_token_id":[7,8]}"#;

fn with(key: &str, value: &str) -> Result<ModelShape, ShapeError> {
    let mut config: Value = serde_json::from_str(CONFIG).unwrap();
    config[key] = serde_json::from_str(value).unwrap();
    ModelShape::from_hf(&config, "config.json")
}

#[test]
fn old_and_new_spellings_round_trip() {
    let shape = ModelShape::from_hf_text(CONFIG, "config.json").unwrap();
    assert_eq!((shape.head_dim, shape.kv_heads, shape.rope.theta, shape.eos_id), (16, 2, 5000.0, Some(7)));
    let recompute_output = ModelShape::from_hf_text(&shape.to_hf_text(DType::BF16), "out").unwrap();
    assert_eq!(recompute_output, shape);
    let new = with("rope_parameters", r#"{"rope_theta": 123.0, "rope_type": "default"}"#).unwrap();
    assert_eq!(new.rope.theta, 123.0);
}

#[test]
fn unsupported_options_are_named() {
    let text = |r: Result<ModelShape, ShapeError>| r.unwrap_err().to_string();
    insta::assert_snapshot!(text(with("architectures", r#"["MixtralForCausalLM"]"#)), @"config.json: architecture MixtralForCausalLM is not supported");
    insta::assert_snapshot!(text(with("hidden_act", r#""gelu""#)), @r#"config.json: `hidden_act` = "gelu" is not supported"#);
    insta::assert_snapshot!(text(with("rope_scaling", r#"{"type":"dynamic","factor":4}"#)), @r#"config.json: `rope_scaling.rope_type` = "dynamic" is not supported"#);
    insta::assert_snapshot!(text(with("rope_parameters", r#"{"rope_type":"longrope","factor":4}"#)), @r#"config.json: `rope_parameters.rope_type` = "longrope" is not supported"#);
    insta::assert_snapshot!(text(with("rope_parameters", r#"{"full_attention":{"rope_type":"default"}}"#)), @r#"config.json: `rope_parameters.full_attention` = {"rope_type":"default"} is not supported"#);
    insta::assert_snapshot!(text(with("partial_rotary_factor", "0.5")), @"config.json: `partial_rotary_factor` = 0.5 is not supported");
    insta::assert_snapshot!(text(with("rope_scaling", r#"{"type":"linear"}"#)), @"config.json: `rope_scaling.factor` is missing");
    insta::assert_snapshot!(text(with("rope_scaling", r#"{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":1}"#)), @"config.json: `rope_scaling.high_freq_factor` 1 is not above `rope_scaling.low_freq_factor` 4");
    insta::assert_snapshot!(text(with("sliding_window", "4096")), @"config.json: `sliding_window` = 4096 is not an option of LlamaForCausalLM");
    insta::assert_snapshot!(text(with("layer_types", r#"["full_attention","chunked_attention"]"#)), @r#"config.json: `layer_types` = "chunked_attention" is not supported"#);
    insta::assert_snapshot!(text(with("num_attention_heads", "6")), @"config.json: `hidden_size` 64 is not a multiple of `num_attention_heads` 6");
    insta::assert_snapshot!(text(with("hidden_size", r#""64""#)), @r#"config.json: `hidden_size` should be a positive integer, found "64""#);
    insta::assert_snapshot!(text(with("num_key_value_heads", "3")), @"config.json: `num_attention_heads` 4 is not a multiple of `num_key_value_heads` 3");
    insta::assert_snapshot!(text(with("vocab_size", "null")), @"config.json: `vocab_size` is missing");
}

const BITSANDBYTES: &str = r#"{"quant_method":"bitsandbytes","load_in_4bit":true,"_load_in_4bit":true,
    "load_in_8bit":false,"bnb_4bit_quant_type":"nf4","bnb_4bit_use_double_quant":true,"bnb_4bit_quant_storage":"uint8",
    "bnb_4bit_compute_dtype":"bfloat16","llm_int8_skip_modules":["lm_head"],"llm_int8_threshold":6.0,
    "llm_int8_enable_fp32_cpu_offload":false,"llm_int8_has_fp16_weight":false}"#;

#[test]
fn weights_of_bitsandbytes() {
    let read = |text: &str| with("quantization_config", text).map(|shape| shape.frozen_projections);
    assert_eq!(read("null").unwrap(), WeightFormat::Storage);
    assert_eq!(read(BITSANDBYTES).unwrap(), WeightFormat::Nf4);
    let other = |from: &str, to: &str| {
        assert!(BITSANDBYTES.contains(from));
        read(&BITSANDBYTES.replace(from, to)).unwrap_err().to_string()
    };
    insta::assert_snapshot!(other(r#""nf4""#, r#""fp4""#), @r#"config.json: `quantization_config.bnb_4bit_quant_type` = "fp4" is not supported"#);
    insta::assert_snapshot!(other(r#""bnb_4bit_use_double_quant":true,"#, ""), @"config.json: `quantization_config.bnb_4bit_use_double_quant` is missing");
    insta::assert_snapshot!(other(r#""bnb_4bit_use_double_quant":true"#, r#""bnb_4bit_use_double_quant":false"#), @"config.json: `quantization_config.bnb_4bit_use_double_quant` = false is not supported");
    insta::assert_snapshot!(other(r#""load_in_8bit":false"#, r#""load_in_8bit":true"#), @"config.json: `quantization_config.load_in_8bit` = true is not supported");
    insta::assert_snapshot!(other(r#"["lm_head"]"#, r#"["lm_head","model.layers.1.mlp"]"#), @r#"config.json: `quantization_config.llm_int8_skip_modules` = ["lm_head","model.layers.1.mlp"] is not supported"#);
    insta::assert_snapshot!(other(r#"["lm_head"]"#, r#"["down_proj"]"#), @r#"config.json: `quantization_config.llm_int8_skip_modules` = ["down_proj"] is not supported"#);
    insta::assert_snapshot!(other(r#""uint8""#, r#""bfloat16""#), @r#"config.json: `quantization_config.bnb_4bit_quant_storage` = "bfloat16" is not supported"#);
    insta::assert_snapshot!(read(r#"{"quant_method":"gptq","bits":4}"#).unwrap_err(), @r#"config.json: `quantization_config.quant_method` = "gptq" is not supported"#);
}

/// The shape of another family; `keys` override those of [`CONFIG`].
fn family(class: &str, keys: &str) -> Result<ModelShape, ShapeError> {
    let mut config: Value = serde_json::from_str(CONFIG).unwrap();
    config["architectures"] = json!([class]);
    let Value::Object(keys) = serde_json::from_str(keys).unwrap() else { panic!("an object") };
    for (key, value) in keys {
        config[key] = value;
    }
    ModelShape::from_hf(&config, "config.json")
}

fn windows(shape: &ModelShape) -> Vec<Option<usize>> {
    (0..shape.layers).map(|layer| shape.window_of(layer)).collect()
}

#[test]
fn sliding_windows_match_transformers() {
    let mistral = |keys| windows(&family("MistralForCausalLM", keys).unwrap());
    assert_eq!(mistral("{}"), [Some(4096); 2]);
    assert_eq!(mistral(r#"{"sliding_window":null}"#), [None; 2]);
    assert_eq!(mistral(r#"{"sliding_window":7}"#), [Some(7); 2]);
    for class in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let qwen = |keys| windows(&family(class, keys).unwrap());
        assert_eq!(qwen(r#"{"sliding_window":7}"#), [None; 2]);
        assert_eq!(qwen(r#"{"use_sliding_window":true}"#), [None; 2]);
        assert_eq!(qwen(r#"{"use_sliding_window":true,"max_window_layers":1}"#), [None, Some(4096)]);
        assert_eq!(
            qwen(
                r#"{"use_sliding_window":true,"sliding_window":7,
                "layer_types":["sliding_attention","full_attention"]}"#
            ),
            [Some(7), None]
        );
    }
    let text = |class, keys| family(class, keys).unwrap_err().to_string();
    insta::assert_snapshot!(text("Qwen2ForCausalLM", r#"{"layer_types":["sliding_attention","full_attention"]}"#), @"config.json: `layer_types` has sliding layers, but no `sliding_window` is in use");
    insta::assert_snapshot!(text("Qwen2ForCausalLM", r#"{"layer_types":["full_attention"]}"#), @"config.json: `layer_types` names 1 layers, `num_hidden_layers` is 2");
    insta::assert_snapshot!(text("MistralForCausalLM", r#"{"layer_types":["sliding_attention","full_attention"]}"#), @r#"config.json: `layer_types` = ["sliding_attention","full_attention"] is not an option of MistralForCausalLM"#);
    insta::assert_snapshot!(text("MistralForCausalLM", r#"{"use_sliding_window":false}"#), @"config.json: `use_sliding_window` = false is not an option of MistralForCausalLM");
    insta::assert_snapshot!(text("Qwen2ForCausalLM", r#"{"use_sliding_window":true,"sliding_window":0}"#), @"config.json: `sliding_window` should be a positive integer, found 0");
}

#[test]
fn biases_and_defaults_depend_on_the_family() {
    let biases = |class, keys| family(class, keys).map(|shape| shape.biases).map_err(|e| e.to_string());
    let (all, none) = (Biases { qkv: true, out: true, mlp: false }, Biases::default());
    assert_eq!(biases("Qwen2ForCausalLM", "{}"), Ok(Biases { out: false, ..all }));
    assert_eq!(biases("Qwen3ForCausalLM", "{}"), Ok(none));
    assert_eq!(biases("Qwen3ForCausalLM", r#"{"attention_bias":true}"#), Ok(all));
    assert_eq!(biases("LlamaForCausalLM", r#"{"mlp_bias":true}"#), Ok(Biases { mlp: true, ..none }));
    insta::assert_snapshot!(biases("MistralForCausalLM", r#"{"attention_bias":true}"#).unwrap_err(), @"config.json: `attention_bias` = true is not an option of MistralForCausalLM");

    let shape = family("MistralForCausalLM", r#"{"num_key_value_heads":null}"#).unwrap();
    assert_eq!((shape.kv_heads, shape.max_positions, shape.norm_eps), (4, 131_072, 1e-5));
    assert_eq!(family("Qwen3ForCausalLM", "{}").unwrap().head_dim, 128);
    assert_eq!(family("Qwen2ForCausalLM", "{}").unwrap().head_dim, 16);
}

#[test]
fn both_spellings_of_scaled_rotary_embedding_round_trip() {
    let kinds = [
        (r#""factor":4"#, "linear"),
        (
            r#""factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":32"#,
            "llama3",
        ),
        (r#""factor":4"#, "yarn"),
        (r#""factor":4,"beta_fast":16,"truncate":false,"attention_factor":0.5"#, "yarn"),
        (r#""factor":4,"mscale":1.5,"mscale_all_dim":0.5,"original_max_position_embeddings":16"#, "yarn"),
    ];
    for (keys, kind) in kinds {
        let old = with("rope_scaling", &format!(r#"{{{keys},"type":"{kind}"}}"#)).unwrap();
        let new = format!(r#"{{{keys},"rope_type":"{kind}","rope_theta":5000.0}}"#);
        assert_eq!(with("rope_parameters", &new).unwrap(), old);
        assert_ne!(old.rope, Rope::plain(5000.0));
        let written = old.to_hf_text(DType::F32);
        assert_eq!(ModelShape::from_hf_text(&written, "out").unwrap(), old);
        // Each spelling alone is complete.
        for key in ["rope_scaling", "rope_parameters"] {
            let mut config: Value = serde_json::from_str(&written).unwrap();
            config.as_object_mut().unwrap().remove(key);
            assert_eq!(ModelShape::from_hf(&config, "out").unwrap(), old);
        }
    }
    for (class, keys) in [
        ("MistralForCausalLM", r#"{"sliding_window":5}"#),
        ("MistralForCausalLM", r#"{"sliding_window":null}"#),
        ("Qwen2ForCausalLM", r#"{"use_sliding_window":true,"max_window_layers":1}"#),
        ("Qwen3ForCausalLM", r#"{"attention_bias":true}"#),
        ("LlamaForCausalLM", r#"{"attention_bias":true,"mlp_bias":true}"#),
    ] {
        let shape = family(class, keys).unwrap();
        assert_eq!(ModelShape::from_hf_text(&shape.to_hf_text(DType::F32), "out").unwrap(), shape);
    }
}

#[test]
fn dropout_is_read_and_written() {
    let shape = family("Qwen2ForCausalLM", r#"{"attention_dropout":0.25,"hidden_dropout":0.5}"#).unwrap();
    assert_eq!(shape.dropout, Dropout { attention: 0.25, residual: 0.5 });
    assert_eq!(ModelShape::from_hf_text(&shape.to_hf_text(DType::F32), "out").unwrap(), shape);
    let text = |r: Result<ModelShape, ShapeError>| r.unwrap_err().to_string();
    insta::assert_snapshot!(text(with("attention_dropout", "1.0")), @"config.json: `attention_dropout` should be at least 0 and below 1, found 1.0");
    insta::assert_snapshot!(text(family("LlamaForCausalLM", r#"{"resid_pdrop":0.1,"hidden_dropout":0.2}"#)), @"config.json: `hidden_dropout` 0.2 contradicts another key with 0.1");
}
