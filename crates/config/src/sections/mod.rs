//! The sections of a `RunConfig`: one file each, with its types and how they are read from the keys.

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
    ChatTemplate, DataConfig, HubFolders, NamedDataset, OnBadRow, OnLongRow, Packing, Tokenizer, Truncation,
};
pub use device::{DeviceConfig, DeviceKind};
pub use eval::{EvalConfig, EvalMetric, EvalWhen};
pub use model::{Init, ModelConfig, ModelSource, NAMED_MODELS};
pub use optim::{LrScaling, OptimConfig, OptimizerName, Warmup};
pub use output::{OutputConfig, Resume, SaveWhen};
pub use plan::{
    AccumulationOrder, Adapter, Algorithm, Carrier, Offload, PlanConfig, Recompute, StrategyName,
};
pub use precision::{LossScaling, Precision};
pub use schedule::{Growth, MinRate, Schedule, WarmupRates};
