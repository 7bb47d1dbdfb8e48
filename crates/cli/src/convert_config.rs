//! `lockstep convert-config`: translates files and a launch line of other trainers into one YAML.

use lockstep_core::{Fault, FaultClass};

use crate::args::ConvertConfig;
use crate::inputs::RunInputs;
use crate::report::{self, Failure};

/// Words after `--` that start no launcher.
#[derive(Debug)]
struct NotALaunchLine {
    word: String,
}

impl std::fmt::Display for NotALaunchLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the launch line after `--` starts with `{}`, which is no launcher", self.word)
    }
}

impl std::error::Error for NotALaunchLine {}

impl Fault for NotALaunchLine {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(
            "It starts with torchrun, deepspeed, accelerate launch, trl or python. Give files before `--`."
                .into(),
        )
    }
}

pub(crate) fn run(args: &ConvertConfig) -> Result<(), Failure> {
    if let Some(word) = args.run.line.first().filter(|_| !lockstep_config::is_launch_line(&args.run.line)) {
        return Err(Box::new(NotALaunchLine { word: lockstep_config::redact_setting(word) }));
    }
    report::print(&RunInputs::read(&args.run.words(), &[])?.convert()?)
}
