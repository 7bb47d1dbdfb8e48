//! The panels of the screen. Each says how many rows it would fill, and draws into what it gets; one without content
//! wants none.

pub(crate) mod charts;
pub(crate) mod collectives;
pub(crate) mod gpus;
pub(crate) mod header;
pub(crate) mod help;
pub(crate) mod log;
pub(crate) mod memory;
pub(crate) mod phases;
pub(crate) mod ranks;

use std::time::Duration;

use lockstep_observe::human_duration;

/// The steps over which costs are averaged.
const NEWEST: usize = 20;

/// A duration for people, in few characters.
fn duration(time: Duration) -> String {
    human_duration(time.as_secs_f64())
}
