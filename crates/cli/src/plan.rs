//! `lockstep plan`

use lockstep_config::{DeviceKind, RunConfig};
use lockstep_model::KernelBackend;
use lockstep_plan::RunPlan;
use lockstep_train::NumericsFingerprint;

use crate::args::Plan;
use crate::gpu;
use crate::report::{self, Failure};
use crate::train::boxed;

pub(crate) fn run(args: &Plan) -> Result<(), Failure> {
    let mut world = Vec::new();
    world.extend(args.nodes.map(|n| format!("nodes={n}")));
    world.extend(args.nproc_per_node.map(|n| format!("nproc_per_node={n}")));
    let (config, _) = report::load(&args.run.settings, &world)?;
    let plan = plan_of(&config)?;
    let mut text = lockstep_plan::memory_table(&plan);
    if args.schedule {
        for phase in &plan.phases {
            text.push('\n');
            text.push_str(&lockstep_plan::schedule_text(&plan, phase));
        }
    }
    text.push_str(&fingerprint(&config, &plan));
    report::print(&text)
}

/// The fingerprint of numbers, with its fields.
fn fingerprint(config: &RunConfig, plan: &RunPlan) -> String {
    let cuda = plan.input.has_separate_memory().then(gpu::versions);
    let numbers = NumericsFingerprint::of(config, plan, cuda.as_ref());
    let known = if numbers.is_complete() { "" } else { ", incomplete" };
    let mut text =
        format!("\nfingerprint {}{known}: equal fingerprints and inputs give equal bits\n", numbers.hash());
    numbers.lines().for_each(|line| text.push_str(&format!("  {line}\n")));
    text
}

/// A plan needs the model's shape and the tokenizer's size, not the data.
fn plan_of(config: &RunConfig) -> Result<RunPlan, Failure> {
    let tokenizer = lockstep_train::load_tokenizer(config).map_err(boxed)?;
    let shape = lockstep_train::model_shape(config, &tokenizer).map_err(boxed)?;
    // Planning for a GPU needs none.
    let kernels = match config.device.kind {
        DeviceKind::Cuda => KernelBackend::Cuda { memory: gpu::memory() },
        DeviceKind::Auto if gpu::is_there() => KernelBackend::Cuda { memory: gpu::memory() },
        _ => KernelBackend::Cpu { num_threads: lockstep_train::num_threads(config) },
    };
    lockstep_train::plan_for(config, &shape, &tokenizer, None, kernels).map_err(boxed)
}
