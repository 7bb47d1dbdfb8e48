//! Which carrier ranks choose, and how they report it.

mod support;

use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{Abort, CarrierChoice, Comm, CommError, ConnectSpec, Group, connect, host_identity};
use lockstep_core::proof::Secret;
use lockstep_core::{Axis, Bytes, Mesh, Rank};
use lockstep_device::{Memory, Pool};
use support::Rendezvous;

/// Connects `world` ranks. `change` modifies the specification of each.
fn connect_all(
    world: u32,
    change: impl Fn(u32, &mut ConnectSpec<'_>) + Sync,
) -> Vec<Result<Comm, CommError>> {
    let rendezvous = Rendezvous::new(world);
    let session = Secret::from_text("a test");
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|r| {
                let (rendezvous, session, change) = (&rendezvous, &session, &change);
                scope.spawn(move || {
                    let memory = Memory::allocate_shared(Bytes(1 << 16), &Pool::new(1)).unwrap();
                    let mut spec = ConnectSpec {
                        rank: Rank(r),
                        world,
                        host: None,
                        regions: vec![Arc::new(memory)],
                        bind: "127.0.0.1:0".parse().unwrap(),
                        advertise: None,
                        session,
                        run_id: "run",
                        deadline: Duration::from_secs(5),
                        abort: Abort::default(),
                        carrier: CarrierChoice::Auto,
                        spin: None,
                    };
                    change(r, &mut spec);
                    connect(&spec, &mut |mine| Ok(rendezvous.gather(r, mine)))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs a barrier over the connected ranks and returns their notes.
fn notes(comms: Vec<Result<Comm, CommError>>) -> Vec<String> {
    let world = comms.len() as u32;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    let mut comm = comm.unwrap();
                    let group = Group::along(&Mesh::on_one_node(1, world), Axis::World, comm.rank());
                    comm.barrier(&group, 1).unwrap();
                    comm.note().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn private_memory() -> Vec<Arc<Memory>> {
    vec![Arc::new(Memory::allocate(Bytes(1 << 16), &Pool::new(1)).unwrap())]
}

#[test]
fn ranks_on_one_host_use_shared_memory() {
    assert!(host_identity().len() > 40);
    assert_eq!(notes(connect_all(3, |_, _| {})), ["shared memory"; 3]);
    assert_eq!(notes(connect_all(1, |_, _| {})), ["none needed, one rank"]);
}

#[test]
fn ranks_on_different_hosts_use_tcp() {
    let two_and_one = |r: u32, spec: &mut ConnectSpec<'_>| spec.host = Some(format!("host {}", r / 2));
    let notes = notes(connect_all(3, two_and_one));
    let both = "shared memory with 1 of the other ranks, TCP with the rest";
    assert_eq!(notes, [both, both, "TCP"]);
}

#[test]
fn a_rank_without_shared_memory_moves_its_host_to_tcp() {
    let change = |r: u32, spec: &mut ConnectSpec<'_>| {
        spec.host = Some(format!("host {}", r / 2));
        if r == 1 {
            spec.regions = private_memory();
        }
    };
    let notes = notes(connect_all(4, change));
    for note in &notes[..2] {
        assert!(note.starts_with("TCP (") && note.contains("not allocated as shared"), "{note}");
    }
    assert_eq!(notes[2..], ["shared memory with 1 of the other ranks, TCP with the rest"; 2]);
}

#[test]
fn tcp_is_used_if_configured() {
    let notes = notes(connect_all(2, |_, spec| spec.carrier = CarrierChoice::Tcp));
    assert_eq!(notes, ["TCP (carrier is set to tcp)"; 2]);
}

#[test]
fn shm_fails_where_shared_memory_is_unavailable() {
    let failed = |change: fn(u32, &mut ConnectSpec<'_>), why: &str| {
        for outcome in connect_all(2, |r, spec| {
            spec.carrier = CarrierChoice::Shm;
            change(r, spec);
        }) {
            let error = outcome.expect_err("no shared memory").to_string();
            assert!(error.starts_with("could not set up shared memory") && error.contains(why), "{error}");
        }
    };
    failed(|r, spec| spec.host = Some(r.to_string()), "another host");
    failed(
        |r, spec| {
            if r == 0 {
                spec.regions = private_memory()
            }
        },
        "not allocated as shared",
    );
}

#[test]
fn a_rank_that_cannot_listen_is_reported_on_all_ranks() {
    let errors = connect_all(2, |r, spec| {
        spec.carrier = CarrierChoice::Tcp;
        if r == 1 {
            // The unspecified address: other ranks cannot connect to it.
            spec.bind = "0.0.0.0:0".parse().unwrap();
        }
    });
    let texts: Vec<String> =
        errors.into_iter().map(|e| e.expect_err("rank 1 cannot listen").to_string()).collect();
    assert!(texts[0].contains("rank 1 cannot listen"), "{}", texts[0]);
    assert!(texts[1].contains("other ranks cannot connect to"), "{}", texts[1]);
}
