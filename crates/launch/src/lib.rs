//! Starts ranks, brings them together and watches over them. The control plane: no byte of training
//! travels here.
//!
//! - `world`: which rank this process is, as the environment says it.
//! - `join` and [`Session`]: the ranks find each other, compare what they are about to do, and hear
//!   within a moment when one of them fails. One server, in the launcher or in rank 0's process.
//! - [`Supervisor`]: starts the ranks of one node, relays what they print, stops them together and starts
//!   them anew.
//!
//! Decisions are pure: `server`, `client` and `watch` turn `(now, event)` into actions and see no socket,
//! process or clock. `serve`, `control` and `supervise` are the thin loops that carry the actions out. Nothing
//! here prints, exits or reads the environment: the caller hands in what it has read and prints what it is given.

#![forbid(unsafe_code)]

mod abort;
mod agree;
mod cause;
mod client;
mod control;
pub mod cores;
mod error;
mod host;
mod join;
mod lifeline;
pub mod names;
mod port;
mod relay;
mod rounds;
mod seal;
mod serve;
mod server;
mod session;
mod signals;
mod spawn;
mod supervise;
mod token;
mod watch;
mod wire;
mod world;

#[cfg(test)]
mod tests;

pub use abort::{Abort, AbortKind, Member};
pub use cause::{ErrorNote, RankFailure, STOPPED};
pub use control::AbortReason;
pub use error::LaunchError;
pub use host::host_name;
pub use join::{JoinOptions, join};
pub use lifeline::die_with;
pub use relay::Console;
pub use serve::{Outcome, RunningServer, ServerOptions, serve};
pub use session::{FailureNotice, Session};
pub use signals::{EndSignal, Signals};
pub use supervise::{Ending, Supervisor, Tee, supervise};
pub use token::Token;
pub use world::{ServerPlace, World};
