//! Bytes between ranks.
//!
//! A [`Carrier`] knows how two ranks agree on a call and how one reads what the other offers; threads,
//! shared memory and TCP differ in nothing else. [`Comm`] writes every collective once, over any carrier,
//! and folds contributions by the mesh's tree, so that a sum has the same bits whoever carried it. Between GPUs
//! [`NcclComm`] has the same collectives, issued to streams.

mod bytes;
mod call;
mod carrier;
mod comm;
mod connect;
mod error;
mod fold;
mod group;
mod host;
mod mixed;
mod nccl;
mod offers;
mod reduce;
mod shm;
mod tcp;
mod thread;
mod wire;

pub use bytes::BYTES_PER_ROUND;
pub use call::{Call, CallKind};
pub use carrier::{BOUNCE_BYTES, Carrier, MAX_OFFERS};
pub use comm::{Comm, Gathered};
pub use connect::{ConnectSpec, Exchange, Prefer, connect};
pub use error::{Abort, CommError};
pub use group::Group;
pub use host::host_identity;
pub use mixed::Mixed;
pub use nccl::{Nccl, NcclComm, NcclSpec, NcclWorld};
pub use shm::{ShmCarrier, WINDOW};
pub use tcp::net;
pub use tcp::{Sockets, TcpCarrier, TcpSpec};
pub use thread::{ThreadCarrier, thread_world};
