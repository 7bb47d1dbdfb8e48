//! The command line: commands and their flags.

mod bench;
mod download;
mod model;
mod parsers;
mod runs;
mod starters;
mod train;

use clap::{Args, Parser, Subcommand};

pub(crate) use bench::{
    Bench, BenchAttention, BenchCollectives, BenchCommand, BenchKernels, BenchMachine, BenchMatmul,
    BenchStep, Recompute,
};
pub(crate) use download::{Download, RepoType};
pub(crate) use model::{Chat, DeviceArg, Eval, Export, Generate, Model, SamplingFlags, TemplateFlags};
pub(crate) use parsers::tee;
pub(crate) use runs::{Logs, Runs, RunsCommand, Serve, Watch};
pub(crate) use starters::{Completions, Init, Man, Recipe, RecipeCommand, Shell};
pub(crate) use train::{
    ConvertConfig, JOIN_TIMEOUT, LaunchFlags, Nproc, Plan, Prepare, Quickstart, QuickstartAlgorithm, Train,
};

/// Train decoder language models (LLaMA, Mistral, Qwen) with one program.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, max_term_width = 100, arg_required_else_help = true, after_help = train::ALGORITHM_COMMANDS)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a small model on generated data in about a minute, and test it
    Quickstart(Quickstart),
    /// Write a configuration from the answers to a few questions
    #[command(after_help = starters::DEFAULTS)]
    Init(Init),
    /// List, show and copy built-in configurations
    Recipe(Recipe),
    /// Train a model, on one rank or on many
    #[command(visible_alias = "launch", aliases = train::ALGORITHMS, after_help = format!("{}\n\n{}\n\n{}", train::ALGORITHM_COMMANDS, train::DASHBOARD, train::SEVERAL_NODES))]
    Train(Train),
    /// Show the memory use and the schedule of a run, without running it
    Plan(Plan),
    /// Translate files and a launch line of other trainers into one YAML
    ConvertConfig(ConvertConfig),
    /// Generate text from prompts
    Generate(Generate),
    /// Chat with a model
    Chat(Chat),
    /// Evaluate a model on a data set
    Eval(Eval),
    /// Watch a run in the terminal
    Watch(Watch),
    /// List, show, compare, draw and report runs
    Runs(Runs),
    /// Serve a web page of runs, also while they train
    #[command(after_help = runs::SERVED)]
    Serve(Serve),
    /// Read a training log of this or another program
    Logs(Logs),
    /// Convert a checkpoint to a Hugging Face model folder
    Export(Export),
    /// Tokenize and pack the data of a run ahead of time
    #[command(after_help = train::SAMPLES)]
    Prepare(Prepare),
    /// Download a model or a data set from the Hugging Face Hub
    #[command(after_help = download::CACHE)]
    Download(Download),
    /// Check the results of this machine, or of the collectives between ranks
    #[command(after_help = SELFTEST_RANKS)]
    Selftest(Selftest),
    /// Measure the speed of this machine
    Bench(Bench),
    /// Check this machine for training
    Doctor(Doctor),
    /// List all configuration keys with their defaults
    Keys,
    /// Print the JSON Schema of the configuration, for editors
    Schema,
    /// Print completions for a shell
    Completions(Completions),
    /// Print or write manual pages
    Man(Man),
}

const SELFTEST_RANKS: &str = "\
With --nproc, --nnodes or under torchrun, every rank reduces and gathers known values over the transport that a run would \
use, checks the results and measures the speed. Operations and training steps are checked without these flags.";

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a text to paste into a report, without secrets, addresses, and names of users and hosts
    #[arg(long, conflicts_with = "json")]
    pub(crate) report: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Selftest {
    /// With several ranks, set keys as in a run: carrier=tcp, share_gpus=true
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Check this device: auto, cpu or cuda [default: a GPU if one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = DeviceArg::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: DeviceArg,
    /// Draw the inputs from this seed [default: a new one each time]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Check operations only, no training steps
    #[arg(long)]
    pub(crate) operations: bool,
    /// Check only operations whose description contains this text, such as `attention, bf16`
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) only: String,
    /// Use small inputs only, for runs under a memory checker
    #[arg(long)]
    pub(crate) small: bool,
    /// Print every check, not only those that fail
    #[arg(long, short)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) launch: LaunchFlags,
}
