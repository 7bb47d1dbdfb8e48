//! What computes: the CPU or a GPU.

use crate::reader::{Later, Reader};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// More ranks than GPUs on a host take turns on them, instead of being refused.
    pub share_gpus: bool,
    /// Products in fp32 may round their operands to tf32 on a GPU.
    pub tf32: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU where one works, else the CPU.
    Auto,
    Cpu,
    /// A GPU or nothing.
    Cuda,
}

impl DeviceConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        DeviceConfig {
            kind: read_kind(r),
            share_gpus: r.bool("share_gpus").unwrap_or(false),
            tf32: r.bool("tf32").unwrap_or(false),
        }
    }
}

/// `device`, or Hugging Face's `use_cpu`, which asks for the CPU or for nothing.
fn read_kind(r: &mut Reader<'_>) -> DeviceKind {
    r.prefer_flags(&["device", "use_cpu"]);
    let words = [
        ("auto", DeviceKind::Auto),
        ("cpu", DeviceKind::Cpu),
        ("cuda", DeviceKind::Cuda),
        ("gpu", DeviceKind::Cuda),
    ];
    let later = Later(&["mps", "xpu", "npu", "hpu", "tpu"], "write `device: cpu` or `cuda`.");
    let given = r.given("device");
    let kind = r.word("device", &words, later).unwrap_or(DeviceKind::Auto);
    match r.given("use_cpu").zip(r.bool("use_cpu")) {
        Some((switch, true)) => match (&given, kind) {
            (Some(device), DeviceKind::Cuda) => {
                r.conflict(device, &switch, "keep `device` and remove the other.");
                kind
            }
            _ => {
                r.derived("device", "use_cpu");
                DeviceKind::Cpu
            }
        },
        _ => kind,
    }
}
