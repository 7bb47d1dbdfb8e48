//! The device to compute on: the CPU or a GPU.

use crate::reader::{Later, Reader};

/// The device to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// Allow more ranks than GPUs on a host; the ranks then share the GPUs.
    pub share_gpus: bool,
    /// Allow TF32 in fp32 matrix multiplications on a GPU.
    pub tf32: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU if one works, otherwise the CPU.
    Auto,
    Cpu,
    /// A GPU; it is an error if none works.
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

/// Reads `device` and Hugging Face's `use_cpu`. `use_cpu: false` has no effect.
fn read_kind(r: &mut Reader<'_>) -> DeviceKind {
    r.prefer_flags(&["device", "use_cpu"]);
    let words = [
        ("auto", DeviceKind::Auto),
        ("cpu", DeviceKind::Cpu),
        ("cuda", DeviceKind::Cuda),
        ("gpu", DeviceKind::Cuda),
    ];
    let later = Later(&["mps", "xpu", "npu", "hpu", "tpu"], "use `device: cpu` or `cuda`.");
    let given = r.given("device");
    let kind = r.word("device", &words, later).unwrap_or(DeviceKind::Auto);
    match r.given("use_cpu").zip(r.bool("use_cpu")) {
        Some((switch, true)) => match (&given, kind) {
            (Some(device), DeviceKind::Cuda) => {
                r.conflict(device, &switch, "keep `device` and remove `use_cpu`.");
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
