//! Bytes of collectives by the textbook formulas, and their times.

use lockstep_config::StrategyName;
use lockstep_core::{Axis, Mesh};

use crate::cost::{Cluster, Collective, Group, Link, Machine, Transport, Workload};

use super::{machine, plan_under, workload};

const INTRA: Link = Link { bytes_per_s: 100e9, latency_s: 1e-6 };
const INTER: Link = Link { bytes_per_s: 10e9, latency_s: 10e-6 };

fn cluster(nodes: u32, ranks_per_node: u32, transport: Transport) -> Cluster {
    Cluster { nodes, ranks_per_node, intra: INTRA, inter: INTER, transport }
}

/// Bytes that a rank sends in a step.
fn sent(workload: &Workload<'_>, name: StrategyName, machine: &Machine) -> f64 {
    let plan = plan_under(workload, name, machine);
    machine.predict(&plan).phases[0].sent_bytes
}

/// Elements of all units, of the blocks, of the embedding and of the head.
fn elems(workload: &Workload<'_>) -> [f64; 4] {
    let units: Vec<f64> = workload.input.models[0].units.iter().map(|unit| unit.elems as f64).collect();
    let [embed, head] = [units[0], units[units.len() - 1]];
    let all: f64 = units.iter().sum();
    [all, all - embed - head, embed, head]
}

fn assert_equal(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} is not {expected}");
}

#[test]
fn strategies_send_what_the_textbook_says() {
    let machine = machine("h200", 1, 4, "100Gbps");
    let mut workload = workload("15m", 1, 512);
    workload.input.prefetch = 0;
    let [all, blocks, embed, head] = elems(&workload);
    let share = 3.0 / 4.0;
    // The norm's partial sums, one f64 of each rank.
    let norm = share * 4.0 * 8.0;
    let (reduce_scatter, updated) = (share * 4.0 * all, share * 2.0 * all);
    assert_equal(sent(&workload, StrategyName::Ddp, &machine), 2.0 * share * 4.0 * all);
    assert_equal(sent(&workload, StrategyName::Zero1, &machine), 2.0 * share * 4.0 * all + updated);
    assert_equal(sent(&workload, StrategyName::Zero2, &machine), reduce_scatter + updated + norm);
    // Forward and backward gather blocks; the embedding and the head are gathered once.
    let gathered = share * 2.0 * (2.0 * blocks + embed + head);
    assert_equal(sent(&workload, StrategyName::Zero3, &machine), gathered + reduce_scatter + norm);
    let once = share * 2.0 * all;
    assert_equal(sent(&workload, StrategyName::ShardGradOp, &machine), once + reduce_scatter + norm);
}

#[test]
fn hybrid_shards_send_the_shard_between_nodes() {
    let machine = machine("h200", 2, 4, "100Gbps");
    let mut workload = workload("15m", 1, 512);
    workload.input.prefetch = 0;
    let [all, blocks, embed, head] = elems(&workload);
    let inside = 3.0 / 4.0 * (2.0 * (2.0 * blocks + embed + head) + 4.0 * all + 4.0 * 8.0);
    let between = 2.0 * (1.0 / 2.0) * 4.0 * all / 4.0;
    assert_equal(sent(&workload, StrategyName::HybridShard, &machine), inside + between);
}

/// ddp sums micro-batches before it reduces them; zero3 gathers and reduces for each.
#[test]
fn accumulation_multiplies_the_communication_of_zero3_only() {
    let machine = machine("h200", 1, 4, "100Gbps");
    let mut once = workload("15m", 4, 512);
    once.input.prefetch = 0;
    let four = once.with_rows(1);
    assert_eq!(four.input.num_micro_batches, 4);
    let ratio = |name| sent(&four, name, &machine) / sent(&once, name, &machine);
    assert_equal(ratio(StrategyName::Ddp), 1.0);
    assert!((ratio(StrategyName::Zero3) - 4.0).abs() < 1e-4);
}

#[test]
fn rings_take_the_time_of_their_slowest_link() {
    let seconds = |collective: Collective, bytes, group| {
        collective.seconds(bytes, group, &cluster(2, 4, Transport::Nccl))
    };
    let one_node = Group { nodes: 1, ranks_per_node: 4, groups_per_node: 1 };
    let two_nodes = Group { nodes: 2, ..one_node };
    assert_equal(seconds(Collective::AllGather, 4e9, one_node), 3.0 * 1e-6 + 0.75 * 4e9 / 100e9);
    // Two of eight hops cross the network; seven hops are on the way.
    let latency = 7.0 / 8.0 * (6.0 * 1e-6 + 2.0 * 10e-6);
    assert_equal(seconds(Collective::ReduceScatter, 8e9, two_nodes), latency + 7.0 / 8.0 * 8e9 / 10e9);
    assert_equal(
        seconds(Collective::AllReduce, 8e9, two_nodes),
        2.0 * seconds(Collective::AllGather, 8e9, two_nodes),
    );
    assert_eq!(seconds(Collective::AllReduce, 8e9, Group { ranks_per_node: 1, ..one_node }), 0.0);
}

/// A small all-reduce over many nodes uses a tree: its latency grows with the logarithm of the nodes.
#[test]
fn trees_are_faster_for_small_messages() {
    let all_reduce = |nodes| {
        let group = Group { nodes, ranks_per_node: 8, groups_per_node: 1 };
        Collective::AllReduce.seconds(8.0, group, &cluster(nodes, 8, Transport::Nccl))
    };
    let tree = 2.0 * (7.0 * 10e-6 + 7.0 * 1e-6 + 8.0 / 10e9);
    assert_equal(all_reduce(128), tree);
    assert!(all_reduce(256) < 1.2 * all_reduce(128));
}

#[test]
fn direct_exchange_shares_the_network_of_a_node() {
    let group = Group { nodes: 2, ranks_per_node: 2, groups_per_node: 1 };
    let seconds = Collective::AllGather.seconds(4e9, group, &cluster(2, 2, Transport::Direct));
    // One quarter from the neighbour; two quarters from the other node, which both ranks of a node fetch.
    let near = 1e-6 + 1e9 / 100e9;
    let far = 2.0 * 10e-6 + 2.0 * 2e9 / 10e9;
    assert_equal(seconds, near + far);
}

#[test]
fn groups_lie_on_nodes_as_the_mesh_says() {
    let group = |mesh: Mesh, axes: &[Axis]| {
        let nodes = mesh.world_size().div_ceil(mesh.per_node);
        let group = cluster(nodes, mesh.per_node, Transport::Nccl).group(&mesh, axes);
        (group.nodes, group.ranks_per_node, group.groups_per_node)
    };
    let hybrid = Mesh { replicate: 4, shard: 8, per_node: 8 };
    assert_eq!(group(hybrid, &[Axis::Shard]), (1, 8, 1));
    assert_eq!(group(hybrid, &[Axis::Replicate]), (4, 1, 8), "eight groups share a node's network");
    assert_eq!(group(hybrid, &[Axis::World]), (4, 8, 1));
    let zero3 = Mesh { replicate: 1, shard: 32, per_node: 8 };
    assert_eq!(group(zero3, &[Axis::Shard]), (4, 8, 1));
    let ddp = Mesh { replicate: 32, shard: 1, per_node: 8 };
    assert_eq!(group(ddp, &[Axis::Replicate]), (4, 8, 1));
    let two_shards = Mesh { replicate: 8, shard: 2, per_node: 8 };
    assert_eq!(group(two_shards, &[Axis::Shard]), (1, 2, 4));
    assert_eq!(group(two_shards, &[Axis::Replicate]), (2, 4, 2));
}
