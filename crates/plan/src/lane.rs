//! The lanes of a schedule, as a table: a new lane is a new row.

use std::fmt;

/// A queue of operations that run in order. Lanes run concurrently: each is a CUDA stream on a GPU, a thread on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    Compute,
    Comm,
    Copy,
    Host,
}

/// The processor that runs the operations of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneProcessor {
    Device,
    /// The host's cores, for work on offloaded states: they add gradients and run the optimizer.
    Host,
}

/// How much of its processor a lane may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneThreads {
    /// For copies and reductions, which are bound by memory bandwidth.
    One,
    All,
}

/// What the planner and the engine need to know of a lane.
#[derive(Clone, Copy, Debug)]
pub struct LaneSpec {
    pub lane: Lane,
    pub name: &'static str,
    pub processor: LaneProcessor,
    pub threads: LaneThreads,
    /// Whether it exchanges data with other ranks. Every such lane has a communicator of its own, so that it waits for
    /// no other lane's messages.
    pub communicates: bool,
}

/// The first lane runs on the thread that calls the engine.
const LANES: [LaneSpec; Lane::COUNT] = {
    use LaneProcessor::{Device, Host};
    use LaneThreads::{All, One};
    [
        LaneSpec {
            lane: Lane::Compute,
            name: "compute",
            processor: Device,
            threads: All,
            communicates: false,
        },
        LaneSpec { lane: Lane::Comm, name: "comm", processor: Device, threads: One, communicates: true },
        LaneSpec { lane: Lane::Copy, name: "copy", processor: Device, threads: One, communicates: false },
        LaneSpec { lane: Lane::Host, name: "host", processor: Host, threads: All, communicates: false },
    ]
};

impl Lane {
    pub const COUNT: usize = 4;
    pub const ALL: [Lane; Lane::COUNT] = {
        let mut all = [Lane::Compute; Lane::COUNT];
        let mut row = 0;
        while row < Lane::COUNT {
            all[row] = LANES[row].lane;
            assert!(all[row] as usize == row, "the rows are in the order of the lanes");
            row += 1;
        }
        all
    };

    pub const fn spec(self) -> &'static LaneSpec {
        &LANES[self as usize]
    }

    /// The lanes that exchange data with other ranks.
    pub fn communicating() -> impl Iterator<Item = Lane> {
        Lane::ALL.into_iter().filter(|lane| lane.spec().communicates)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.spec().name)
    }
}
