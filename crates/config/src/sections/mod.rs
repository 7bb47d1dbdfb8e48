//! The sections of a `RunConfig`. Each file has the types of one section and reads them from the keys.

mod algorithm;
mod batch;
mod data;
mod device;
mod dpo;
mod eval;
mod groups;
mod grpo;
mod lora;
mod model;
mod optim;
mod output;
mod plan;
mod ppo;
mod precision;
mod quantisation;
mod reference_model;
mod reward;
mod reward_function;
mod reward_options;
mod rewards;
mod rloo;
mod rollout;
mod schedule;

pub use algorithm::{AlgorithmConfig, AlgorithmName, is_algorithm};
pub use batch::BatchConfig;
pub use data::{
    ChatTemplateChoice, DataConfig, HubFolders, NamedDataset, OnBadRow, OnLongRow, Packing, TokenizerChoice,
    Truncation,
};
pub use device::{DeviceConfig, DeviceKind};
pub use dpo::{DpoConfig, DpoLoss, FDivergence};
pub use eval::{EvalConfig, EvalMetric, EvalStrategy};
pub use groups::Groups;
pub use grpo::{GrpoConfig, GrpoLoss, ImportanceSamplingLevel, SapoTemperatures, ScaleRewards, VespoParams};
pub use lora::LoraConfig;
pub use model::{InitialWeights, ModelConfig, ModelSource, NAMED_MODELS};
pub use optim::{LrScaling, OptimConfig, OptimizerName, Warmup};
pub use output::{OutputConfig, Resume, SaveStrategy};
pub use plan::{AccumulationOrder, CarrierName, Offload, PlanConfig, Recompute, StrategyName};
pub use ppo::{AdaptiveKl, KlEstimator, PpoConfig};
pub use precision::{LossScaling, Precision};
pub(crate) use quantisation::check_compute_dtype;
pub use reference_model::SyncRefModel;
pub use reward::RewardConfig;
pub use reward_function::{
    HttpReward, NumberSource, ProgramReward, RewardFunctionConfig, RewardFunctionKind,
};
pub use rewards::{OnRewardError, RewardsConfig};
pub use rloo::RlooConfig;
pub(crate) use rollout::Lengths;
pub use rollout::SamplingConfig;
pub use schedule::{LrSchedulerType, MinLr, WarmupLrParams, WarmupType};
