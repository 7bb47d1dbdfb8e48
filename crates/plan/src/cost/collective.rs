//! How long collectives take, and how many bytes a rank sends.
//!
//! N ranks exchange a buffer of S bytes: the gathered result of an all-gather, the input of a reduce-scatter, the
//! buffer of an all-reduce.

use crate::cost::cluster::{Cluster, Link, Transport};

/// The collectives of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    AllGather,
    ReduceScatter,
    AllReduce,
}

/// The ranks of one group, as they lie on nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    pub nodes: u32,
    /// Members of the group on each of its nodes.
    pub ranks_per_node: u32,
    /// Groups that use a node's network at the same time.
    pub groups_per_node: u32,
}

impl Group {
    pub const fn size(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }
}

impl Collective {
    /// Passes of a ring over the buffer: an all-reduce is a reduce-scatter and an all-gather.
    const fn passes(self) -> f64 {
        match self {
            Collective::AllGather | Collective::ReduceScatter => 1.0,
            Collective::AllReduce => 2.0,
        }
    }

    /// The bytes that each rank sends, by any of the algorithms: (N − 1) / N · S a pass.
    pub fn sent_bytes(self, bytes: f64, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        self.passes() * (n - 1.0) / n * bytes
    }

    /// Seconds until all ranks of a group have the result, if they all begin at once.
    pub fn seconds(self, bytes: f64, group: Group, cluster: &Cluster) -> f64 {
        if group.size() <= 1 {
            return 0.0;
        }
        // Groups on the same node share its network. Inside a node every rank has links of its own.
        let inter = Link {
            bytes_per_s: cluster.inter.bytes_per_s / f64::from(group.groups_per_node),
            ..cluster.inter
        };
        match (cluster.transport, self) {
            (Transport::Nccl, Collective::AllReduce) => {
                self.ring(bytes, group, cluster.intra, inter).min(tree(bytes, group, cluster.intra, inter))
            }
            (Transport::Nccl, _) => self.ring(bytes, group, cluster.intra, inter),
            (Transport::Direct, _) => self.direct(bytes, group, cluster.intra, inter),
        }
    }

    /// Rings: N − 1 steps a pass, in each of which every rank sends 1/N of the buffer to the next. NCCL lays several
    /// rings over a node's network ports, so together they have all of the node's bandwidth.
    fn ring(self, bytes: f64, group: Group, intra: Link, inter: Link) -> f64 {
        let n = f64::from(group.size());
        // Every node has one outgoing hop across the network, if there are several.
        let across = if group.nodes > 1 { f64::from(group.nodes) } else { 0.0 };
        let latency = (n - across).max(0.0) * intra.latency_s + across * inter.latency_s;
        let bandwidth = slowest(group, intra, inter);
        self.passes() * ((n - 1.0) / n * (latency + bytes / bandwidth))
    }

    /// Direct exchange: a rank reads 1/N of the buffer from each of the others. The ranks of a node share its network.
    fn direct(self, bytes: f64, group: Group, intra: Link, inter: Link) -> f64 {
        let (n, on_node) = (f64::from(group.size()), f64::from(group.ranks_per_node));
        let (near, far) = (on_node - 1.0, n - on_node);
        let near_seconds = near * intra.latency_s + near / n * bytes / intra.bytes_per_s;
        let far_seconds = match group.nodes {
            1 => 0.0,
            _ => far * inter.latency_s + far / n * bytes * on_node / inter.bytes_per_s,
        };
        self.passes() * (near_seconds + far_seconds)
    }
}

/// NCCL's double binary tree for all-reduce: up and down a tree of nodes, and along a chain inside each node. Every
/// byte passes twice.
fn tree(bytes: f64, group: Group, intra: Link, inter: Link) -> f64 {
    let depth = f64::from(group.nodes.next_power_of_two().trailing_zeros());
    let chain = f64::from(group.ranks_per_node) - 1.0;
    2.0 * (depth * inter.latency_s + chain * intra.latency_s + bytes / slowest(group, intra, inter))
}

fn slowest(group: Group, intra: Link, inter: Link) -> f64 {
    let inside = if group.ranks_per_node > 1 { intra.bytes_per_s } else { f64::INFINITY };
    let across = if group.nodes > 1 { inter.bytes_per_s } else { f64::INFINITY };
    inside.min(across)
}
