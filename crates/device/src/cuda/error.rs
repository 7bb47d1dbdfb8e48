use lockstep_core::{Bytes, Fault, FaultClass};

/// Why a GPU cannot be used, or stopped working.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    #[error("{what} was not found (looked for {names}): {why}")]
    LibraryMissing { what: &'static str, names: String, why: String },
    #[error("{library} has no function {symbol}")]
    SymbolMissing { library: String, symbol: &'static str },
    #[error("{what} {found} is too old: {needed} or newer is needed")]
    TooOld { what: &'static str, found: String, needed: &'static str },
    #[error("there is no GPU {ordinal}: the driver shows {count}")]
    NoDevice { ordinal: u32, count: u32 },
    #[error("{name} has compute capability {}.{}, and 8.0 is the least that works", sm / 10, sm % 10)]
    TooSmall { name: String, sm: u32 },
    #[error("the GPU did not grant {wanted}: {free} of its {total} are free")]
    OutOfMemory { wanted: Bytes, free: Bytes, total: Bytes },
    #[error("{call} failed: {text}")]
    Call { call: &'static str, text: String },
    #[error("kernel {kernel} has {declared} parameters and is given {given} arguments")]
    ArgumentCount { kernel: &'static str, declared: usize, given: usize },
    #[error("argument {index} of kernel {kernel} has {given} bytes, and the parameter has {declared}")]
    ArgumentSize { kernel: &'static str, index: usize, declared: usize, given: usize },
    #[error("the kernels of {source_name} do not compile: {log}")]
    Compile { source_name: String, log: String },
    #[error("cuBLASLt has no way to compute {product}: {text}")]
    NoAlgorithm { product: String, text: String },
}

impl Fault for GpuError {
    fn class(&self) -> FaultClass {
        FaultClass::Unavailable
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            GpuError::LibraryMissing { what, .. } if what.contains("driver") => {
                "Install NVIDIA's driver; a container is given it by --gpus all. `lockstep doctor` shows what was \
                 found; `device: cpu` runs without a GPU."
                    .into()
            }
            GpuError::LibraryMissing { what, .. } => format!(
                "{what} comes with the CUDA toolkit; a Python environment with the nvidia-* \
                 packages has most of it too (set VIRTUAL_ENV or CUDA_HOME). `lockstep doctor` shows what was \
                 found; `device: cpu` runs without a GPU."
            ),
            GpuError::SymbolMissing { .. } | GpuError::TooOld { .. } => {
                "Update it, or run with `device: cpu`. `lockstep doctor` shows every version found.".into()
            }
            GpuError::NoDevice { .. } => {
                "CUDA_VISIBLE_DEVICES decides which GPUs a process sees; `device: cpu` runs without one."
                    .into()
            }
            GpuError::TooSmall { .. } => "`device: cpu` runs without a GPU.".into(),
            GpuError::OutOfMemory { .. } => {
                "Another process may hold memory (`nvidia-smi`); `lockstep plan` shows where the bytes go."
                    .into()
            }
            GpuError::Call { .. } => {
                "`lockstep doctor` and `lockstep selftest` tell whether this GPU works.".into()
            }
            GpuError::ArgumentCount { .. } | GpuError::ArgumentSize { .. } => {
                "This is a bug in lockstep; `device: cpu` runs without this kernel.".into()
            }
            GpuError::Compile { .. } | GpuError::NoAlgorithm { .. } => {
                "This is a bug in lockstep, or a toolkit it does not know; `device: cpu` runs without it."
                    .into()
            }
        })
    }
}
