//! Why the dashboard cannot be served.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use lockstep_core::{Fault, FaultClass};

/// Why the dashboard cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DashboardError {
    /// The address is in use, or not one of this machine.
    #[error("cannot serve the dashboard at {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    /// A thread cannot be started, or random bytes cannot be read.
    #[error("cannot serve the dashboard: {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("cannot read the token of the dashboard in {}: {source}", .path.display())]
    TokenUnreadable { path: PathBuf, source: io::Error },
    #[error("token file {} can be read by other users (mode {mode:04o})", .path.display())]
    TokenFileOpen { path: PathBuf, mode: u32 },
    /// `origin` names the variable or the file, never the token.
    #[error("the token in {origin} has {chars} characters; at least {least} are required")]
    TokenShort { origin: String, chars: usize, least: usize },
    #[error("the token in {origin} has spaces or characters that no header can hold")]
    TokenCharacters { origin: String },
}

impl Fault for DashboardError {
    fn class(&self) -> FaultClass {
        match self {
            DashboardError::Listen { .. } | DashboardError::System { .. } => FaultClass::Unavailable,
            DashboardError::TokenUnreadable { .. } => FaultClass::InputMissing,
            DashboardError::TokenFileOpen { .. }
            | DashboardError::TokenShort { .. }
            | DashboardError::TokenCharacters { .. } => FaultClass::NotAuthorised,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            DashboardError::Listen { source, .. } => Some(match source.kind() {
                io::ErrorKind::AddrInUse => {
                    "Another program uses this port: give another one, or 0 for any.".into()
                }
                io::ErrorKind::AddrNotAvailable => {
                    "Give an address of this machine, such as 127.0.0.1 or 0.0.0.0.".into()
                }
                io::ErrorKind::PermissionDenied => "Ports below 1024 are reserved: give a higher one.".into(),
                _ => return None,
            }),
            DashboardError::TokenFileOpen { path, .. } => {
                Some(format!("Run `chmod 600 {}`.", path.display()))
            }
            DashboardError::TokenShort { .. } | DashboardError::TokenCharacters { .. } => {
                Some("Create one with `openssl rand -hex 32`.".into())
            }
            DashboardError::TokenUnreadable { .. } | DashboardError::System { .. } => None,
        }
    }
}
