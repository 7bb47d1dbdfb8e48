//! Environment variables of other trainers, in one list. docs/environment.md has all variables that Lockstep reads.

use crate::keys;
use crate::raw::{RawConfig, Setting};
use crate::yaml::{At, Input, Node, Value};

/// What an environment variable does here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VariableEffect {
    /// It sets this key, unless a file or a flag does.
    Key(&'static str),
    /// The program or a library that it uses reads it.
    Read(&'static str),
    /// It has no effect, for this reason.
    None(&'static str),
}

/// An environment variable that users of other trainers set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    pub name: &'static str,
    pub effect: VariableEffect,
}

const fn read(name: &'static str, what: &'static str) -> Variable {
    Variable { name, effect: VariableEffect::Read(what) }
}

const fn none(name: &'static str, why: &'static str) -> Variable {
    Variable { name, effect: VariableEffect::None(why) }
}

/// The environment variables of other trainers and what they do here.
pub const VARIABLES: &[Variable] = &[
    Variable { name: "NCCL_TIMEOUT", effect: VariableEffect::Key("collective_timeout") },
    read("CUDA_VISIBLE_DEVICES", "the GPUs that ranks use; never changed"),
    read("MASTER_ADDR", "the host of the rendezvous"),
    read("MASTER_PORT", "the port of the rendezvous"),
    read("RANK", "this rank, if another launcher has started it"),
    read("WORLD_SIZE", "the number of ranks"),
    read("LOCAL_RANK", "this rank on its host"),
    read("LOCAL_WORLD_SIZE", "the number of ranks on this host"),
    read("GROUP_RANK", "this node"),
    read("NODE_RANK", "this node"),
    read("NCCL_DEBUG", "NCCL reads it"),
    read("NCCL_IB_DISABLE", "NCCL reads it"),
    read("NCCL_P2P_DISABLE", "NCCL reads it"),
    read("NCCL_SOCKET_IFNAME", "NCCL reads it"),
    read("NCCL_ALGO", "NCCL reads it"),
    read("CUDA_LAUNCH_BLOCKING", "CUDA reads it"),
    read("HF_HOME", "the cache of models and datasets"),
    read("HF_TOKEN", "the token for the Hub"),
    read("HF_HUB_OFFLINE", "whether the Hub may be asked"),
    none("TORCH_DISTRIBUTED_DEBUG", "every collective is checked"),
    none("DEEPSPEED_LOG_LEVEL", "DeepSpeed is not used, and does not read it either"),
    none("DEEPSPEED_TIMEOUT", "`collective_timeout` sets the timeout, in seconds"),
    none("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "`collective_timeout` sets the timeout"),
    none("TORCH_NCCL_ASYNC_ERROR_HANDLING", "a failed rank ends the run at once"),
    none("NCCL_ASYNC_ERROR_HANDLING", "a failed rank ends the run at once"),
    none("PYTORCH_CUDA_ALLOC_CONF", "memory is planned and allocated once, so it does not fragment"),
    none("PYTORCH_ALLOC_CONF", "memory is planned and allocated once, so it does not fragment"),
    none("OMP_NUM_THREADS", "`threads` sets the threads of a rank"),
    none("MKL_NUM_THREADS", "`threads` sets the threads of a rank"),
    none("TOKENIZERS_PARALLELISM", "tokenization always uses all cores"),
    read("WANDB_PROJECT", "the project of `report_to: wandb`"),
    read("WANDB_ENTITY", "the user or team of `report_to: wandb`"),
    none("WANDB_DISABLED", "`report_to` names the trackers"),
    none("WANDB_MODE", "runs are written for `wandb sync`, and nothing is uploaded"),
    none("ACCELERATE_USE_FSDP", "`strategy` sets it"),
    none("ACCELERATE_USE_DEEPSPEED", "`strategy` sets it"),
    none("ACCELERATE_LOG_LEVEL", "accelerate is not used"),
    none("PYTHONPATH", "no script is run"),
    none("PYTHONUNBUFFERED", "no script is run"),
    none("TRANSFORMERS_VERBOSITY", "transformers is not used"),
    none("TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE decides whether the Hub may be asked"),
];

/// The variable with this name, if it is in the list.
pub(crate) fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

/// Takes the variables that set keys, and notes those of a launch line that have no effect.
pub(crate) fn read_all(raw: &mut RawConfig<'_>) {
    let pasted = raw.texts.launch_line.map_or(0, |line| line.variables.len());
    let first_pasted = raw.texts.variables.len() - pasted;
    let given: Vec<(usize, String, String)> = raw
        .texts
        .variables
        .iter()
        .enumerate()
        .map(|(idx, (name, value))| (idx, (*name).to_owned(), (*value).to_owned()))
        .collect();
    for (idx, name, text) in given {
        let at = At { from: Input::Variable(idx), line: 1, column: 1, width: 1 };
        match find(&name).map(|variable| variable.effect) {
            Some(VariableEffect::Key(key)) => {
                let node = Node { value: Value::Scalar { text, plain: true }, at };
                raw.all.push((keys::key(key), Setting::new(name, at, node)));
            }
            Some(VariableEffect::None(why)) if idx >= first_pasted => {
                raw.notes.push(format!("the variable {name} has no effect here: {why}"));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_listed_once_and_sets_a_key() {
        for variable in VARIABLES {
            assert_eq!(
                VARIABLES.iter().filter(|other| other.name == variable.name).count(),
                1,
                "{}",
                variable.name
            );
            if let VariableEffect::Key(key) = variable.effect {
                assert_eq!(keys::key(key).name, key);
            }
        }
    }
}
