//! `lockstep bench step`: measures training steps on random tokens.

use std::fmt;

use lockstep_config::{ModelSource, Purpose};
use lockstep_core::{Fault, FaultClass};
use lockstep_device::{Device, Machine};
use lockstep_shape::ModelShape;
use lockstep_train::StepSpeed;
use serde_json::json;

use crate::args::BenchStep;
use crate::gpu;
use crate::inputs;
use crate::report::{self, Failure};
use crate::train::boxed;

/// The peak rate of a dense bf16 matmul on an H100 or H200 by its data sheet, which MFU is relative to.
const HOPPER_PEAK: f64 = 989e12;

pub(crate) fn run(args: &BenchStep) -> Result<(), Failure> {
    let mut settings: Vec<String> =
        ["model=300m", "mixed_precision=auto", "packing=none"].into_iter().map(String::from).collect();
    settings.push(format!("per_device_train_batch_size={}", args.rows));
    // A row of n + 1 tokens has n targets.
    settings.push(format!("max_length={}", args.length + 1));
    settings.extend(args.settings.iter().cloned());
    let (config, _) = inputs::load(Purpose::Plan, &settings, &[])?;
    match config.plan.world_size() {
        1 => {}
        ranks => return Err(Box::new(SeveralRanks(ranks))),
    }
    let shape = match &config.model.source {
        ModelSource::Named(name) => {
            ModelShape::named(name, args.vocab).map_err(|e| -> Failure { Box::new(e) })?
        }
        _ => {
            let tokenizer = lockstep_train::load_tokenizer(&config).map_err(boxed)?;
            lockstep_train::model_shape(&config, &tokenizer).map_err(boxed)?
        }
    };
    let shape = ModelShape { max_positions: shape.max_positions.max(args.length), ..shape };
    let machine = Machine {
        device: gpu::choose(config.device.kind)?,
        num_threads: lockstep_train::num_threads(&config),
    };
    let speed = lockstep_train::bench_step(&config, &shape, machine, args.steps).map_err(boxed)?;
    report::print(&(if args.json { as_json(args, machine, &speed) } else { as_text(machine, &speed) } + "\n"))
}

/// The settings are for several ranks.
#[derive(Debug)]
struct SeveralRanks(u32);

impl fmt::Display for SeveralRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the settings are for {} ranks, but this benchmark runs on one", self.0)
    }
}

impl std::error::Error for SeveralRanks {}

impl Fault for SeveralRanks {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some("Remove nproc_per_node and nodes. `lockstep train` prints the speed of several ranks at every step.".into())
    }
}

/// The first steps are not counted: they compile kernels and choose algorithms.
const DROPPED: usize = 2;

fn as_text(machine: Machine, speed: &StepSpeed) -> String {
    let seconds = speed.median_seconds(DROPPED);
    let mfu = match machine.device {
        Device::Cpu => String::new(),
        Device::Cuda(_) => {
            format!(" ({:.1} % of 989)", 100.0 * speed.flops_per_step / seconds / HOPPER_PEAK)
        }
    };
    let memory = match speed.driver {
        Some(driver) => format!("{driver} of GPU memory in use, planned {}", speed.planned),
        None => format!("planned {}", speed.planned),
    };
    format!(
        "{} parameters, {} tokens per step on {}\n{:.1} ms per step, {:.0} tokens/s, {:.1} TFLOP/s{mfu}\n{memory}; \
         {} of host memory\nloss {:.4} after the first step, {:.4} after the last",
        lockstep_core::Elems(speed.parameters),
        speed.tokens_per_step,
        gpu::description(&machine),
        1e3 * seconds,
        speed.tokens_per_step as f64 / seconds,
        speed.flops_per_step / seconds / 1e12,
        speed.host,
        speed.losses[0],
        speed.losses[speed.losses.len() - 1],
    )
}

fn as_json(args: &BenchStep, machine: Machine, speed: &StepSpeed) -> String {
    let seconds = speed.median_seconds(DROPPED);
    json!({
        "program": "lockstep", "version": env!("CARGO_PKG_VERSION"), "settings": args.settings,
        "rows": args.rows, "length": args.length, "vocab": args.vocab, "device": gpu::description(&machine),
        "parameters": speed.parameters, "tokens_per_step": speed.tokens_per_step,
        "step_seconds": speed.seconds, "tokens_per_second": speed.tokens_per_step as f64 / seconds,
        "tflops": speed.flops_per_step / seconds / 1e12, "mfu989": speed.flops_per_step / seconds / HOPPER_PEAK,
        "planned_bytes": speed.planned.0, "driver_bytes": speed.driver.map(|b| b.0), "host_bytes": speed.host.0,
        "losses": speed.losses,
    })
    .to_string()
}
