//! Tests that need more than one module.

mod fake_net;
mod processes;
mod real_sockets;
mod simulation;
