//! Collectives between ranks.
//!
//! A [`Carrier`] is a transport: it lets two ranks agree on a call, and lets one read what the other offers.
//! Threads, shared memory and TCP each implement it. [`Comm`] implements every collective once, on top of any
//! carrier, and sums contributions along the mesh's fixed tree, so a sum has the same bits over every carrier.
//! [`NcclComm`] provides the same collectives between GPUs, issued to streams.

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
mod traffic;
mod wire;

pub use bytes::BYTES_PER_ROUND;
pub use call::{Call, CallKind};
pub use carrier::{BOUNCE_BYTES, Carrier, MAX_OFFERS};
pub use comm::{Comm, GatherPart};
pub use connect::{CarrierChoice, ConnectSpec, Exchange, connect};
pub use error::{Abort, CommError};
pub use group::Group;
pub use host::host_identity;
pub use mixed::MixedCarrier;
pub use nccl::{Nccl, NcclComm, NcclSpec, NcclWorld};
pub use shm::{SHM_WINDOW_BYTES, ShmCarrier};
pub use tcp::net;
pub use tcp::{Sockets, TcpCarrier, TcpSpec};
pub use thread::{ThreadCarrier, thread_world};
pub use traffic::Traffic;
