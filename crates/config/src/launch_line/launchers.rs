//! The flags of torchrun, deepspeed and `accelerate launch`, with underscores, and what they mean here.

use crate::launch_line::LaunchProgram;
use crate::launch_settings::LaunchKey;
use crate::references::FileRole;

/// What a flag of a launcher means.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// A key of the configuration.
    Key(&'static str),
    Launch(LaunchKey),
    File(FileRole),
    /// The number of nodes.
    Nodes,
    Inert(&'static str),
    /// Refused, with what to do.
    Refused(&'static str),
}

/// A flag of a launcher.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    name: &'static str,
    pub(super) has_value: bool,
    pub(super) action: Action,
}

const fn value(name: &'static str, action: Action) -> Rule {
    Rule { name, has_value: true, action }
}

const fn switch(name: &'static str, action: Action) -> Rule {
    Rule { name, has_value: false, action }
}

const RENDEZVOUS: Action = Action::Inert("nodes find each other by the master address and port");
const NO_SCRIPT: Action = Action::Inert("no script is run");
const ONE_COMMAND: Action = Action::Inert("every node runs the same command");
const LOGS: Action = Action::Inert("rank 0 prints for all ranks; `--tee` copies the output into files");
const PLANNED: Action = Action::Inert("the plan determines it");

const TORCHRUN: &[Rule] = &[
    value("nproc_per_node", Action::Launch(LaunchKey::Nproc)),
    value("nproc", Action::Launch(LaunchKey::Nproc)),
    value("nnodes", Action::Nodes),
    value("node_rank", Action::Launch(LaunchKey::NodeRank)),
    value("master_addr", Action::Launch(LaunchKey::MasterAddr)),
    value("master_port", Action::Launch(LaunchKey::MasterPort)),
    value("rdzv_endpoint", Action::Launch(LaunchKey::Endpoint)),
    value("rdzv_backend", RENDEZVOUS),
    value("rdzv_id", RENDEZVOUS),
    value("rdzv_conf", RENDEZVOUS),
    value("local_addr", RENDEZVOUS),
    switch("standalone", Action::Launch(LaunchKey::Standalone)),
    value("max_restarts", Action::Launch(LaunchKey::MaxRestarts)),
    value("monitor_interval", Action::Inert("a failed rank is noticed at once")),
    value("start_method", Action::Inert("ranks are always new processes")),
    value("role", Action::Inert("ranks have no roles")),
    value("log_dir", Action::Launch(LaunchKey::LogDir)),
    value("tee", Action::Launch(LaunchKey::Tee)),
    value("t", Action::Launch(LaunchKey::Tee)),
    value("redirects", LOGS),
    value("r", LOGS),
    value("local_ranks_filter", LOGS),
    value("logs_specs", LOGS),
    value("numa_binding", Action::Inert("every rank is pinned to its share of the cores")),
    switch("no_python", NO_SCRIPT),
    switch("run_path", NO_SCRIPT),
    switch("use_env", NO_SCRIPT),
];

const DEEPSPEED: &[Rule] = &[
    value("num_gpus", Action::Launch(LaunchKey::Nproc)),
    value("num_nodes", Action::Nodes),
    value("node_rank", Action::Launch(LaunchKey::NodeRank)),
    value("master_addr", Action::Launch(LaunchKey::MasterAddr)),
    value("master_port", Action::Launch(LaunchKey::MasterPort)),
    value("hostfile", Action::Launch(LaunchKey::Hostfile)),
    value("H", Action::Launch(LaunchKey::Hostfile)),
    value("include", Action::Launch(LaunchKey::Include)),
    value("i", Action::Launch(LaunchKey::Include)),
    value("exclude", Action::Launch(LaunchKey::Exclude)),
    value("e", Action::Launch(LaunchKey::Exclude)),
    value("launcher", ONE_COMMAND),
    value("launcher_args", ONE_COMMAND),
    value("ssh_port", ONE_COMMAND),
    switch("no_ssh", ONE_COMMAND),
    switch("no_ssh_check", ONE_COMMAND),
    switch("force_multi", ONE_COMMAND),
    switch("no_python", NO_SCRIPT),
    switch("no_local_rank", NO_SCRIPT),
    switch("save_pid", LOGS),
    value("enable_each_rank_log", Action::Launch(LaunchKey::LogDir)),
    value("log_level", LOGS),
    switch("bind_cores_to_rank", Action::Inert("every rank is pinned to its share of the cores")),
    value("bind_core_list", Action::Inert("every rank is pinned to its share of the cores")),
    value("autotuning", Action::Refused("remove it and use `recompute: auto` with `memory_budget_gib`.")),
    switch("elastic_training", Action::Refused("remove it: the number of ranks is fixed.")),
];

const ACCELERATE: &[Rule] = &[
    value("config_file", Action::File(FileRole::Accelerate)),
    value("num_processes", Action::Launch(LaunchKey::NumProcesses)),
    value("num_machines", Action::Nodes),
    value("machine_rank", Action::Launch(LaunchKey::NodeRank)),
    value("main_process_ip", Action::Launch(LaunchKey::MasterAddr)),
    value("main_process_port", Action::Launch(LaunchKey::MasterPort)),
    value("gpu_ids", Action::Launch(LaunchKey::GpuIds)),
    value("mixed_precision", Action::Key("mixed_precision")),
    value("gradient_accumulation_steps", Action::Key("gradient_accumulation_steps")),
    value("gradient_clipping", Action::Key("max_grad_norm")),
    value("num_cpu_threads_per_process", Action::Key("threads")),
    switch("cpu", Action::Key("use_cpu")),
    switch("use_cpu", Action::Key("use_cpu")),
    switch("multi_gpu", Action::Inert("the number of processes says it")),
    switch("use_deepspeed", Action::Inert("`zero_stage` or the DeepSpeed file says it")),
    value("deepspeed_config_file", Action::File(FileRole::DeepSpeed)),
    value("zero_stage", Action::Key("zero_optimization.stage")),
    value("offload_optimizer_device", Action::Key("offload_optimizer")),
    value("offload_param_device", Action::Key("offload_param")),
    value("offload_optimizer_nvme_path", Action::Key("nvme_path")),
    value("offload_param_nvme_path", Action::Key("nvme_path")),
    value("zero3_init_flag", Action::Inert("weights are created sharded")),
    value("zero3_save_16bit_model", Action::Inert("the exported model folder is always complete")),
    value("deepspeed_hostfile", Action::Launch(LaunchKey::Hostfile)),
    value("deepspeed_exclusion_filter", Action::Launch(LaunchKey::Exclude)),
    value("deepspeed_inclusion_filter", Action::Launch(LaunchKey::Include)),
    value("deepspeed_multinode_launcher", ONE_COMMAND),
    switch("use_fsdp", Action::Key("fsdp")),
    value("fsdp_version", Action::Key("fsdp_config.fsdp_version")),
    value("fsdp_sharding_strategy", Action::Key("fsdp_config.fsdp_sharding_strategy")),
    value("fsdp_reshard_after_forward", Action::Key("fsdp_config.fsdp_reshard_after_forward")),
    value("fsdp_offload_params", Action::Key("fsdp_config.fsdp_offload_params")),
    value("fsdp_activation_checkpointing", Action::Key("fsdp_config.fsdp_activation_checkpointing")),
    value("fsdp_auto_wrap_policy", Action::Key("fsdp_config.fsdp_auto_wrap_policy")),
    value(
        "fsdp_transformer_layer_cls_to_wrap",
        Action::Key("fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    ),
    value("fsdp_min_num_params", Action::Key("fsdp_config.fsdp_min_num_params")),
    value("fsdp_backward_prefetch", Action::Key("fsdp_config.fsdp_backward_prefetch")),
    value("fsdp_backward_prefetch_policy", Action::Key("fsdp_config.fsdp_backward_prefetch_policy")),
    value("fsdp_forward_prefetch", Action::Key("fsdp_config.fsdp_forward_prefetch")),
    value("fsdp_state_dict_type", Action::Key("fsdp_config.fsdp_state_dict_type")),
    value("fsdp_use_orig_params", Action::Key("fsdp_config.fsdp_use_orig_params")),
    value("fsdp_cpu_ram_efficient_loading", Action::Key("fsdp_config.fsdp_cpu_ram_efficient_loading")),
    value("fsdp_sync_module_states", Action::Key("fsdp_config.fsdp_sync_module_states")),
    value("dynamo_backend", Action::Key("torch_compile")),
    value("max_restarts", Action::Launch(LaunchKey::MaxRestarts)),
    value("monitor_interval", Action::Inert("a failed rank is noticed at once")),
    value("rdzv_backend", RENDEZVOUS),
    value("rdzv_conf", RENDEZVOUS),
    switch("same_network", RENDEZVOUS),
    value("role", Action::Inert("ranks have no roles")),
    value("tee", Action::Launch(LaunchKey::Tee)),
    value("log_dir", Action::Launch(LaunchKey::LogDir)),
    switch("downcast_bf16", PLANNED),
    switch("enable_cpu_affinity", Action::Inert("every rank is pinned to its share of the cores")),
    switch("debug", LOGS),
    switch("quiet", LOGS),
    switch("no_python", NO_SCRIPT),
    value("main_training_function", NO_SCRIPT),
    switch("tpu", Action::Refused("use a CUDA GPU or `--cpu`.")),
    switch("use_megatron_lm", Action::Refused("use FSDP or DeepSpeed.")),
    switch(
        "use_parallelism_config",
        Action::Refused("use FSDP: models and sequences are not split over ranks."),
    ),
];

const fn rules(program: LaunchProgram) -> &'static [Rule] {
    match program {
        LaunchProgram::Torchrun => TORCHRUN,
        LaunchProgram::DeepSpeed => DEEPSPEED,
        LaunchProgram::Accelerate => ACCELERATE,
        LaunchProgram::Trl(_) | LaunchProgram::Python => &[],
    }
}

pub(super) fn find(program: LaunchProgram, key: &str) -> Option<&'static Rule> {
    rules(program).iter().find(|rule| rule.name == key)
}

pub(super) fn names(program: LaunchProgram) -> impl Iterator<Item = &'static str> {
    rules(program).iter().map(|rule| rule.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_set_keys_that_exist() {
        for program in [LaunchProgram::Torchrun, LaunchProgram::DeepSpeed, LaunchProgram::Accelerate] {
            for rule in rules(program) {
                assert_eq!(
                    rules(program).iter().filter(|other| other.name == rule.name).count(),
                    1,
                    "{}",
                    rule.name
                );
                if let Action::Key(key) = rule.action {
                    let is_part = key.starts_with("fsdp_config.") || key == "zero_optimization.stage";
                    assert!(crate::is_known_key(key) || is_part, "{}: {key}", rule.name);
                }
            }
        }
    }
}
