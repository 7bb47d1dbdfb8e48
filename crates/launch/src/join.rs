//! A rank finds the others.

use std::time::Duration;

use crate::abort::Member;
use crate::client::ClientConfig;
use crate::control::Control;
use crate::error::LaunchError;
use crate::host::host_name;
use crate::serve::{ServerOptions, open, serve};
use crate::session::Session;
use crate::token::{Token, no_secret};
use crate::world::{ServerPlace, World};

/// What a rank brings along.
pub struct JoinOptions {
    pub token: Option<Token>,
    /// Of the program: all ranks must have the same.
    pub version: String,
    /// How long ranks wait for each other.
    pub timeout: Duration,
    /// Is given lines about refused connections, where this process has the rendezvous.
    pub log: Box<dyn FnMut(&str) + Send>,
}

/// Joins the other ranks of `world`; returns when all are there. Rank 0 brings the rendezvous, unless the
/// launcher has it.
pub fn join(world: &World, options: JoinOptions) -> Result<Session, LaunchError> {
    let JoinOptions { token, version, timeout, log } = options;
    if world.nodes() > 1 && token.is_none() {
        return Err(LaunchError::NoToken { nodes: world.nodes() });
    }
    let secret = token.as_ref().map_or_else(no_secret, Token::secret);
    let server = if world.rank == 0 && world.server == ServerPlace::RankZero {
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
    let started = control.wait(|heard| match (heard.start.take(), &mut heard.ended) {
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
            // The others are to hear why as well.
            if let Some(server) = server {
                server.finish();
            }
            Err(error)
        }
    }
}
