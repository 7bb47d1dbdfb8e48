//! Handshakes over real sockets: unknown clients are rejected, and the right ranks connect among them.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use lockstep_comm::{Abort, Comm, CommError, Group, Sockets, TcpCarrier, TcpSpec};
use lockstep_core::proof::Secret;
use lockstep_core::{Axis, Fault, FaultClass, Mesh, Rank};

/// An unknown client must be rejected within this time.
const REJECT_LIMIT: Duration = Duration::from_secs(2);

fn listen() -> (Sockets, SocketAddr) {
    let sockets = Sockets::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = sockets.local_address().unwrap();
    (sockets, address)
}

/// Connects rank `rank` of `world` to all others.
fn establish(
    mut sockets: Sockets,
    (rank, world): (u32, u32),
    addresses: &[SocketAddr],
    (token, run_id): (&str, &str),
    deadline: Duration,
) -> Result<Comm, CommError> {
    sockets.set_addresses(addresses.iter().copied().map(Some).collect());
    let peers: Vec<bool> = (0..world).map(|r| r != rank).collect();
    let carrier = TcpCarrier::establish(
        sockets,
        &TcpSpec {
            rank: Rank(rank),
            peers: &peers,
            session: &Secret::from_text(token),
            run_id,
            deadline,
            spin: Duration::ZERO,
            abort: Abort::default(),
        },
    )?;
    Ok(Comm::new(Box::new(carrier)))
}

/// How long the listener takes to close a connection after `bytes` were sent to it. The minimum of three attempts,
/// because the machine may be busy with other tests.
fn time_to_reject(address: SocketAddr, bytes: &[u8]) -> Duration {
    (0..3).map(|_| time_to_reject_once(address, bytes)).min().unwrap()
}

fn time_to_reject_once(address: SocketAddr, bytes: &[u8]) -> Duration {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let _ = stream.write_all(bytes);
    let start = Instant::now();
    let mut answer = [0; 256];
    while matches!(stream.read(&mut answer), Ok(n) if n > 0) {}
    start.elapsed()
}

#[test]
fn unknown_clients_are_rejected_at_once_and_delay_nobody() {
    let ((sockets0, address0), (sockets1, address1)) = (listen(), listen());
    let addresses = [address0, address1];
    let rank0 = std::thread::spawn(move || {
        establish(sockets0, (0, 2), &addresses, ("token", "run"), Duration::from_secs(20))
    });
    // Connections that send nothing, or only part of a hello.
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address0).unwrap()).collect();
    let mut truncated = TcpStream::connect(address0).unwrap();
    truncated.write_all(b"lockstep\x01\x00").unwrap();
    let mut gone = TcpStream::connect(address0).unwrap();
    gone.write_all(b"lockste").unwrap();
    drop(gone);
    let mut other_version = b"lockstep\x63\x00".to_vec();
    other_version.resize(96, 0);
    let mut no_proof = b"lockstep\x01\x00".to_vec();
    no_proof.resize(96, 0);
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 100_000], other_version, no_proof] {
        let time = time_to_reject(address0, &bytes);
        assert!(time < REJECT_LIMIT, "{time:?} for {:?}...", &bytes[..10]);
    }
    let start = Instant::now();
    let mut comm1 =
        establish(sockets1, (1, 2), &addresses, ("token", "run"), Duration::from_secs(20)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let mut comm0 = rank0.join().unwrap().unwrap();
    let group = |r| Group::along(&Mesh::on_one_node(1, 2), Axis::World, Rank(r));
    let other = std::thread::spawn(move || comm0.barrier(&group(0), 1));
    comm1.barrier(&group(1), 1).unwrap();
    other.join().unwrap().unwrap();
    drop((silent, truncated));
}

#[test]
fn another_token_or_run_id_is_not_authorised() {
    for other in [("tok3n", "run"), ("token", "another run")] {
        let ((sockets0, address0), (sockets1, address1)) = (listen(), listen());
        let addresses = [address0, address1];
        let rank0 = std::thread::spawn(move || {
            establish(sockets0, (0, 2), &addresses, ("token", "run"), Duration::from_millis(600))
        });
        let start = Instant::now();
        let error =
            establish(sockets1, (1, 2), &addresses, other, Duration::from_secs(5)).expect_err("refused");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert_eq!(error.class(), FaultClass::NotAuthorised, "{error}");
        assert!(error.hint().unwrap().contains("token"));
        let error = rank0.join().unwrap().expect_err("rank 1 did not authenticate");
        assert!(error.to_string().contains("rank 1 did not connect to rank 0"), "{error}");
        assert!(error.to_string().contains("its token, run id or version differs"), "{error}");
    }
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let ((sockets0, address0), (sockets1, address1), (sockets2, address2)) = (listen(), listen(), listen());
    let rank0 = std::thread::spawn(move || {
        let addresses = [address0, address1, address2];
        establish(sockets0, (0, 3), &addresses, ("token", "run"), Duration::from_secs(20))
    });
    // Rank 1 connects to rank 0 through a proxy that records what it sends.
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy_address = proxy.local_addr().unwrap();
    let recorder = std::thread::spawn(move || {
        let (mut from, _) = proxy.accept().unwrap();
        let mut to = TcpStream::connect(address0).unwrap();
        let mut recorded = Vec::new();
        for (len, forward) in [(96, true), (96, false), (32, true), (32, false)] {
            let mut bytes = vec![0; len];
            let (from, to) = if forward { (&mut from, &mut to) } else { (&mut to, &mut from) };
            from.read_exact(&mut bytes).unwrap();
            to.write_all(&bytes).unwrap();
            if forward {
                recorded.extend_from_slice(&bytes);
            }
        }
        (recorded, from, to)
    });
    let rank1 = std::thread::spawn(move || {
        let addresses = [proxy_address, address1, address2];
        establish(sockets1, (1, 3), &addresses, ("token", "run"), Duration::from_secs(20))
    });
    let (recorded, _from, _to) = recorder.join().unwrap();
    let time = time_to_reject(address0, &recorded);
    assert!(time < REJECT_LIMIT, "{time:?}");
    let addresses = [address0, address1, address2];
    establish(sockets2, (2, 3), &addresses, ("token", "run"), Duration::from_secs(20)).unwrap();
    rank0.join().unwrap().unwrap();
    rank1.join().unwrap().unwrap();
}
