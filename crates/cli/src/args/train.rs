//! Arguments of the commands that take a run's configuration.

use std::path::PathBuf;

use clap::Args;

use super::parsers::{Endpoint, nnodes, rendezvous, seconds, tee};
use crate::inputs::LINE;
use crate::stop;

/// Other names of `train`, each with its algorithm. `crate::flags` turns them into settings.
pub(super) const ALGORITHMS: [&str; 6] = ["sft", "reward", "dpo", "ppo", "grpo", "rloo"];

pub(super) const DASHBOARD: &str = "\
`--dashboard` serves a web page of the run while it trains, on port 8420 of this machine; `--dashboard ADDRESS:PORT` elsewhere.";

pub(super) const ALGORITHM_COMMANDS: &str = "\
`lockstep dpo` is `lockstep train` with `algorithm: dpo`; likewise sft, reward, ppo, grpo and rloo.";

pub(super) const SEVERAL_NODES: &str = "\
On several nodes, run the same command on every node, each with its own --node-rank. All nodes need the same token: \
create it with `openssl rand -hex 32 > token; chmod 600 token`, copy it to every node, and set \
LOCKSTEP_TOKEN_FILE=token there.\n\n\
If RANK and WORLD_SIZE are set, by torchrun or by hand, this process is that rank of the run and starts no others.";

pub(super) const SAMPLES: &str = "\
Samples are rows as the model sees them, decoded to text. Text that is not in the loss, such as prompts, is dimmed on a \
terminal and printed in \u{27e6}\u{27e7} elsewhere. Later runs with the same data and settings find the prepared data.";

/// Seconds that ranks wait for each other at the start.
pub(crate) const JOIN_TIMEOUT: f64 = 60.0;

/// The configuration of a run.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Read YAML or JSON files, also of DeepSpeed and accelerate, and override keys with key=value or --key value
    #[arg(value_name = "CONFIG | KEY=VALUE", required_unless_present = "line")]
    pub(crate) settings: Vec<String>,
    /// Read a pasted command line of torchrun, deepspeed, accelerate launch, trl or python
    #[arg(value_name = "LAUNCH LINE", last = true)]
    pub(crate) line: Vec<String>,
}

impl Run {
    /// All words: settings and, after `--`, the launch line.
    pub(crate) fn words(&self) -> Vec<String> {
        let separator = (!self.line.is_empty()).then(|| LINE.to_owned());
        self.settings.iter().cloned().chain(separator).chain(self.line.iter().cloned()).collect()
    }
}

#[derive(Debug, Args)]
pub(crate) struct Train {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Print the resolved configuration and the plan, and train nothing
    #[arg(long, alias = "dry_run")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) launch: LaunchFlags,
    /// Appended by `torch.distributed.launch` and the DeepSpeed launcher. The environment takes precedence.
    #[arg(long, value_name = "N", alias = "local_rank", hide = true)]
    pub(crate) local_rank: Option<u32>,
}

/// Which ranks to start, and how to supervise them. The names are torchrun's.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub(crate) struct LaunchFlags {
    /// Start this many ranks on each node: a number, gpu (one per GPU), cpu (one per core) or auto
    #[arg(long, value_name = "N", visible_alias = "nproc-per-node", alias = "nproc_per_node")]
    pub(crate) nproc: Option<Nproc>,
    /// Train on this many nodes
    #[arg(long, value_name = "N", value_parser = nnodes)]
    pub(crate) nnodes: Option<u16>,
    /// Start the ranks of this node, counted from 0
    #[arg(long, value_name = "N", alias = "node_rank")]
    pub(crate) node_rank: Option<u16>,
    /// Connect to node 0 at this host name or address
    #[arg(long, value_name = "HOST", alias = "master_addr")]
    pub(crate) master_addr: Option<String>,
    /// Connect to node 0 at this port [default: 29500; any free port on a single node]
    #[arg(long, value_name = "PORT", alias = "master_port", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// Connect to node 0 at this address, torchrun's name for --master-addr and --master-port
    #[arg(long, value_name = "HOST:PORT", alias = "rdzv_endpoint", conflicts_with_all = ["master_addr", "master_port"])]
    pub(crate) rdzv_endpoint: Option<Endpoint>,
    /// Nodes always find each other at node 0's address, as with torchrun's `static` and `c10d`.
    #[arg(long, value_name = "NAME", alias = "rdzv_backend", value_parser = rendezvous, hide = true)]
    pub(crate) rdzv_backend: Option<String>,
    /// The token tells runs apart.
    #[arg(long, value_name = "ID", alias = "rdzv_id", hide = true)]
    pub(crate) rdzv_id: Option<String>,
    /// --join-timeout sets what torchrun's timeouts do.
    #[arg(long, value_name = "CONF", alias = "rdzv_conf", hide = true)]
    pub(crate) rdzv_conf: Option<String>,
    /// Train on this node only, at any free port
    #[arg(long, conflicts_with_all = ["nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint"])]
    pub(crate) standalone: bool,
    /// Restart all ranks up to this many times when one fails; they resume from the newest checkpoint
    #[arg(long, value_name = "N", alias = "max_restarts", default_value_t = 0)]
    pub(crate) max_restarts: u32,
    /// Wait this many seconds for all ranks to start [default: 60]
    #[arg(long, value_name = "S", alias = "join_timeout", value_parser = seconds)]
    pub(crate) join_timeout: Option<f64>,
    /// Allow this many seconds to save a checkpoint after SIGTERM or SIGUSR1
    #[arg(long, value_name = "S", default_value_t = stop::GRACE, value_parser = seconds)]
    pub(crate) grace: f64,
    /// Copy the output of ranks into files: 1 stdout, 2 stderr, 3 both. Turns off the progress bar
    #[arg(long, value_name = "0..3", value_parser = tee)]
    pub(crate) tee: Option<u8>,
    /// Write the files of --tee to this folder [default: <output_dir>/logs]
    #[arg(long, value_name = "DIR", alias = "log_dir")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Print the output of these local ranks only
    #[arg(long, value_name = "N,N", alias = "local_ranks_filter", value_delimiter = ',')]
    pub(crate) local_ranks_filter: Option<Vec<u32>>,
}

impl Default for LaunchFlags {
    /// No flag given.
    fn default() -> LaunchFlags {
        LaunchFlags {
            nproc: None,
            nnodes: None,
            node_rank: None,
            master_addr: None,
            master_port: None,
            rdzv_endpoint: None,
            rdzv_backend: None,
            rdzv_id: None,
            rdzv_conf: None,
            standalone: false,
            max_restarts: 0,
            join_timeout: None,
            grace: stop::GRACE,
            tee: None,
            log_dir: None,
            local_ranks_filter: None,
        }
    }
}

impl LaunchFlags {
    /// Whether a flag is given that only a launcher can follow, and not a rank.
    pub(crate) fn starts_ranks(&self) -> bool {
        self.nproc.is_some()
            || self.nnodes.is_some()
            || self.node_rank.is_some()
            || self.master_addr.is_some()
            || self.master_port.is_some()
            || self.rdzv_endpoint.is_some()
            || self.standalone
            || self.log_dir.is_some()
            || self.supervises()
    }

    /// Whether even a single rank needs a launcher: to be restarted, or to have its output filtered or copied.
    pub(crate) fn supervises(&self) -> bool {
        self.max_restarts > 0 || self.tee.is_some_and(|bits| bits > 0) || self.local_ranks_filter.is_some()
    }
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Print the operations of every phase
    #[arg(long)]
    pub(crate) schedule: bool,
    /// Plan for this many ranks on each node: a number, gpu (one per GPU), cpu (one per core) or auto
    #[arg(long, value_name = "N", visible_alias = "nproc-per-node", alias = "nproc_per_node")]
    pub(crate) nproc: Option<Nproc>,
    /// Plan for this many nodes
    #[arg(long, value_name = "N", value_parser = nnodes)]
    pub(crate) nnodes: Option<u16>,
    /// List every setting with its value and its origin, and nothing else
    #[arg(long)]
    pub(crate) origins: bool,
    /// Draw memory over the step
    #[arg(long)]
    pub(crate) curve: bool,
    /// Write the picture of memory over the step to this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Read an out-of-memory message from standard input, and print changes that make the run fit
    #[arg(long, alias = "explain_oom")]
    pub(crate) explain_oom: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Plan for this many GPUs, with a table of how the run scales up to them
    #[arg(long, value_name = "N", requires = "gpu", conflicts_with_all = ["nproc", "nnodes"], value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "A cluster on paper")]
    pub(crate) gpus: Option<u32>,
    /// Take the published figures of this GPU, such as h100-80g
    #[arg(long, value_name = "NAME", requires = "gpus", help_heading = "A cluster on paper")]
    pub(crate) gpu: Option<String>,
    /// Set the speed of the network of a node, such as 400Gbps, or of each GPU, such as 400Gbps/gpu
    #[arg(long, value_name = "SPEED", requires = "gpus", help_heading = "A cluster on paper")]
    pub(crate) network: Option<String>,
    /// Set the number of GPUs of a node [default: 8]
    #[arg(
        long,
        value_name = "N",
        requires = "gpus",
        alias = "gpus_per_node",
        help_heading = "A cluster on paper"
    )]
    pub(crate) gpus_per_node: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertConfig {
    #[command(flatten)]
    pub(crate) run: Run,
}

#[derive(Debug, Args)]
pub(crate) struct Prepare {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Print this many sample rows
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) samples: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Quickstart {
    /// Override keys of the built-in configuration; with grpo and dpo, of the second run
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Train with this algorithm: sft, or grpo or dpo after a short sft
    #[arg(long, value_name = "NAME", default_value = "sft", hide_possible_values = true)]
    pub(crate) algorithm: QuickstartAlgorithm,
    /// Write the run to this folder
    #[arg(long, value_name = "DIR", alias = "output_dir", default_value = "outputs/quickstart")]
    pub(crate) output_dir: PathBuf,
}

/// The algorithms that the quickstart shows.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum QuickstartAlgorithm {
    Sft,
    Grpo,
    Dpo,
}

/// The number of ranks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nproc {
    Count(u16),
    /// One per GPU, or a single rank without GPUs.
    Auto,
    /// One per core.
    Cpu,
    /// One per GPU.
    Gpu,
}

impl std::str::FromStr for Nproc {
    type Err = String;

    fn from_str(text: &str) -> Result<Nproc, String> {
        match text {
            "auto" => Ok(Nproc::Auto),
            "cpu" => Ok(Nproc::Cpu),
            "gpu" => Ok(Nproc::Gpu),
            _ => match text.parse() {
                Ok(count @ 1..) => Ok(Nproc::Count(count)),
                _ => Err("expected a number from 1 to 65535, auto, cpu or gpu".into()),
            },
        }
    }
}
