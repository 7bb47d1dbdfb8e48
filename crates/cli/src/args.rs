//! What can be typed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::stop;

/// Trains decoder language models (LLaMA, Mistral, Qwen) from one binary.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const OTHER_LAUNCHERS: &str = "\
Where RANK and WORLD_SIZE are set, by torchrun or by hand, the process is that rank of the run.";

const MANY_NODES: &str = "\
On several nodes, run the same command on each with its own --node-rank. The nodes prove to each other
that they belong together by a token: make one with `openssl rand -hex 32 > token; chmod 600 token`, copy
it to every node and set LOCKSTEP_TOKEN_FILE=token there. One failure ends all ranks and is told last.";

const SAMPLES: &str = "\
Samples are decoded rows as the model will see them. What is not learned (prompts, for example) is dimmed on
a terminal and stands in \u{27e6}\u{27e7} elsewhere. A later run with the same settings finds the data prepared.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a small model on data made here, in about a minute, and try it
    Quickstart(Quickstart),
    /// Train a model, on one rank or with --nproc on several
    #[command(after_help = OTHER_LAUNCHERS)]
    Train(Train),
    /// Train on several ranks and nodes, with torchrun's flags
    #[command(after_help = MANY_NODES)]
    Launch(Launch),
    /// Show what a run would hold and do, without running it
    Plan(Plan),
    /// Let a model continue a text
    Generate(Generate),
    /// Talk with a model
    Chat(Chat),
    /// Say how well a model predicts data
    Eval(Eval),
    /// Make a Hugging Face model folder from a checkpoint
    Export(Export),
    /// Prepare a run's data ahead of it, and show what came of it
    #[command(after_help = SAMPLES)]
    Prepare(Prepare),
    /// Compare what this machine computes with references: every operation, and whole training steps
    Selftest(Selftest),
    /// Time what training is made of on this machine
    Bench(Bench),
    /// Say what of this machine training can use, what is missing, and what to do about it
    Doctor(Doctor),
    /// List every configuration key with its default
    Keys,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Selftest {
    /// What computes [default: a GPU where one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = On::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: On,
    /// Inputs are drawn from it [default: another each time]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Only operations, no whole steps
    #[arg(long)]
    pub(crate) operations: bool,
    /// Only operations whose description contains this, such as `attention, bf16`
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) only: String,
    /// Only small operands: for runs under a checker of memory accesses
    #[arg(long)]
    pub(crate) small: bool,
    /// Show every check, not only those that fail
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) what: BenchWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchWhat {
    /// A training step on made-up tokens: tokens per second, share of the peak, memory
    Step(BenchStep),
    /// Every operation of a training step by itself, and its share of the step
    #[command(after_help = SHARES)]
    Kernels(BenchKernels),
    /// Matrix products, in the three layouts of training
    #[command(after_help = SHARES)]
    Products(BenchProducts),
    /// Attention: forward, backward, and over the cache of a text that grows
    #[command(after_help = SHARES)]
    Attention(BenchAttention),
    /// Collectives between ranks of this host
    #[command(after_help = COLLECTIVES)]
    Collectives(BenchCollectives),
}

const COLLECTIVES: &str = "\
Sizes are bytes of the whole that all ranks share, and rates are those bytes in the time of one
call. Ranks on GPUs use NCCL; others shared memory, or with carrier=tcp sockets.";

const SHARES: &str = "\
Rates are shares of what the device does at most in the same run: a large copy, or a large product.
Bytes and operations are those that the result needs, so nothing is gained by doing more.";

#[derive(Debug, Args)]
pub(crate) struct BenchStep {
    /// Settings as of a run: model=1b, recompute=full, offload_optimizer=cpu [default: model=300m mixed_precision=auto]
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Documents of a micro-batch
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = length)]
    pub(crate) rows: usize,
    /// Tokens of each
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = length)]
    pub(crate) length: usize,
    /// Vocabulary of a named size
    #[arg(long, value_name = "N", default_value_t = 32000, value_parser = length)]
    pub(crate) vocab: usize,
    /// Steps to time; the first two are not counted
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = length)]
    pub(crate) steps: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What the other benchmarks run on.
#[derive(Debug, Args)]
pub(crate) struct BenchOn {
    /// What computes [default: a GPU where one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = On::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: On,
    /// How weights and activations are stored [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_name = "TYPE", ignore_case = true, hide_possible_values = true)]
    pub(crate) dtype: Option<Storage>,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = few)]
    pub(crate) threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchKernels {
    /// A named size [default: 300m on a GPU, 15m on a CPU]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<String>,
    /// Documents of a micro-batch [default: 16; 8 on a CPU]
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) rows: Option<usize>,
    /// Tokens of each [default: 2048; 256 on a CPU]
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) length: Option<usize>,
    /// Vocabulary [default: 32000; 4096 on a CPU]
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) vocab: Option<usize>,
    /// What backward makes again: none, selective or full
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Again::None, hide_possible_values = true)]
    pub(crate) recompute: Again,
    #[command(flatten)]
    pub(crate) on: BenchOn,
}

#[derive(Debug, Args)]
pub(crate) struct BenchProducts {
    /// Rows of the result [default: cubes of several sizes]
    #[arg(long, value_name = "N", requires_all = ["n", "k"], value_parser = length)]
    pub(crate) m: Option<usize>,
    /// Its columns
    #[arg(long, value_name = "N", requires = "m", value_parser = length)]
    pub(crate) n: Option<usize>,
    /// What is summed over
    #[arg(long, value_name = "N", requires = "m", value_parser = length)]
    pub(crate) k: Option<usize>,
    #[command(flatten)]
    pub(crate) on: BenchOn,
}

#[derive(Debug, Args)]
pub(crate) struct BenchAttention {
    /// Documents [default, where no shape is given: several shapes]
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) rows: Option<usize>,
    /// Tokens of each
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) length: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = few)]
    pub(crate) heads: Option<usize>,
    /// Key-value heads, which divide the query heads [default: as many]
    #[arg(long, value_name = "N", alias = "kv_heads", value_parser = few)]
    pub(crate) kv_heads: Option<usize>,
    /// Width of a head
    #[arg(long, value_name = "N", alias = "head_dim", value_parser = few)]
    pub(crate) head_dim: Option<usize>,
    /// Keys that a query sees, its own among them [default: all]
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) window: Option<usize>,
    #[command(flatten)]
    pub(crate) on: BenchOn,
}

#[derive(Debug, Args)]
pub(crate) struct BenchCollectives {
    /// Settings as of a run: device=cpu, carrier=tcp, share_gpus=true
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Ranks: a number, cpu (one for each core), gpu or auto
    #[arg(long, value_name = "N", default_value = "2", aliases = ["nproc-per-node", "nproc_per_node"])]
    pub(crate) nproc: Nproc,
    /// The largest size, in MiB
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) largest: u16,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What backward makes again.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Again {
    None,
    Selective,
    Full,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// A YAML or JSON file, and any number of settings that override it: key=value, or --key value
    #[arg(value_name = "CONFIG | KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Train {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Start this many ranks on this host: a number, cpu (one for each core), gpu or auto
    #[arg(long, value_name = "N", aliases = ["nproc-per-node", "nproc_per_node"])]
    pub(crate) nproc: Option<Nproc>,
    /// Seconds to save a checkpoint and leave after SIGTERM or SIGUSR1
    #[arg(long, value_name = "S", default_value_t = stop::GRACE, value_parser = seconds)]
    pub(crate) grace: f64,
    /// What `torch.distributed.launch` and the DeepSpeed launcher append. The environment decides.
    #[arg(long, value_name = "N", alias = "local_rank", hide = true)]
    pub(crate) local_rank: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct Prepare {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Show this many rows
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) samples: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Launch {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Ranks on each node: a number, cpu (one for each core), gpu or auto
    #[arg(long, value_name = "N", aliases = ["nproc_per_node", "nproc"])]
    pub(crate) nproc_per_node: Option<Nproc>,
    /// Number of nodes
    #[arg(long, value_name = "N", value_parser = nnodes)]
    pub(crate) nnodes: Option<u16>,
    /// Number of this node, from 0
    #[arg(long, value_name = "N", alias = "node_rank")]
    pub(crate) node_rank: Option<u16>,
    /// Host of node 0
    #[arg(long, value_name = "HOST", alias = "master_addr")]
    pub(crate) master_addr: Option<String>,
    /// Port on that host [default: 29500; a free one for a single node]
    #[arg(long, value_name = "PORT", alias = "master_port", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// One node, any free port
    #[arg(long, conflicts_with_all = ["nnodes", "node_rank", "master_addr", "master_port"])]
    pub(crate) standalone: bool,
    /// Start all ranks again when one fails, so often; they go on from the newest checkpoint
    #[arg(long, value_name = "N", alias = "max_restarts", default_value_t = 0)]
    pub(crate) max_restarts: u32,
    /// Seconds that ranks wait for each other at the start
    #[arg(long, value_name = "S", alias = "join_timeout", default_value = "60", value_parser = seconds)]
    pub(crate) join_timeout: f64,
    /// Seconds for the ranks to save a checkpoint and leave after SIGTERM or SIGUSR1; then they are killed
    #[arg(long, value_name = "S", default_value_t = stop::GRACE, value_parser = seconds)]
    pub(crate) grace: f64,
    /// Copy what ranks print into files: 1 stdout, 2 stderr, 3 both. Rank 0 then draws no progress bar
    #[arg(long, value_name = "0..3", value_parser = tee)]
    pub(crate) tee: Option<u8>,
    /// Folder for --tee [default: <output_dir>/logs]
    #[arg(long, value_name = "DIR", alias = "log_dir")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Show the output of these local ranks only
    #[arg(long, value_name = "N,N", alias = "local_ranks_filter", value_delimiter = ',')]
    pub(crate) local_ranks_filter: Option<Vec<u32>>,
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

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// A checkpoint, or the output folder of a run, whose newest one is taken
    #[arg(value_name = "CHECKPOINT | RUN_DIR")]
    pub(crate) from: PathBuf,
    /// The model folder to write; a model folder that is there is replaced
    pub(crate) out: PathBuf,
    /// Type of the weights [default: what the run computed in]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub(crate) dtype: Option<Storage>,
}

#[derive(Debug, Args)]
pub(crate) struct Quickstart {
    /// Settings that override the built-in configuration
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// Folder of the run
    #[arg(long, value_name = "DIR", alias = "output_dir", default_value = "outputs/quickstart")]
    pub(crate) output_dir: PathBuf,
}

/// A model to try.
#[derive(Debug, Args)]
pub(crate) struct Model {
    /// A Hugging Face model folder, or the output folder of a run
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// How weights and activations are stored [default: as the folder's weights are]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub(crate) dtype: Option<Storage>,
    /// What computes [default: a GPU where one works]
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = On::Auto, hide_default_value = true, hide_possible_values = true)]
    pub(crate) device: On,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Tokens of a text at most, its prompt included; the model's own limit if that is less
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = at_least_two)]
    pub(crate) context: usize,
}

/// What computes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum On {
    Auto,
    Cpu,
    #[value(alias = "gpu")]
    Cuda,
}

impl From<On> for lockstep_config::DeviceKind {
    fn from(on: On) -> Self {
        match on {
            On::Auto => Self::Auto,
            On::Cpu => Self::Cpu,
            On::Cuda => Self::Cuda,
        }
    }
}

/// How tokens are drawn. What is not said is as the folder's `generation_config.json` says, else greedy.
#[derive(Debug, Args)]
pub(crate) struct SamplingFlags {
    /// Tokens to add at most
    #[arg(long, value_name = "N", alias = "max_new_tokens", default_value_t = 256)]
    pub(crate) max_new_tokens: usize,
    /// 0 takes the likeliest token, 1 draws from the model's own probabilities
    #[arg(long, value_name = "T", value_parser = not_negative)]
    pub(crate) temperature: Option<f32>,
    /// Draw from the K likeliest tokens
    #[arg(long, value_name = "K", alias = "top_k")]
    pub(crate) top_k: Option<usize>,
    /// Draw from the likeliest tokens that together have probability P
    #[arg(long, value_name = "P", alias = "top_p", value_parser = share)]
    pub(crate) top_p: Option<f32>,
    /// Draw from tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", alias = "min_p", value_parser = share)]
    pub(crate) min_p: Option<f32>,
    /// Above 1, what already occurred becomes less likely
    #[arg(long, value_name = "X", alias = "repetition_penalty", value_parser = not_negative)]
    pub(crate) repetition_penalty: Option<f32>,
    /// End at this text, which is not shown; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// The same seed draws the same tokens
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) model: Model,
    /// A text to continue; may be given several times
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    /// A file with a JSON object and its `prompt` on each line
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,
    /// Continue each prompt this many times
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) samples: usize,
    /// Prompts that run at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = slots)]
    pub(crate) slots: usize,
    /// Print a JSON object for each text, with its tokens and their log-probabilities
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateFlags {
    /// A template file or tokenizer folder, or `builtin` [default: the model's own]
    #[arg(long, value_name = "PATH", alias = "chat_template")]
    pub(crate) chat_template: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) model: Model,
    #[command(flatten)]
    pub(crate) template: TemplateFlags,
    /// What the model is told first
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingFlags,
}

#[derive(Debug, Args)]
pub(crate) struct Eval {
    /// A Hugging Face model folder, or the output folder of a run
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// The configuration of a run, or settings such as eval_files=test.jsonl max_length=512
    #[arg(value_name = "CONFIG | KEY=VALUE", required = true)]
    pub(crate) settings: Vec<String>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Storage {
    #[value(alias = "fp32", alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "fp16", alias = "float16")]
    F16,
}

impl From<Storage> for lockstep_core::DType {
    fn from(storage: Storage) -> lockstep_core::DType {
        match storage {
            Storage::F32 => lockstep_core::DType::F32,
            Storage::Bf16 => lockstep_core::DType::BF16,
            Storage::F16 => lockstep_core::DType::F16,
        }
    }
}

/// How many ranks a host gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nproc {
    Count(u16),
    /// One for each GPU; one in all where there is none.
    Auto,
    /// One for each core.
    Cpu,
    /// One for each GPU.
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
                _ => Err("a number from 1 to 65535, auto, cpu or gpu is expected".into()),
            },
        }
    }
}

fn nnodes(text: &str) -> Result<u16, String> {
    if text.contains(':') {
        return Err("a range (min:max) is not implemented yet; give one number".into());
    }
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "a number from 1 to 65535 is expected".into())
}

fn tee(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(bits @ 0..=3) => Ok(bits),
        _ if text.contains(':') => Err("a map of ranks is not implemented yet; give 0, 1, 2 or 3".into()),
        _ => Err("0, 1 (stdout), 2 (stderr) or 3 (both) is expected".into()),
    }
}

fn slots(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=4096).contains(n))
        .ok_or_else(|| "a number from 1 to 4096 is expected".into())
}

/// A length of a shape: so few that no product of lengths overflows.
fn length(text: &str) -> Result<usize, String> {
    within(text, 1 << 20)
}

/// Heads of a layer, or elements of a head.
fn few(text: &str) -> Result<usize, String> {
    within(text, 512)
}

fn within(text: &str, most: usize) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=most).contains(n));
    number.ok_or_else(|| format!("a number from 1 to {most} is expected"))
}

fn at_least_two(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 2).ok_or_else(|| "a number from 2 on is expected".into())
}

fn not_negative(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    number.ok_or_else(|| "a number from 0 on is expected".into())
}

fn share(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| (0.0..=1.0).contains(x));
    number.ok_or_else(|| "a number from 0 to 1 is expected".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 1e6;
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=MOST).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds is expected".into()),
    }
}
