//! The sections of a `RunConfig`. Each file has the types of one section and reads them from the keys.

mod batch;
mod data;
mod device;
mod eval;
mod model;
mod optim;
mod output;
mod plan;
mod precision;
mod schedule;

pub use batch::BatchConfig;
pub use data::{
    ChatTemplateChoice, DataConfig, HubFolders, NamedDataset, OnBadRow, OnLongRow, Packing, TokenizerChoice,
    Truncation,
};
pub use device::{DeviceConfig, DeviceKind};
pub use eval::{EvalConfig, EvalMetric, EvalStrategy};
pub use model::{InitialWeights, ModelConfig, ModelSource, NAMED_MODELS};
pub use optim::{LrScaling, OptimConfig, OptimizerName, Warmup};
pub use output::{OutputConfig, Resume, SaveStrategy};
pub use plan::{
    AccumulationOrder, Adapter, Algorithm, CarrierName, Offload, PlanConfig, Recompute, StrategyName,
};
pub use precision::{LossScaling, Precision};
pub use schedule::{LrSchedulerType, MinLr, WarmupLrParams, WarmupType};
