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
    #[error("there is no GPU {ordinal}: the driver reports {count}")]
    NoDevice { ordinal: u32, count: u32 },
    #[error("{name} has compute capability {}.{}; 8.0 or newer is required", sm / 10, sm % 10)]
    UnsupportedGpu { name: String, sm: u32 },
    #[error("cannot allocate {wanted} on the GPU: {free} of its {total} are free")]
    OutOfMemory { wanted: Bytes, free: Bytes, total: Bytes },
    #[error("{call} failed: {text}")]
    Call { call: &'static str, text: String },
    #[error("kernel {kernel} has {declared} parameters but was given {given} arguments")]
    ArgumentCount { kernel: &'static str, declared: usize, given: usize },
    #[error("argument {index} of kernel {kernel} has {given} bytes, but the parameter has {declared}")]
    ArgumentSize { kernel: &'static str, index: usize, declared: usize, given: usize },
    #[error("the kernels of {source_name} failed to compile: {log}")]
    Compile { source_name: String, log: String },
    #[error("cuBLASLt has no algorithm for {gemm}: {text}")]
    NoAlgorithm { gemm: String, text: String },
}

impl Fault for GpuError {
    fn class(&self) -> FaultClass {
        FaultClass::Unavailable
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            GpuError::LibraryMissing { what, .. } if what.contains("driver") => {
                "Install the NVIDIA driver; in a container, pass --gpus all. `lockstep doctor` shows what was found; \
                 `device: cpu` runs without a GPU."
                    .into()
            }
            GpuError::LibraryMissing { what, .. } => format!(
                "{what} comes with the CUDA toolkit and with the nvidia-* packages of a Python environment (set \
                 CUDA_HOME or VIRTUAL_ENV). `lockstep doctor` shows what was found; `device: cpu` runs without a GPU."
            ),
            GpuError::SymbolMissing { .. } | GpuError::TooOld { .. } => {
                "Update it, or run with `device: cpu`. `lockstep doctor` shows every version found.".into()
            }
            GpuError::NoDevice { .. } => {
                "CUDA_VISIBLE_DEVICES decides which GPUs a process sees; `device: cpu` runs without one."
                    .into()
            }
            GpuError::UnsupportedGpu { .. } => "`device: cpu` runs without a GPU.".into(),
            GpuError::OutOfMemory { .. } => {
                "Another process may be using the GPU (see `nvidia-smi`); `lockstep plan` shows what needs memory."
                    .into()
            }
            GpuError::Call { .. } => {
                "Run `lockstep doctor` and `lockstep selftest` to check whether this GPU works.".into()
            }
            GpuError::ArgumentCount { .. } | GpuError::ArgumentSize { .. } => {
                "This is a bug in lockstep; `device: cpu` runs without this kernel.".into()
            }
            GpuError::Compile { .. } | GpuError::NoAlgorithm { .. } => {
                "This is a bug in lockstep, or an unknown version of the toolkit; `device: cpu` runs without it."
                    .into()
            }
        })
    }
}
