//! Collectives on GPUs, by NVIDIA's NCCL, which is found at run time like everything of CUDA.
//!
//! A [`NcclComm`] is one group's communicator. Its collectives are issued to a stream and are over when the
//! stream is; [`NcclWorld`] holds the communicators of all groups of a rank and waits for streams. No wait is
//! without end: NCCL's calls return at once, its state is asked for again and again, and a deadline, a failure or
//! the end of the run ([`crate::Abort`]) takes the communicator down, which also ends its kernels.
//!
//! Sums are in the order of NCCL's algorithms. It is the same from run to run for the same ranks, machines and
//! environment, but not that of [`lockstep_core::fold`].

mod communicator;
mod cut;
mod issue;
mod library;
mod sys;
mod world;

pub use communicator::NcclComm;
pub use library::Nccl;
pub use world::{NcclSpec, NcclWorld};
