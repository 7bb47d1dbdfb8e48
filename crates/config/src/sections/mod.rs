//! The sections of a `RunConfig`: one file each, with its types and how they are read from the keys.

mod batch;
mod data;
mod model;
mod optim;
mod output;
mod plan;
mod precision;

pub use batch::BatchConfig;
pub use data::{DataConfig, HubFolders, NamedDataset, OnBadRow, OnLongRow, Packing, Tokenizer, Truncation};
pub use model::{Init, ModelConfig, ModelSource, NAMED_MODELS};
pub use optim::{OptimConfig, Schedule, Warmup};
pub use output::{OutputConfig, Resume};
pub use plan::{
    AccumulationOrder, Adapter, Algorithm, Carrier, Offload, PlanConfig, Recompute, StrategyName,
};
pub use precision::Precision;
