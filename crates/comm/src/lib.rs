//! Collectives between ranks.
//!
//! A [`Carrier`] is a transport: it lets two ranks agree on a call, and lets one read what the other offers.
//! Threads, shared memory and TCP each implement it. [`Comm`] has every collective. They are implemented once on top of
//! any carrier, with sums along the mesh's fixed tree, so that a sum has the same bits over every carrier; and by MPI
//! ([`MpiWorld`]), with the library's sums. [`NcclComm`] provides the same collectives between GPUs, issued to streams.

mod bytes;
mod call;
mod carrier;
mod carrier_comm;
mod comm;
mod connect;
mod error;
mod fold;
mod group;
mod host;
mod mixed;
mod mpi;
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
pub use mpi::{Mpi, MpiSpec, MpiWorld};
pub use nccl::{Nccl, NcclComm, NcclSpec, NcclWorld};
pub use shm::{SHM_WINDOW_BYTES, ShmCarrier};
pub use tcp::net;
pub use tcp::{Sockets, TcpCarrier, TcpSpec};
pub use thread::{ThreadCarrier, thread_world};
pub use traffic::Traffic;
