//! The flags of `download`.

use clap::{Args, ValueEnum};

pub(crate) const CACHE: &str = "\
Files go into the Hugging Face cache (HF_HOME), where runs and other programs find them. Files that are already there are \
not downloaded again. HF_TOKEN gives access to private and gated repositories.";

#[derive(Debug, Args)]
pub(crate) struct Download {
    /// Download this repository, or everything that this configuration names
    #[arg(value_name = "ORG/NAME | CONFIG | KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,
    /// Set the type of the repository: model or dataset [default: model]
    #[arg(long, value_enum, value_name = "TYPE", alias = "repo_type", hide_possible_values = true)]
    pub(crate) repo_type: Option<RepoType>,
    /// Download this branch, tag or commit [default: main]
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepoType {
    Model,
    Dataset,
}
