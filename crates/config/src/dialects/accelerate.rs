//! The YAML of `accelerate config`.

use super::{PeerEntry, Rule, Table, deepspeed, fsdp};
use crate::error::Problem;
use crate::launch_settings::LaunchKey;
use crate::raw::RawConfig;
use crate::value;
use crate::yaml::{Entry, Value};

use Rule::{Inert, Key, Launch, Only, Refused, Special};

const OFF: &[&str] = &["false", "no", "none"];
const NOT_TPU: &str = "TPUs are not used";
const ONE_RENDEZVOUS: &str = "nodes find each other by `main_process_ip` and `main_process_port`";

pub(super) const TABLE: Table = Table {
    rows: &[
        ("compute_environment", Only(&["local_machine"], "this machine trains", "use LOCAL_MACHINE.")),
        ("distributed_type", Special),
        ("mixed_precision", Key("mixed_precision")),
        ("use_cpu", Key("use_cpu")),
        ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
        ("gradient_clipping", Key("max_grad_norm")),
        ("num_processes", Launch(LaunchKey::NumProcesses)),
        ("num_machines", Key("nodes")),
        ("machine_rank", Launch(LaunchKey::NodeRank)),
        ("main_process_ip", Launch(LaunchKey::MasterAddr)),
        ("main_process_port", Launch(LaunchKey::MasterPort)),
        ("gpu_ids", Special),
        ("fsdp_config", Special),
        ("deepspeed_config", Special),
        (
            "dynamo_backend",
            Only(&["no", "none"], "models are not compiled", "remove it: models are not compiled."),
        ),
        ("dynamo_config", Special),
        ("debug", Inert("every collective is checked")),
        ("downcast_bf16", Inert(NOT_TPU)),
        ("enable_cpu_affinity", Inert("every rank is pinned to its share of the cores")),
        ("main_training_function", Inert("no script is run")),
        ("rdzv_backend", Only(&["static", "c10d"], ONE_RENDEZVOUS, "use `rdzv_backend: static`.")),
        ("rdzv_conf", Inert(ONE_RENDEZVOUS)),
        ("same_network", Inert(ONE_RENDEZVOUS)),
        ("tpu_env", Inert(NOT_TPU)),
        ("tpu_use_cluster", Inert(NOT_TPU)),
        ("tpu_use_sudo", Inert(NOT_TPU)),
        ("tpu_name", Inert(NOT_TPU)),
        ("tpu_zone", Inert(NOT_TPU)),
        ("command_file", Inert(NOT_TPU)),
        ("commands", Inert(NOT_TPU)),
        ("use_xpu", Only(OFF, "it is off", "use `use_cpu: true` or a CUDA GPU.")),
        ("ipex_config", Inert("IPEX is not used")),
        ("mpirun_config", Inert("MPI is not used")),
        ("megatron_lm_config", Refused("use FSDP or DeepSpeed: a model is not split by layers or heads.")),
        ("fp8_config", Refused("fp8 is not implemented; use `mixed_precision: bf16`.")),
        ("parallelism_config", Special),
    ],
    special,
    has_auto: false,
};

/// The keys of `deepspeed_config` that are not DeepSpeed's own.
pub(super) const PLUGIN: Table = Table {
    rows: &[
        ("zero_stage", Special),
        ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
        ("gradient_clipping", Key("max_grad_norm")),
        ("offload_optimizer_device", Key("offload_optimizer")),
        ("offload_param_device", Key("offload_param")),
        ("offload_optimizer_nvme_path", Key("nvme_path")),
        ("offload_param_nvme_path", Key("nvme_path")),
        // The file is a source of its own.
        ("deepspeed_config_file", Special),
        ("zero3_init_flag", Inert("weights are created sharded")),
        ("zero3_save_16bit_model", Inert("the exported model folder is always complete")),
        ("deepspeed_hostfile", Launch(LaunchKey::Hostfile)),
        ("deepspeed_exclusion_filter", Launch(LaunchKey::Exclude)),
        ("deepspeed_inclusion_filter", Launch(LaunchKey::Include)),
        ("seq_parallel_communication_data_type", Inert("sequences are not split over ranks")),
        ("deepspeed_multinode_launcher", Inert("every node runs the same command")),
        (
            "deepspeed_moe_layer_cls_names",
            Only(OFF, "the models have no experts", "the models have no experts."),
        ),
        ("msamp_opt_level", Refused("fp8 is not implemented; use `mixed_precision: bf16`.")),
    ],
    special,
    has_auto: true,
};

pub(crate) fn translate(raw: &mut RawConfig<'_>, entries: Vec<Entry>) {
    raw.translate(&TABLE, "", "", entries);
}

fn special(raw: &mut RawConfig<'_>, path: &str, entry: PeerEntry) {
    match path {
        "distributed_type" => distributed_type(raw, &entry),
        "gpu_ids" => match entry.node.text() {
            Some(text) if text.eq_ignore_ascii_case("all") => {
                raw.no_effect(&entry.spelled, entry.key_at, "all GPUs are used by default");
            }
            _ => raw
                .launch
                .push((LaunchKey::GpuIds, crate::raw::Setting::new(entry.spelled, entry.key_at, entry.node))),
        },
        "fsdp_config" => match entry.node.value {
            Value::Map(entries) => fsdp::translate(raw, "fsdp_config.", entries),
            _ if entry.node.is_null() => {}
            _ => raw.wrong_type(&entry, "a map"),
        },
        "deepspeed_config" => match entry.node.value {
            Value::Map(entries) => raw.translate(&PLUGIN, "", "deepspeed_config.", entries),
            _ if entry.node.is_null() => {}
            _ => raw.wrong_type(&entry, "a map"),
        },
        "zero_stage" => deepspeed::stage(raw, &entry),
        // It is read as a file of its own.
        "deepspeed_config_file" => {}
        "dynamo_config" => dynamo(raw, &entry),
        _ => parallelism(raw, &entry),
    }
}

fn distributed_type(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let Some(text) = entry.node.text() else { return raw.wrong_type(entry, "a word") };
    match text.to_uppercase().as_str() {
        // YAML's `no`.
        "NO" | "FALSE" => {}
        "MULTI_GPU" | "MULTI_CPU" => raw.set_word("strategy", entry, "ddp"),
        "DEEPSPEED" => {}
        "FSDP" => fsdp::switch(raw, entry),
        "MULTI_XPU" | "MULTI_NPU" | "MULTI_MLU" | "MULTI_SDAA" | "MULTI_MUSA" | "MULTI_HPU"
        | "MULTI_NEURON" | "XLA" | "TPU" => raw.refuse_value(entry, "use MULTI_GPU or MULTI_CPU."),
        "MEGATRON_LM" => raw.refuse_value(entry, "use FSDP or DEEPSPEED."),
        _ => {
            let allowed = vec!["NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"];
            let problem = Problem::UnknownValue { key: "distributed_type", value: text.to_owned(), allowed };
            raw.fail(problem, entry.node.at);
        }
    }
}

/// `dynamo_config: {dynamo_backend: INDUCTOR}` compiles models.
fn dynamo(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let Value::Map(entries) = &entry.node.value else {
        return raw.no_effect(&entry.spelled, entry.key_at, "models are not compiled");
    };
    let backend = entries.iter().find(|e| e.key == "dynamo_backend").and_then(|e| e.node.text());
    match backend.map(value::fold).as_deref() {
        None | Some("no") => raw.no_effect(&entry.spelled, entry.key_at, "models are not compiled"),
        Some(_) => raw.refuse(entry, "remove it: models are not compiled."),
    }
}

/// `parallelism_config: {parallelism_config_tp_size: 1}` splits models and sequences.
fn parallelism(raw: &mut RawConfig<'_>, entry: &PeerEntry) {
    let Value::Map(entries) = &entry.node.value else {
        return raw.no_effect(&entry.spelled, entry.key_at, "it is empty");
    };
    let splits = entries.iter().any(|e| {
        (e.key.contains("tp_size") || e.key.contains("cp_size") || e.key.contains("sp_size"))
            && e.node.integer() != Some(1)
    });
    match splits {
        true => raw.refuse(entry, "use `fsdp_config`: models and sequences are not split over ranks."),
        false => raw.refuse(entry, "use `fsdp_config` with FULL_SHARD or HYBRID_SHARD."),
    }
}
