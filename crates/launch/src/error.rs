//! Why ranks could not start, find each other or go on.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use lockstep_core::{Fault, FaultClass};

use crate::abort::Abort;
use crate::port::Holder;

/// Why ranks could not start, find each other or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    #[error("environment variable {name} is `{}`: {want}", printable(value))]
    Variable { name: &'static str, value: String, want: &'static str },
    #[error("environment variable {name} is not set, but {because}")]
    VariableMissing { name: &'static str, because: String },
    #[error("environment variables do not fit: {text}")]
    VariablesDiffer { text: String },
    #[error("cannot read the token from {}: {cause}", path.display())]
    TokenUnreadable { path: PathBuf, cause: std::io::Error },
    #[error("token file {} can be read by others (mode {mode:04o})", path.display())]
    TokenFileOpen { path: PathBuf, mode: u32 },
    #[error("the token in {place} has {chars} characters; at least {least} are needed")]
    TokenShort { place: String, chars: usize, least: usize },
    #[error("{nodes} nodes meet over the network, but no token says who may join")]
    NoToken { nodes: u32 },
    #[error("port {} is in use{}", addr.port(), held(holder))]
    PortInUse { addr: SocketAddr, holder: Option<Holder> },
    #[error("cannot listen on {addr}: {cause}")]
    Bind { addr: SocketAddr, cause: std::io::Error },
    #[error("rank {rank}: no rendezvous at {addr} within {:.0} s: {last}", waited.as_secs_f64())]
    NoServer { rank: u32, addr: String, waited: Duration, last: String },
    #[error("what answers at {addr} is not a lockstep rendezvous")]
    NotLockstep { addr: String },
    #[error("the rendezvous at {addr} speaks protocol {theirs}, this build {ours}")]
    OtherProtocol { addr: String, theirs: u16, ours: u16 },
    #[error("the rendezvous at {addr} has another token")]
    WrongToken { addr: String },
    #[error(
        "the run at {addr} has been restarted or has ended (attempt {theirs}, this rank is of attempt {ours})"
    )]
    OtherAttempt { addr: String, theirs: u32, ours: u32 },
    #[error("{}", .0.text)]
    Aborted(Abort),
    #[error("the connection to the rendezvous at {addr} was lost: {why}")]
    ServerLost { addr: String, why: String },
    #[error("{text}")]
    Disagree { text: String },
    #[error("`{name}`: {bytes} bytes are more than ranks may exchange ({most})")]
    TooLarge { name: String, bytes: usize, most: usize },
    #[error("the session has ended")]
    Ended,
    #[error("cannot start {}: {cause}", program.display())]
    Spawn { program: PathBuf, cause: std::io::Error },
    #[error("cannot write {}: {cause}", path.display())]
    Scratch { path: PathBuf, cause: std::io::Error },
    #[error("cannot {what}: {cause}")]
    System { what: &'static str, cause: std::io::Error },
}

impl LaunchError {
    /// The same once more, for another who waits.
    pub(crate) fn again(&self) -> LaunchError {
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
            Variable { .. } | VariableMissing { .. } | VariablesDiffer { .. } | Disagree { .. } => {
                FaultClass::BadConfig
            }
            NotLockstep { .. } | OtherProtocol { .. } => FaultClass::BadConfig,
            TokenUnreadable { .. } => FaultClass::InputMissing,
            TokenFileOpen { .. } | TokenShort { .. } | NoToken { .. } | WrongToken { .. } => {
                FaultClass::NotAuthorised
            }
            PortInUse { .. } | Bind { .. } | Spawn { .. } | System { .. } => FaultClass::Unavailable,
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
            TokenFileOpen { path, .. } => format!("Run `chmod 600 {}`.", path.display()),
            TokenShort { .. } | NoToken { .. } => {
                "Make one with `openssl rand -hex 32 > token; chmod 600 token`, copy it to every node, and set \
                 LOCKSTEP_TOKEN_FILE=token there."
                    .into()
            }
            TokenUnreadable { .. } => "LOCKSTEP_TOKEN_FILE names the file.".into(),
            WrongToken { .. } => {
                "Give every node the same LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE; another run may hold this port."
                    .into()
            }
            PortInUse { .. } => {
                "Choose another with --master-port (without a launcher: MASTER_PORT or LOCKSTEP_PORT), the same \
                 on every node."
                    .into()
            }
            NotLockstep { .. } => {
                "Another program has this port: choose another with --master-port, the same on every node.".into()
            }
            OtherProtocol { .. } => "Use the same build of lockstep on every node.".into(),
            NoServer { .. } => {
                "Is node 0 running, and can this host reach it? --master-addr and --master-port say where it is; \
                 --join-timeout gives it more time."
                    .into()
            }
            Aborted(abort) => abort.kind.hint()?.into(),
            _ => return None,
        })
    }
}

/// Text from outside, fit for one line.
pub(crate) fn printable(text: &str) -> String {
    text.chars().take(100).flat_map(|c| c.escape_debug()).collect()
}

fn held(holder: &Option<Holder>) -> String {
    holder.as_ref().map_or_else(String::new, |holder| format!(" (by {holder})"))
}
