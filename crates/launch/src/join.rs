//! Joins the other ranks of a run.

use std::time::Duration;

use crate::abort::Member;
use crate::client::ClientConfig;
use crate::control::Control;
use crate::error::LaunchError;
use crate::host::host_name;
use crate::serve::{ServerOptions, open, serve};
use crate::session::Session;
use crate::token::{Token, no_secret};
use crate::world::{RendezvousHost, World};

/// What a rank needs to join.
pub struct JoinOptions {
    pub token: Option<Token>,
    /// The version of the program, which must be the same on all ranks.
    pub version: String,
    /// How long ranks wait for each other.
    pub timeout: Duration,
    /// Receives messages about rejected connections, if this process runs the rendezvous.
    pub log: Box<dyn FnMut(&str) + Send>,
}

/// Joins the other ranks of `world`, and returns once all have joined. Rank 0 starts the rendezvous, unless the
/// launcher runs it.
pub fn join(world: &World, options: JoinOptions) -> Result<Session, LaunchError> {
    let JoinOptions { token, version, timeout, log } = options;
    if world.nodes() > 1 && token.is_none() {
        return Err(LaunchError::NoToken { nodes: world.nodes() });
    }
    let secret = token.as_ref().map_or_else(no_secret, Token::secret);
    let server = if world.rank == 0 && world.server == RendezvousHost::RankZero {
        let listener = open(world.nodes(), world.port, token.as_ref())?;
        let options = ServerOptions {
            world_size: world.world_size,
            local_world_size: world.local_world_size,
            attempt: world.restart,
            token,
            version: version.clone(),
            join_timeout: timeout,
            log,
        };
        Some(serve(&listener, options)?)
    } else {
        None
    };
    let config = ClientConfig {
        secret: secret.clone(),
        addr: format!("{}:{}", world.master_addr, world.port),
        member: Member {
            rank: world.rank,
            node: world.node,
            local_rank: world.local_rank,
            host: host_name(),
            pid: std::process::id(),
        },
        world_size: world.world_size,
        local_world_size: world.local_world_size,
        attempt: world.restart,
        version,
        join_timeout: timeout,
    };
    let control = Control::start(&world.master_addr, world.port, config)?;
    let started = control.wait(|state| match (state.start.take(), &mut state.ended) {
        (Some(start), _) => Some(Ok(start)),
        (None, Some(ended)) => {
            Some(Err(std::mem::replace(ended, Ok(())).err().unwrap_or(LaunchError::Ended)))
        }
        (None, None) => None,
    });
    match started {
        Ok(start) => Ok(Session::new(world.clone(), secret, start, control, server)),
        Err(error) => {
            drop(control);
            // Keep the rendezvous running until the other ranks have received the reason too.
            if let Some(server) = server {
                server.finish();
            }
            Err(error)
        }
    }
}
