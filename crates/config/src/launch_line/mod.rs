//! Command lines of other launchers: `torchrun`, `python -m torch.distributed.run` or `launch`, `deepspeed`,
//! `accelerate launch`, `trl sft` and the like, and `python train.py`.
//!
//! A line has three parts: variables, the launcher with its flags, and the script with its flags. Flags of the launcher
//! become settings of our launcher; flags of the script become settings of the run, because scripts have the Trainer's
//! flags. What a script does cannot be known, so an unknown flag is an error.

mod launchers;
mod parse;
mod script;

use crate::error::ConfigErrors;
use crate::launch_settings::LaunchKey;
use crate::references::FileRole;
use crate::secret;
use crate::yaml::{At, Node, Value};

/// A command line of another launcher.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchLine {
    pub program: LaunchProgram,
    /// The script or module that it starts; `None` for `trl`.
    pub script: Option<String>,
    /// Variables in front of the command.
    pub variables: Vec<(String, String)>,
    /// The flags of the launcher and of the script.
    pub flags: Vec<LaunchFlag>,
}

/// The program that a launch line starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchProgram {
    Torchrun,
    DeepSpeed,
    Accelerate,
    /// TRL, with the name of its command: `trl sft`.
    Trl(&'static str),
    /// A script without a launcher.
    Python,
}

impl LaunchProgram {
    pub fn name(self) -> &'static str {
        match self {
            LaunchProgram::Torchrun => "torchrun",
            LaunchProgram::DeepSpeed => "deepspeed",
            LaunchProgram::Accelerate => "accelerate launch",
            LaunchProgram::Trl(name) => name,
            LaunchProgram::Python => "python",
        }
    }

    /// The defaults of the program that differ from ours.
    pub(crate) fn defaults(self) -> &'static [(&'static str, &'static str)] {
        const TRL: &[(&str, &str)] =
            &[("logging_steps", "10"), ("gradient_checkpointing", "true"), ("bf16", "true")];
        const TRL_SFT: &[(&str, &str)] = &[
            ("logging_steps", "10"),
            ("gradient_checkpointing", "true"),
            ("bf16", "true"),
            ("learning_rate", "2e-5"),
        ];
        match self {
            LaunchProgram::Trl("trl sft") => TRL_SFT,
            LaunchProgram::Trl(_) => TRL,
            _ => &[],
        }
    }
}

/// A flag of a launch line.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchFlag {
    /// As typed, such as `--learning_rate`. A positional argument has no name.
    pub name: String,
    /// The values as typed; `true` if there is none.
    pub values: Vec<String>,
    /// The key that it sets.
    pub(crate) key: String,
    pub(crate) target: Target,
}

/// What a flag sets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// A key of the configuration.
    Key,
    Launch(LaunchKey),
    /// It names a file.
    File(FileRole),
    /// It has no effect, for this reason.
    Inert(&'static str),
}

impl LaunchFlag {
    /// As typed, without secrets.
    pub(crate) fn typed(&self) -> String {
        let value = match secret::is_secret(&self.key) {
            true => "[hidden]".to_owned(),
            false => secret::redact(&self.values.join(" ")),
        };
        format!("{} {value}", self.name).trim().to_owned()
    }

    pub(crate) fn node(&self, at: At) -> Node {
        let scalar = |text: &String| Node { value: Value::Scalar { text: text.clone(), plain: true }, at };
        match &self.values[..] {
            [one] => parse::structured(one, at).unwrap_or_else(|| scalar(one)),
            several => Node { value: Value::Seq(several.iter().map(scalar).collect()), at },
        }
    }
}

/// Translates the words of a command line. It only knows the words: load it together with the files that
/// [`crate::referenced_files`] names.
pub fn translate_launch_line(words: &[String]) -> Result<LaunchLine, ConfigErrors> {
    parse::parse(words)
}

/// Whether words are the command line of a launcher, after variables in front of it, and not settings of a run.
pub fn is_launch_line(words: &[String]) -> bool {
    parse::starts_program(words)
}
