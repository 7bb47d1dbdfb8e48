//! Errors of starting, connecting and supervising ranks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use lockstep_core::{Fault, FaultClass};

use crate::abort::Abort;
use crate::names::{MASTER_ADDR, MPI_DIR, TOKEN_FILE};
use crate::port::Holder;

/// Why ranks could not start, find each other or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    #[error("environment variable {name} is `{}`: {want}", printable(value))]
    Variable { name: &'static str, value: String, want: &'static str },
    #[error("environment variable {name} is not set, but {because}")]
    VariableMissing { name: &'static str, because: String },
    #[error("environment variables contradict each other: {text}")]
    VariableConflict { text: String },
    #[error("{MASTER_ADDR} is not set, and ranks on several hosts cannot find each other through MPI: {why}")]
    NoMpiRendezvous { why: String },
    #[error("cannot read the token from {}: {cause}", path.display())]
    TokenUnreadable { path: PathBuf, cause: std::io::Error },
    #[error("token file {} can be read by other users (mode {mode:04o})", path.display())]
    TokenFileOpen { path: PathBuf, mode: u32 },
    #[error("the token in {origin} has {chars} characters; at least {least} are required")]
    TokenShort { origin: String, chars: usize, least: usize },
    #[error("a run on {nodes} nodes needs a token, but none is set")]
    NoToken { nodes: u32 },
    #[error("port {} is already in use{}", addr.port(), held(holder))]
    PortInUse { addr: SocketAddr, holder: Option<Holder> },
    #[error("cannot listen on {addr}: {cause}")]
    Bind { addr: SocketAddr, cause: std::io::Error },
    #[error("rank {rank} could not reach the rendezvous at {addr} within {} s: {last}", waited.as_secs_f64())]
    NoServer { rank: u32, addr: String, waited: Duration, last: String },
    #[error("the program that answers at {addr} is not a lockstep rendezvous")]
    NotLockstep { addr: String },
    #[error("the rendezvous at {addr} uses protocol version {theirs}, but this build uses version {ours}")]
    OtherProtocol { addr: String, theirs: u16, ours: u16 },
    #[error("the rendezvous at {addr} has a different token")]
    WrongToken { addr: String },
    #[error(
        "the run at {addr} was restarted or has ended: it is at attempt {theirs}, but this rank belongs to attempt \
         {ours}"
    )]
    OtherAttempt { addr: String, theirs: u32, ours: u32 },
    #[error("{}", .0.text)]
    Aborted(Abort),
    #[error("lost the connection to the rendezvous at {addr}: {why}")]
    ServerLost { addr: String, why: String },
    #[error("{text}")]
    Disagree { text: String },
    #[error("cannot exchange `{name}` between ranks: {bytes} bytes exceed the limit of {most}")]
    TooLarge { name: String, bytes: usize, most: usize },
    #[error("the session with the rendezvous has ended")]
    Ended,
    #[error("cannot start {}: {cause}", program.display())]
    Spawn { program: PathBuf, cause: std::io::Error },
    #[error("cannot write {}: {cause}", path.display())]
    Scratch { path: PathBuf, cause: std::io::Error },
    #[error("cannot {what}: {cause}")]
    System { what: &'static str, cause: std::io::Error },
}

impl LaunchError {
    /// The same error for another thread that waits for it.
    pub(crate) fn duplicate(&self) -> LaunchError {
        match self {
            LaunchError::Aborted(abort) => LaunchError::Aborted(abort.clone()),
            LaunchError::ServerLost { addr, why } => {
                LaunchError::ServerLost { addr: addr.clone(), why: why.clone() }
            }
            _ => LaunchError::Ended,
        }
    }
}

impl Fault for LaunchError {
    fn class(&self) -> FaultClass {
        use LaunchError::*;
        match self {
            Variable { .. } | VariableMissing { .. } | VariableConflict { .. } | Disagree { .. } => {
                FaultClass::BadConfig
            }
            NotLockstep { .. } | OtherProtocol { .. } => FaultClass::BadConfig,
            TokenUnreadable { .. } => FaultClass::InputMissing,
            TokenFileOpen { .. } | TokenShort { .. } | NoToken { .. } | WrongToken { .. } => {
                FaultClass::NotAuthorised
            }
            NoMpiRendezvous { .. } | PortInUse { .. } | Bind { .. } | Spawn { .. } | System { .. } => {
                FaultClass::Unavailable
            }
            NoServer { .. } => FaultClass::Desync,
            Aborted(abort) => abort.kind.class(),
            OtherAttempt { .. } | ServerLost { .. } | Ended => FaultClass::PeerFailed,
            TooLarge { .. } => FaultClass::Internal,
            Scratch { .. } => FaultClass::CannotWrite,
        }
    }

    fn hint(&self) -> Option<String> {
        use LaunchError::*;
        Some(match self {
            NoMpiRendezvous { .. } => format!(
                "Set {MASTER_ADDR} to the host of rank 0 and {TOKEN_FILE} to a file with a token, for all ranks; or \
                 install an MPI with the standard ABI of MPI 5 on all hosts ({MPI_DIR} names its folder)."
            ),
            TokenFileOpen { path, .. } => format!("Run `chmod 600 {}`.", path.display()),
            TokenShort { .. } | NoToken { .. } => {
                "Create one with `openssl rand -hex 32 > token; chmod 600 token`, copy it to every node, and set \
                 LOCKSTEP_TOKEN_FILE=token there."
                    .into()
            }
            TokenUnreadable { .. } => "Set LOCKSTEP_TOKEN_FILE to a file that this user can read.".into(),
            WrongToken { .. } => {
                "Set the same LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE on every node. If it is the same, another run \
                 may be using this port: choose another with --master-port."
                    .into()
            }
            PortInUse { .. } => {
                "Choose another port with --master-port (without a launcher: MASTER_PORT or LOCKSTEP_PORT), the \
                 same on every node."
                    .into()
            }
            NotLockstep { .. } => {
                "Another program uses this port. Choose another with --master-port, the same on every node.".into()
            }
            OtherProtocol { .. } => "Use the same build of lockstep on every node.".into(),
            NoServer { .. } => {
                "Check that node 0 is running, that --master-addr and --master-port point to it, and that no \
                 firewall blocks the port. Raise --join-timeout if node 0 starts slowly."
                    .into()
            }
            ServerLost { .. } => {
                "The rendezvous runs in the launcher of node 0, or in rank 0 without a launcher: look there for the \
                 first error."
                    .into()
            }
            Aborted(abort) => abort.kind.hint()?.into(),
            _ => return None,
        })
    }
}

/// Escapes and shortens text from outside, so that it is safe to print on one line.
pub(crate) fn printable(text: &str) -> String {
    text.chars().take(100).flat_map(|c| c.escape_debug()).collect()
}

fn held(holder: &Option<Holder>) -> String {
    holder.as_ref().map_or_else(String::new, |holder| format!(" (by {holder})"))
}
