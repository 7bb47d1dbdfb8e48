//! Collectives between GPUs through NVIDIA's NCCL, which is loaded at run time like all CUDA libraries.
//!
//! A [`NcclComm`] is the communicator of one group. Its collectives are issued to a stream and complete in stream
//! order. [`NcclWorld`] holds the communicators of all groups of a rank and waits for streams. Every wait is bounded:
//! communicators are non-blocking and their state is polled, and a deadline, a failure or the end of the run
//! ([`crate::Abort`]) aborts the communicator, which also ends its kernels.
//!
//! The order of summation is that of NCCL's algorithms. It is the same from run to run for the same ranks, machines
//! and environment, but differs from the order of [`lockstep_core::fold`].

mod communicator;
mod issue;
mod library;
mod shares;
mod sys;
mod world;

pub use communicator::NcclComm;
pub use library::Nccl;
pub use world::{NcclSpec, NcclWorld};
