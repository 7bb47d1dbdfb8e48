//! Arguments of the commands that help to start: configurations, completions and manual pages.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

pub(super) const DEFAULTS: &str = "\
Questions that no flag answers are asked on the terminal; their defaults depend on the CPU and the GPUs that are found. The \
file explains every setting, and `lockstep plan` can check it at once.";

#[derive(Debug, Args)]
pub(crate) struct Init {
    /// Write the configuration to this file
    #[arg(value_name = "FILE", default_value = "run.yaml")]
    pub(crate) file: PathBuf,
    /// Train with this algorithm: sft, clm, reward, dpo, ppo, grpo or rloo
    #[arg(long, value_name = "NAME")]
    pub(crate) algorithm: Option<String>,
    /// Start from this model: a Hub name, a folder, or a size such as 90m, to train from scratch
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Train on this data: a file, a folder, a pattern, or a data set on the Hub
    #[arg(long, value_name = "DATA")]
    pub(crate) data: Option<String>,
    /// Use this reward model, or these built-in functions (ppo, grpo and rloo)
    #[arg(long, value_name = "REWARD")]
    pub(crate) reward: Option<String>,
    /// Start this many ranks, one per GPU
    #[arg(long, value_name = "N", visible_alias = "nproc-per-node", alias = "nproc_per_node")]
    pub(crate) nproc: Option<String>,
    /// Write the run to this folder
    #[arg(long, value_name = "DIR", alias = "output_dir")]
    pub(crate) output_dir: Option<String>,
    /// Accept the default of every question that no flag answers
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// Replace an existing file
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Recipe {
    #[command(subcommand)]
    pub(crate) command: RecipeCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RecipeCommand {
    /// List the recipes
    #[command(alias = "list")]
    Ls,
    /// Print a recipe
    #[command(alias = "cat")]
    Show {
        /// Print this recipe
        name: String,
    },
    /// Copy a recipe to a file
    Cp {
        /// Copy this recipe
        name: String,
        /// Write to this file or into this folder [default: NAME.yaml]
        file: Option<PathBuf>,
        /// Replace an existing file
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Print completions for this shell
    pub(crate) shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Write the pages of all commands to this folder [default: print the page of lockstep]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) dir: Option<PathBuf>,
}
