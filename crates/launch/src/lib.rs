//! Starts ranks, connects them to each other and supervises them. This is the control plane: no training data passes
//! through it.
//!
//! - `world`: reads from the environment which rank this process is.
//! - `join` and [`Session`]: ranks find each other through the rendezvous, compare their configurations, and learn
//!   within a moment when one of them fails. There is one rendezvous server, in the launcher or in rank 0's process.
//! - [`Supervisor`]: starts the ranks of one node, relays their output, stops them together and restarts them.
//!
//! Decisions are pure functions: `server`, `client` and `stop_policy` turn `(now, event)` into actions and use no
//! socket, process or clock. `serve`, `control` and `supervise` are thin loops that carry the actions out. Nothing
//! here prints, exits or reads the environment: the caller passes in what it has read and prints what it gets back.

#![forbid(unsafe_code)]

mod abort;
mod agree;
mod cause;
mod client;
mod cluster_node;
mod control;
pub mod cores;
mod error;
mod exchanges;
mod host;
mod host_list;
mod join;
mod lifeline;
mod mpi_ranks;
pub mod names;
mod port;
mod relay;
mod seal;
mod serve;
mod server;
mod session;
mod signals;
mod slurm_tasks;
mod spawn;
mod stop_policy;
mod supervise;
mod token;
mod wire;
mod world;

#[cfg(test)]
mod tests;

pub use abort::{Abort, AbortKind, Member};
pub use cause::{ErrorNote, RankFailure, STOPPED};
pub use cluster_node::{ClusterNode, FromVariable};
pub use control::AbortReason;
pub use error::LaunchError;
pub use host::host_name;
pub use host_list::expand_host_list;
pub use join::{JoinOptions, join};
pub use lifeline::die_with;
pub use relay::Console;
pub use serve::{RendezvousOutcome, RunningServer, ServerOptions, serve};
pub use session::{FailureNotice, Session};
pub use signals::{EndSignal, Signals};
pub use supervise::{Ending, MpiExec, Supervisor, Tee, supervise};
pub use token::Token;
pub use world::{DEFAULT_PORT, RendezvousHost, StartedBy, World};
