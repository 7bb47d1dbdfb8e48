//! What can be typed.

use clap::{Args, Parser, Subcommand};

/// Trains decoder language models (LLaMA, Qwen) from one binary.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model
    Train(Run),
    /// Show what a run would hold and do, without running it
    Plan(Plan),
    /// List every configuration key with its default
    Keys,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// A YAML or JSON file, and any number of key=value settings that override it
    #[arg(value_name = "CONFIG | KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Print the operations of every phase
    #[arg(long)]
    pub(crate) schedule: bool,
    /// Plan for this many nodes
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<u32>,
    /// Plan for this many ranks on each node
    #[arg(long, value_name = "N", alias = "nproc_per_node")]
    pub(crate) nproc_per_node: Option<u32>,
}
