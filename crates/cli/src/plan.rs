//! `lockstep plan`: the memory and the schedule of a run.

use lockstep_config::{DeviceKind, Purpose, RunConfig};
use lockstep_model::KernelBackend;
use lockstep_plan::RunPlan;
use lockstep_shape::ModelShape;
use lockstep_train::NumericsFingerprint;

use crate::args::Plan;
use crate::hub::Need;
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{gpu, hub, launch};

pub(crate) fn run(args: &Plan) -> Result<(), Failure> {
    let world = launch::world_settings(args.nnodes, args.nproc)?;
    let (mut config, _) = report::load(Purpose::Plan, &args.run.settings, &world)?;
    hub::provide(&mut config, &mut String::new(), Need::Plan)?;
    let (plan, _) = plan_of(&config)?;
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

/// The fingerprint of a run's numerics, with its fields.
fn fingerprint(config: &RunConfig, plan: &RunPlan) -> String {
    let cuda = plan.input.has_separate_memory().then(gpu::versions);
    let numbers = NumericsFingerprint::of(config, plan, cuda.as_ref());
    let known = if numbers.is_complete() { "" } else { ", incomplete" };
    let mut text =
        format!("\nfingerprint {}{known}: equal fingerprints and inputs give equal bits\n", numbers.hash());
    numbers.lines().for_each(|line| text.push_str(&format!("  {line}\n")));
    text
}

/// Builds the plan of a configuration, and the shape of its model. Needs the model's configuration and the tokenizer,
/// but no data.
pub(crate) fn plan_of(config: &RunConfig) -> Result<(RunPlan, ModelShape), Failure> {
    let tokenizer = lockstep_train::load_tokenizer(config).map_err(boxed)?;
    let models = lockstep_train::RunModels::of(config, &tokenizer).map_err(boxed)?;
    let kernels = match planned_device(config) {
        DeviceKind::Cuda => KernelBackend::Cuda { memory: gpu::memory() },
        _ => KernelBackend::Cpu { num_threads: lockstep_train::num_threads(config) },
    };
    let plan = lockstep_train::plan_for(config, &models, &tokenizer, None, kernels).map_err(boxed)?;
    let shape = plan.input.models[0].shape.clone();
    Ok((plan, shape))
}

/// Resolves `device: auto`. A plan for `cuda` needs no GPU on this machine.
pub(crate) fn planned_device(config: &RunConfig) -> DeviceKind {
    match config.device.kind {
        DeviceKind::Auto if gpu::is_available() => DeviceKind::Cuda,
        DeviceKind::Auto => DeviceKind::Cpu,
        given => given,
    }
}
