//! Tests that need more than one module.

mod real_sockets;
