//! Arguments of the commands that show what runs have written.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::parsers;

#[derive(Debug, Args)]
pub(crate) struct Runs {
    #[command(subcommand)]
    pub(crate) command: RunsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// List the runs in a folder
    #[command(alias = "list")]
    Ls {
        /// Search this folder, up to three folders down
        #[arg(value_name = "FOLDER", default_value = ".")]
        folder: PathBuf,
        /// Print one JSON object for each run
        #[arg(long)]
        json: bool,
    },
    /// Show the settings, the newest metrics and the costs of a run
    Show {
        /// Show the run in this output folder
        #[arg(value_name = "RUN")]
        run: PathBuf,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
        /// Print the newest metrics as Prometheus reads them
        #[arg(long, conflicts_with = "json")]
        prometheus: bool,
    },
    /// Compare the settings and the newest metrics of two runs
    Diff {
        /// Compare the run in this output folder
        #[arg(value_name = "RUN")]
        left: PathBuf,
        /// Compare with the run in this one
        #[arg(value_name = "RUN")]
        right: PathBuf,
    },
    /// Draw a metric of one or more runs as SVG
    Plot {
        /// Draw the runs in these output folders
        #[arg(value_name = "RUN", required = true)]
        runs: Vec<PathBuf>,
        /// Draw this key of metrics.jsonl
        #[arg(long, value_name = "KEY", default_value = "loss")]
        metric: String,
        /// Average over this many points
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        smooth: u32,
        /// Use a logarithmic axis
        #[arg(long)]
        log: bool,
        /// Write to this file [default: print it]
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Write a page about a run: charts, costs, memory, evaluations, configuration
    Report {
        /// Read the run in this output folder
        #[arg(value_name = "RUN")]
        run: PathBuf,
        /// Write to this file [default: report.html in the output folder]
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Show the run in this output folder, in progress or not
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Print one frame as text, and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Print a frame of this many columns and rows, with --once [default: those of the terminal, or 100x40]
    #[arg(long, value_name = "COLUMNSxROWS", requires = "once", value_parser = parsers::size)]
    pub(crate) size: Option<(u16, u16)>,
    /// Read the files every so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parsers::interval)]
    pub(crate) interval: f64,
}

pub(super) const SERVED: &str = "\
The page shows charts, timelines, memory, ranks, completions and configurations, also of runs in progress, which need not \
have begun. On this machine's own address anyone with an account here can read it; on another address a token is required, \
which LOCKSTEP_DASHBOARD_TOKEN or --token-file gives, or which is generated and printed as a part of the address to open. \
`lockstep train --dashboard` serves a run while it trains.";

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Serve the runs in these folders, up to three folders down
    #[arg(value_name = "RUN", default_value = ".")]
    pub(crate) runs: Vec<PathBuf>,
    /// Listen on this port; 0 takes any free one [default: 8420, or any free one]
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
    /// Listen on this address, such as 0.0.0.0 for all of this machine
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
    /// Require the token in this file, which only its owner can read
    #[arg(long, value_name = "FILE", alias = "token_file")]
    pub(crate) token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// Read this file, or - for standard input
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Print one JSON object for each step
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the loss as SVG to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}
