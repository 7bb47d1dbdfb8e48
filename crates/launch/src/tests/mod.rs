//! Tests that span several modules.

mod fake_net;
mod processes;
mod real_sockets;
mod simulation;
