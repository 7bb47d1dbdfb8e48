//! A cluster as the cost model sees it: nodes of equal ranks, a link inside a node and a network between nodes.

use lockstep_core::{Axis, Bytes, Mesh};

use crate::cost::collective::Group;

/// A link: what it carries per second in one direction, and the time of one hop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

/// The algorithms of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// NCCL's rings and, for all-reduce, trees.
    Nccl,
    /// Lockstep's carriers, shared memory and TCP: every rank reads directly from the others, and the owner of a range
    /// adds it up.
    Direct,
}

/// Ranks and the links between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    pub nodes: u32,
    pub ranks_per_node: u32,
    /// Inside a node, per rank.
    pub intra: Link,
    /// Between nodes, per node: all ranks of a node share it.
    pub inter: Link,
    pub transport: Transport,
}

impl Cluster {
    /// One rank: no collective ever runs.
    pub const SINGLE: Cluster = Cluster {
        nodes: 1,
        ranks_per_node: 1,
        intra: Link { bytes_per_s: f64::INFINITY, latency_s: 0.0 },
        inter: Link { bytes_per_s: f64::INFINITY, latency_s: 0.0 },
        transport: Transport::Nccl,
    };

    pub const fn world_size(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }

    /// The same links with another number of ranks: one node until it is full, then full nodes.
    pub fn with_ranks(&self, ranks: u32) -> Cluster {
        let ranks_per_node = self.ranks_per_node.min(ranks);
        Cluster { nodes: ranks.div_ceil(ranks_per_node), ranks_per_node, ..*self }
    }

    /// How the ranks along `axes` lie on the nodes. Groups of the same axes run their collectives at the same time.
    pub fn group(&self, mesh: &Mesh, axes: &[Axis]) -> Group {
        let (size, per_node) = (mesh.size_of(axes), mesh.per_node.max(1));
        let on_node = match axes {
            [Axis::Replicate] => (per_node / mesh.shard).max(1),
            _ => per_node,
        };
        let on_node = on_node.min(size).max(1);
        Group {
            nodes: size.div_ceil(on_node),
            ranks_per_node: on_node,
            groups_per_node: (per_node / on_node).max(1),
        }
    }
}

/// The speed of a network as people write it: `400Gbps`, `25GB/s`, `100Gbps/gpu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkSpeed {
    pub bytes_per_s: f64,
    /// Whether every GPU has a network port of this speed. Otherwise a node has one.
    pub per_gpu: bool,
}

/// Text that is no network speed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a network speed")]
pub struct NetworkError {
    pub text: String,
}

impl NetworkError {
    /// What to write instead.
    pub const HINT: &'static str = "Write a number and a unit, such as 100Gbps (one port per node), \
                                    400Gbps/gpu (one port per GPU) or 25GB/s.";
}

impl NetworkSpeed {
    pub fn parse(text: &str) -> Result<NetworkSpeed, NetworkError> {
        let error = || NetworkError { text: text.into() };
        let lower = text.trim().to_ascii_lowercase();
        let (speed, per_gpu) = match lower.strip_suffix("/gpu") {
            Some(speed) => (speed, true),
            None => (lower.strip_suffix("/node").unwrap_or(&lower), false),
        };
        let digits = speed.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(error)?;
        let (number, unit) = speed.split_at(digits);
        let number: f64 = number.parse().map_err(|_| error())?;
        let bytes_per_unit = match unit.trim() {
            "gbps" | "gbit/s" => 1e9 / 8.0,
            "mbps" | "mbit/s" => 1e6 / 8.0,
            "tbps" | "tbit/s" => 1e12 / 8.0,
            "gb/s" => 1e9,
            "mb/s" => 1e6,
            _ => return Err(error()),
        };
        let bytes_per_s = number * bytes_per_unit;
        let is_speed = bytes_per_s > 0.0 && bytes_per_s.is_finite();
        if is_speed { Ok(NetworkSpeed { bytes_per_s, per_gpu }) } else { Err(error()) }
    }

    /// The speed of a whole node.
    pub fn per_node(&self, ranks_per_node: u32) -> f64 {
        if self.per_gpu { self.bytes_per_s * f64::from(ranks_per_node) } else { self.bytes_per_s }
    }
}

impl std::fmt::Display for NetworkSpeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scope = if self.per_gpu { "GPU" } else { "node" };
        write!(f, "{} Gbit/s per {scope}", self.bytes_per_s * 8.0 / 1e9)
    }
}

/// 97 % of a GPU's memory: the rest is what drivers need.
pub(crate) fn usable(memory: Bytes) -> Bytes {
    Bytes(memory.0 / 100 * 97)
}
