//! `lockstep init`: asks a few questions and writes a commented configuration.
//!
//! The configuration is the recipe of the chosen algorithm with the answers put in. It is loaded before it is written, so
//! that a file that this command has written is always valid.

mod answers;
mod questions;
mod template;

use std::io::{IsTerminal as _, Write as _};

use lockstep_config::{Purpose, Source};
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_device::HostMemory;
use lockstep_launch::cores;

use crate::args::Init;
use crate::report::{self, Failure};
use crate::{gpu, output_file};
use answers::Answers;
use questions::Asking;

#[derive(Debug)]
enum InitError {
    /// Questions are left, and there is nobody to ask.
    NoTerminal { flags: Vec<&'static str> },
    /// The input ended before all questions were answered.
    Cancelled,
    /// The value of a flag.
    BadAnswer { flag: &'static str, value: String, problem: String },
}

impl std::fmt::Display for InitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InitError::NoTerminal { flags } => {
                write!(f, "cannot ask for {}: standard input is not a terminal", flags.join(", "))
            }
            InitError::Cancelled => {
                write!(f, "the input ended before all questions were answered; nothing was written")
            }
            InitError::BadAnswer { flag, value, problem } => write!(f, "{flag} {value}: {problem}"),
        }
    }
}

impl std::error::Error for InitError {}

impl Fault for InitError {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        match self {
            InitError::NoTerminal { .. } => {
                Some("Give these flags, or accept the default of every other question with --yes.".into())
            }
            InitError::Cancelled => Some("Accept all defaults with --yes.".into()),
            InitError::BadAnswer { .. } => Some("`lockstep init --help` explains the flags.".into()),
        }
    }
}

/// What was found on this machine.
#[derive(Clone, Debug)]
struct Found {
    cores: usize,
    memory: Option<Bytes>,
    gpus: u32,
    gpu_name: Option<String>,
}

impl Found {
    fn detect() -> Found {
        let allowed = cores::available().len().max(1);
        Found {
            cores: std::thread::available_parallelism().map_or(allowed, |n| n.get()).min(allowed),
            memory: HostMemory::read().map(|memory| memory.capacity()),
            gpus: gpu::count(),
            gpu_name: gpu::first().map(|(name, _)| name),
        }
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} CPU core{}", self.cores, if self.cores == 1 { "" } else { "s" })?;
        if let Some(memory) = self.memory {
            write!(f, ", {memory} of memory")?;
        }
        match (self.gpus, &self.gpu_name) {
            (0, _) => write!(f, ", no GPU"),
            (gpus, Some(name)) => write!(f, ", {gpus} x {name}"),
            (gpus, None) => write!(f, ", {gpus} GPUs"),
        }
    }
}

pub(crate) fn run(args: &Init) -> Result<(), Failure> {
    output_file::check_new(&args.file, args.force)?;
    let found = Found::detect();
    let stdin = std::io::stdin();
    let mut input = stdin.lock();
    let mut show = |text: &str| {
        let mut out = std::io::stdout();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    };
    let mut asking = match (args.yes, stdin.is_terminal()) {
        (true, _) => Asking::Defaults,
        (false, true) => {
            show(&format!("Found {found}. Press Enter to accept the value in brackets.\n"));
            Asking::Questions { input: &mut input, show: &mut show }
        }
        (false, false) => Asking::FlagsOnly,
    };
    let answers =
        Answers::collect(args, &found, &mut asking).map_err(|error| -> Failure { Box::new(error) })?;
    let name = args.file.display().to_string();
    let text = template::render(&answers, &found, &name)?;
    let source = Source { name: &name, text: &text };
    lockstep_config::load_for(Purpose::Train, Some(source), &[])
        .map_err(|errors| -> Failure { Box::new(errors) })?;
    output_file::write_new(&args.file, &text, args.force)?;
    report::print_line(&format!(
        "wrote {name}\n\
         Next: `lockstep plan {name}` shows its memory and predicted time, `lockstep train {name}` trains."
    ));
    Ok(())
}
