//! MPI, for clusters of CPUs: collectives of the library that the cluster has, opened at run time through the standard
//! ABI of MPI 5.
//!
//! One thread makes every call of MPI ([`thread`]); the communicators of all lanes hand it their operations. These are
//! nonblocking, so that it serves several lanes at once, and so that a caller can give up at its deadline.
//! Sums have the library's order: they agree with those of other carriers to rounding. Unlike carriers, MPI does not
//! compare what ranks call; the plan, on which ranks agree before they start, is what keeps them in step.

mod collectives;
mod communicator;
mod library;
mod sys;
mod thread;
mod world;

pub(crate) use communicator::MpiComm;
pub use library::Mpi;
pub use world::{MpiSpec, MpiWorld};
