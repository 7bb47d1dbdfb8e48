//! `lockstep watch`: a run in the terminal.

use std::time::Duration;

use lockstep_core::{Fault, FaultClass, Rank};
use lockstep_device::cuda::{GpuMonitor, GpuUse};
use lockstep_launch::{LaunchError, Signals};
use lockstep_watch::{
    GpuStatus, RunReader, View, WatchOptions, frame_text, has_terminal, terminal_size, watch,
};

use crate::args::Watch;
use crate::report::{self, Failure};
use crate::{gpu, ranks, runs};

/// The size of a frame without a terminal.
const SIZE: (u16, u16) = (100, 40);

#[derive(Debug)]
enum WatchError {
    NoTerminal,
    Terminal(std::io::Error),
}

impl std::fmt::Display for WatchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WatchError::NoTerminal => {
                write!(f, "`lockstep watch` needs a terminal: standard input or output is something else")
            }
            WatchError::Terminal(cause) => write!(f, "cannot use the terminal: {cause}"),
        }
    }
}

impl std::error::Error for WatchError {}

impl Fault for WatchError {
    fn class(&self) -> FaultClass {
        FaultClass::Unavailable
    }

    fn hint(&self) -> Option<String> {
        Some("Add --once to print one frame as text.".into())
    }
}

pub(crate) fn run(args: &Watch) -> Result<(), Failure> {
    let files = runs::open(&args.run)?;
    if !args.once && !has_terminal() {
        return Err(Box::new(WatchError::NoTerminal));
    }
    // Without a driver there is no panel of GPUs.
    let monitor = GpuMonitor::open(&gpu::search()).ok();
    let mut gpus =
        || monitor.as_ref().map_or_else(Vec::new, |monitor| monitor.read().into_iter().map(status).collect());
    if args.once {
        let mut reader = RunReader::new(files);
        let size = args.size.or_else(terminal_size).unwrap_or(SIZE);
        return report::print(&frame_text(reader.read(gpus()), &View::default(), size));
    }
    ranks::arm_failpoint(Rank(0))?;
    let signals = Signals::that_end().map_err(|error: LaunchError| -> Failure { Box::new(error) })?;
    let options = WatchOptions {
        interval: Duration::from_secs_f64(args.interval),
        // https://no-color.org
        coloured: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        gpus: &mut gpus,
        ends: &mut || signals.next(Some(Duration::ZERO)).is_some(),
    };
    watch(files, options).map_err(|cause| -> Failure { Box::new(WatchError::Terminal(cause)) })
}

fn status(gpu: GpuUse) -> GpuStatus {
    GpuStatus {
        name: gpu.name,
        temperature_celsius: gpu.temperature_celsius,
        power_watts: gpu.power_watts,
        power_limit_watts: gpu.power_limit_watts,
        utilization: gpu.utilization,
        used_bytes: gpu.used.0,
        total_bytes: gpu.total.0,
        processes: gpu.processes.into_iter().map(|(pid, bytes)| (pid, bytes.map(|bytes| bytes.0))).collect(),
    }
}
