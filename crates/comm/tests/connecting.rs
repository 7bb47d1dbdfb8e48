//! Which carrier ranks end up with, and what they say about it.

mod support;

use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{Abort, Comm, CommError, ConnectSpec, Group, Prefer, connect, host_identity};
use lockstep_core::proof::Secret;
use lockstep_core::{Axis, Bytes, Mesh, Rank};
use lockstep_device::{Memory, Pool};
use support::Rendezvous;

/// Connects `world` ranks, each set up by `change`.
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
                        prefer: Prefer::Auto,
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

/// The connected ranks meet once, and say how they are connected.
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
fn one_host_shares_memory() {
    assert!(host_identity().len() > 40);
    assert_eq!(notes(connect_all(3, |_, _| {})), ["shared memory"; 3]);
    assert_eq!(notes(connect_all(1, |_, _| {})), ["nobody to talk to"]);
}

#[test]
fn hosts_use_tcp_between_them() {
    let two_and_one = |r: u32, spec: &mut ConnectSpec<'_>| spec.host = Some(format!("host {}", r / 2));
    let notes = notes(connect_all(3, two_and_one));
    let both = "shared memory with 1 of the other ranks, TCP with the rest";
    assert_eq!(notes, [both, both, "TCP"]);
}

#[test]
fn one_rank_that_cannot_share_moves_its_host_to_tcp() {
    let change = |r: u32, spec: &mut ConnectSpec<'_>| {
        spec.host = Some(format!("host {}", r / 2));
        if r == 1 {
            spec.regions = private_memory();
        }
    };
    let notes = notes(connect_all(4, change));
    for note in &notes[..2] {
        assert!(note.starts_with("TCP (") && note.contains("not taken as shared"), "{note}");
    }
    assert_eq!(notes[2..], ["shared memory with 1 of the other ranks, TCP with the rest"; 2]);
}

#[test]
fn tcp_if_it_is_asked_for() {
    let notes = notes(connect_all(2, |_, spec| spec.prefer = Prefer::Tcp));
    assert_eq!(notes, ["TCP (TCP was asked for)"; 2]);
}

#[test]
fn shared_memory_or_nothing() {
    let failed = |change: fn(u32, &mut ConnectSpec<'_>), why: &str| {
        for outcome in connect_all(2, |r, spec| {
            spec.prefer = Prefer::Shm;
            change(r, spec);
        }) {
            let error = outcome.expect_err("no shared memory").to_string();
            assert!(error.starts_with("shared memory could not be set up") && error.contains(why), "{error}");
        }
    };
    failed(|r, spec| spec.host = Some(r.to_string()), "another host");
    failed(
        |r, spec| {
            if r == 0 {
                spec.regions = private_memory()
            }
        },
        "not taken as shared",
    );
}

#[test]
fn a_rank_that_cannot_listen_is_named_to_all() {
    let errors = connect_all(2, |r, spec| {
        spec.prefer = Prefer::Tcp;
        if r == 1 {
            // An address that leads nowhere in particular.
            spec.bind = "0.0.0.0:0".parse().unwrap();
        }
    });
    let texts: Vec<String> = errors.into_iter().map(|e| e.expect_err("no way").to_string()).collect();
    assert!(texts[0].contains("rank 1 cannot listen"), "{}", texts[0]);
    assert!(texts[1].contains("leads nobody to it"), "{}", texts[1]);
}
