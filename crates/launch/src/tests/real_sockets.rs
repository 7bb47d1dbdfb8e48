//! Ranks as threads of one process, over real loopback sockets.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::wire::{Hello, VERSION};
use crate::*;

const TOKEN: &str = "correct horse battery staple";
/// Milliseconds on an idle machine. All timeouts are longer.
const SOON: Duration = Duration::from_secs(3);

fn token(text: &str) -> Token {
    Token::read(&|name| (name == names::TOKEN).then(|| text.into())).unwrap().unwrap()
}

fn options(token: Option<Token>) -> JoinOptions {
    JoinOptions { token, version: "1.2.3".into(), timeout: Duration::from_secs(5), log: Box::new(|_| ()) }
}

struct Rendezvous {
    server: RunningServer,
    _listener: TcpListener,
    log: Arc<Mutex<Vec<String>>>,
    world_size: u32,
}

impl Rendezvous {
    fn new(world_size: u32, join_timeout: Duration) -> Rendezvous {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&log);
        let options = ServerOptions {
            world_size,
            local_world_size: world_size,
            attempt: 0,
            token: Some(token(TOKEN)),
            version: "1.2.3".into(),
            join_timeout,
            log: Box::new(move |line| lines.lock().unwrap().push(line.into())),
        };
        let server = serve(&listener, options).unwrap();
        Rendezvous { server, _listener: listener, log, world_size }
    }

    fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    fn world(&self, rank: u32) -> World {
        World {
            rank,
            world_size: self.world_size,
            local_rank: rank,
            local_world_size: self.world_size,
            node: 0,
            master_addr: "127.0.0.1".into(),
            port: self.addr().port(),
            server: RendezvousHost::Launcher,
            restart: 0,
            started_by: StartedBy::Launcher,
        }
    }

    fn sessions(&self) -> Vec<Session> {
        let ranks: Vec<_> = (0..self.world_size)
            .map(|rank| {
                let world = self.world(rank);
                std::thread::spawn(move || join(&world, options(Some(token(TOKEN)))).unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn log(&self) -> String {
        let port = |line: &String| {
            let (before, after) = line.split_once("127.0.0.1:").unwrap_or((line, ": "));
            format!("{before}[address]{}", &after[after.find(':').unwrap_or_default()..])
        };
        self.log.lock().unwrap().iter().map(port).collect::<Vec<_>>().join("\n")
    }

    fn log_lines(&self, count: usize) -> String {
        let start = Instant::now();
        while self.log.lock().unwrap().len() < count && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.log()
    }
}

/// Runs `f` on every session, each in its own thread.
fn each<T: Send + 'static>(
    sessions: Vec<Session>,
    f: impl Fn(Session) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let f = Arc::new(f);
    let threads: Vec<_> = sessions
        .into_iter()
        .map(|session| {
            let f = Arc::clone(&f);
            std::thread::spawn(move || f(session))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn without_pids(text: &str) -> String {
    let (pid, host) = (format!("pid {}", std::process::id()), format!("on {}", host_name()));
    text.replace(&pid, "pid [pid]").replace(&host, "on [host]")
}

#[test]
fn ranks_join_exchange_agree_and_leave() {
    let rendezvous = Rendezvous::new(4, Duration::from_secs(5));
    let start = Instant::now();
    let sessions = rendezvous.sessions();
    println!("4 ranks joined in {:?}", start.elapsed());
    let tags: Vec<_> = sessions.iter().map(|s| s.secret().tag("x", &[])).collect();
    assert!(tags.windows(2).all(|pair| pair[0] == pair[1]), "all ranks derive the same secret");
    each(sessions, |mut session| {
        let rank = session.world().rank;
        assert_eq!(session.members().len(), 4);
        assert!(session.members().iter().zip(0..).all(|(member, rank)| member.rank == rank));
        let all = session.exchange("addresses", format!("rank {rank}").as_bytes()).unwrap();
        let texts: Vec<String> = all.into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect();
        assert_eq!(texts, ["rank 0", "rank 1", "rank 2", "rank 3"]);
        let start = Instant::now();
        for _ in 0..100 {
            session.barrier("step").unwrap();
        }
        if rank == 0 {
            println!("a barrier takes {:?}", start.elapsed() / 100);
        }
        session.agree("the plan", &[("strategy", "zero3".into())]).unwrap();
        let strategy = if rank == 2 { "zero2" } else { "zero3" };
        let error = session.agree("the plan", &[("strategy", strategy.into())]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "ranks do not agree on the plan: rank 2 has strategy zero2, the others zero3"
        );
        assert!(matches!(session.exchange("big", &vec![0; 1 << 20]), Err(LaunchError::TooLarge { .. })));
        session.leave().unwrap();
    });
    assert_eq!(rendezvous.server.wait(), RendezvousOutcome::Done);
    assert_eq!(rendezvous.log(), "");
}

#[test]
fn a_failure_reaches_every_rank_with_its_cause() {
    let rendezvous = Rendezvous::new(3, Duration::from_secs(5));
    let mut sessions = rendezvous.sessions();
    let failing = sessions.remove(1);
    let start = Instant::now();
    let (send, receive) = mpsc::channel();
    sessions[0].on_abort(Box::new(move |text| send.send((text, Instant::now())).unwrap()));
    let waiting =
        std::thread::spawn(move || each(sessions, |mut s| s.barrier("step").unwrap_err().to_string()));
    failing.fail("data.jsonl row 3: no text", 65);
    let errors = waiting.join().unwrap();
    let (hook, at) = receive.recv().unwrap();
    println!("reported in {:?}", at - start);
    assert!(at - start < SOON);
    assert!(errors.iter().all(|error| *error == hook));
    assert_snapshot!(without_pids(&hook), @"rank 1 (pid [pid] on [host]) failed with exit code 65: data.jsonl row 3: no text");
    let RendezvousOutcome::Failed(abort) = rendezvous.server.wait() else { panic!() };
    assert_eq!((abort.kind, abort.exit_code()), (AbortKind::Failed, 65));
}

#[test]
fn a_lost_rank_is_named() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let mut sessions = rendezvous.sessions();
    let start = Instant::now();
    drop(sessions.remove(0));
    let error = sessions.remove(0).barrier("step").unwrap_err();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_snapshot!(without_pids(&error.to_string()), @"lost rank 0 (pid [pid] on [host]): its connection closed unexpectedly");
}

#[test]
fn ranks_out_of_step_are_reported() {
    let rendezvous = Rendezvous::new(3, Duration::from_secs(5));
    let errors = each(rendezvous.sessions(), |mut session| {
        let name = if session.world().rank == 1 { "save" } else { "step" };
        session.barrier(name).unwrap_err().to_string()
    });
    assert!(errors[0].starts_with("ranks are out of step: rank "), "{}", errors[0]);
    assert!(errors[0].contains("`save`") && errors[0].contains("`step`"));
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let ends = each(rendezvous.sessions(), |mut session| match session.world().rank {
        0 => session.leave().err().map(|e| e.to_string()),
        _ => session.barrier("step").err().map(|e| e.to_string()),
    });
    assert_eq!(
        ends[1].as_deref(),
        Some("ranks are out of step: rank 0 has finished, but rank 1 is waiting for it at `step`")
    );
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let ends = each(rendezvous.sessions(), |mut session| {
        if session.world().rank == 0 {
            let error = session.exchange_within("plan", b"", Duration::from_millis(300)).unwrap_err();
            return error.to_string();
        }
        std::thread::sleep(Duration::from_millis(600));
        session.aborted().unwrap().to_string()
    });
    assert_eq!(ends[0], "rank 1 did not reach `plan` within 0.3 s of rank 0");
    assert_eq!(ends[0], ends[1]);
}

#[test]
fn ranks_that_never_join_are_listed() {
    let rendezvous = Rendezvous::new(4, Duration::from_millis(300));
    let ranks: Vec<_> = [0, 2]
        .into_iter()
        .map(|rank| {
            let world = rendezvous.world(rank);
            std::thread::spawn(move || join(&world, options(Some(token(TOKEN)))).err().unwrap().to_string())
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), "ranks 1, 3 (node 0) did not join within 0.3 s; ranks 0, 2 did");
    }
}

#[test]
fn a_rank_started_twice_is_refused() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let world = rendezvous.world(1);
    let first = std::thread::spawn(move || join(&world, options(Some(token(TOKEN)))).unwrap());
    std::thread::sleep(Duration::from_millis(100));
    let second = join(&rendezvous.world(1), options(Some(token(TOKEN)))).err().unwrap();
    assert_snapshot!(without_pids(&second.to_string()), @"rank 1 was started twice: first as pid [pid] on [host], then as pid [pid] on [host]");
    let zero = join(&rendezvous.world(0), options(Some(token(TOKEN)))).unwrap();
    let one = first.join().unwrap();
    each(vec![zero, one], |session| session.leave().unwrap());
}

#[test]
fn a_rank_of_another_world_or_version_ends_the_run_for_all() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let world = rendezvous.world(0);
    let first =
        std::thread::spawn(move || join(&world, options(Some(token(TOKEN)))).err().unwrap().to_string());
    let other =
        World { world_size: 8, local_world_size: 4, local_rank: 0, rank: 4, node: 1, ..rendezvous.world(1) };
    let error = join(&other, options(Some(token(TOKEN)))).err().unwrap().to_string();
    assert_eq!(first.join().unwrap(), error);
    assert_snapshot!(error.replace(&host_name(), "[host]"), @"nodes were started with different world sizes: node 1 ([host]) with --nnodes 2 --nproc-per-node 4, node 0 with --nnodes 1 --nproc-per-node 2");
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let newer = JoinOptions { version: "1.3.0".into(), ..options(Some(token(TOKEN))) };
    let error = join(&rendezvous.world(1), newer).err().unwrap();
    assert_snapshot!(without_pids(&error.to_string()), @"rank 1 (pid [pid] on [host]) runs lockstep 1.3.0, but the rendezvous runs 1.2.3");
}

/// Sends `bytes` and waits until the connection is closed. Returns how long that took, and the answer.
fn send_and_wait_for_close(addr: SocketAddr, bytes: &[u8]) -> (Duration, Vec<u8>) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
    let start = Instant::now();
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    (start.elapsed(), answer)
}

#[test]
fn unknown_clients_are_rejected_at_once_and_the_run_continues() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(20));
    let addr = rendezvous.addr();
    let hello = Hello { version: VERSION, rank: 1, attempt: 0, nonce: [7; 32] };
    // Not a hello, a hello that is too long, another version, another attempt; below, a forged proof.
    let too_long = [&hello.to_bytes()[..], &[0; 8]].concat();
    let other = Hello { version: 9, ..hello }.to_bytes();
    let earlier = Hello { attempt: 3, ..hello }.to_bytes();
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0; 4096], &too_long, &other, &earlier] {
        let (took, answer) = send_and_wait_for_close(addr, bytes);
        assert!(took < SOON, "{took:?}");
        assert!(answer.len() <= 64);
    }
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(&hello.to_bytes()).unwrap();
    let mut challenge = [0; 64];
    stream.read_exact(&mut challenge).unwrap();
    let start = Instant::now();
    stream.write_all(&[1; 32]).unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    // A truncated hello.
    drop({
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(&hello.to_bytes()[..20]).unwrap();
        stream
    });
    let start = Instant::now();
    let wrong = join(&rendezvous.world(1), options(Some(token("another token, long enough")))).err().unwrap();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert!(matches!(wrong, LaunchError::WrongToken { .. }), "{wrong}");
    assert!(matches!(join(&rendezvous.world(0), options(None)), Err(LaunchError::WrongToken { .. })));
    assert_snapshot!(rendezvous.log_lines(9), @r"
    rendezvous: rejected a connection from [address]: it is not a lockstep rank
    rendezvous: rejected a connection from [address]: it is not a lockstep rank
    rendezvous: rejected a connection from [address]: it is not a lockstep rank
    rendezvous: rejected a connection from [address]: it uses protocol version 9, this run uses 1
    rendezvous: rejected a connection from [address]: it belongs to attempt 3, this run is at attempt 0
    rendezvous: rejected a connection from [address]: wrong token
    rendezvous: rejected a connection from [address]: it closed the connection during the handshake
    rendezvous: rejected a connection from [address]: wrong token
    rendezvous: rejected a connection from [address]: wrong token
    ");
    each(rendezvous.sessions(), |session| session.leave().unwrap());
}

/// A proof from one connection is not valid on the next.
#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(20));
    let recorder = TcpListener::bind("127.0.0.1:0").unwrap();
    let world = World { port: recorder.local_addr().unwrap().port(), ..rendezvous.world(1) };
    let short = JoinOptions { timeout: Duration::from_millis(200), ..options(Some(token(TOKEN))) };
    let rank = std::thread::spawn(move || join(&world, short).err().map(|e| e.to_string()));
    let (mut inside, mut outside) =
        (recorder.accept().unwrap().0, TcpStream::connect(rendezvous.addr()).unwrap());
    drop(recorder);
    let (mut hello, mut challenge, mut proof) = ([0; 64], [0; 64], [0; 32]);
    inside.read_exact(&mut hello).unwrap();
    outside.write_all(&hello).unwrap();
    outside.read_exact(&mut challenge).unwrap();
    inside.write_all(&challenge).unwrap();
    inside.read_exact(&mut proof).unwrap();
    drop((inside, outside));
    let mut replay = TcpStream::connect(rendezvous.addr()).unwrap();
    replay.write_all(&hello).unwrap();
    replay.read_exact(&mut challenge).unwrap();
    replay.write_all(&proof).unwrap();
    let mut answer = Vec::new();
    let start = Instant::now();
    replay.read_to_end(&mut answer).unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(
        crate::wire::Reply::from_bytes(answer[..].try_into().unwrap()).unwrap().status,
        wire::ReplyStatus::WrongProof
    );
    assert!(rank.join().unwrap().unwrap().contains("could not reach the rendezvous at"));
}

/// A thousand connections per second that send garbage, and as many that send nothing.
#[test]
fn a_flood_of_connections_does_not_keep_ranks_out() {
    let rendezvous = Rendezvous::new(2, Duration::from_secs(20));
    let addr = rendezvous.addr();
    let (stop, stopped) = mpsc::channel::<()>();
    let flood = std::thread::spawn(move || {
        let mut silent = Vec::new();
        let mut count = 0;
        while stopped.try_recv().is_err() {
            if let Ok(mut stream) = TcpStream::connect(addr) {
                let _ = stream.write_all(&[0xAA; 300]);
            }
            silent.extend(TcpStream::connect(addr));
            if silent.len() > 200 {
                silent.drain(..100);
            }
            count += 2;
            std::thread::sleep(Duration::from_millis(1));
        }
        count
    });
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    let sessions = rendezvous.sessions();
    println!("joined under a flood in {:?}", start.elapsed());
    each(sessions, |mut session| {
        for _ in 0..3000 {
            session.barrier("step").unwrap();
        }
        session.leave().unwrap();
    });
    stop.send(()).unwrap();
    println!("{} connections in {:?}", flood.join().unwrap(), start.elapsed());
    assert!(rendezvous.log.lock().unwrap().len() < 60, "the log is bounded");
}

#[test]
fn another_program_on_the_port_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let http = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let rendezvous = Rendezvous::new(2, Duration::from_secs(5));
    let error = join(&World { port, ..rendezvous.world(1) }, options(Some(token(TOKEN)))).err().unwrap();
    assert_eq!(
        error.to_string(),
        format!("the program that answers at 127.0.0.1:{port} is not a lockstep rendezvous")
    );
    http.join().unwrap();
}

/// Without a launcher, rank 0 runs the rendezvous. Other ranks may start before it.
#[test]
fn rank_zero_runs_the_rendezvous() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let world = move |rank| World {
        rank,
        world_size: 3,
        local_rank: rank,
        local_world_size: 3,
        node: 0,
        master_addr: "127.0.0.1".into(),
        port,
        server: RendezvousHost::RankZero,
        restart: 0,
        started_by: StartedBy::Launcher,
    };
    let ranks: Vec<_> = (0..3)
        .rev()
        .map(|rank| {
            std::thread::sleep(Duration::from_millis(50));
            std::thread::spawn(move || join(&world(rank), options(None)).unwrap())
        })
        .collect();
    let sessions: Vec<Session> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    each(sessions, |mut session| {
        session.barrier("step").unwrap();
        // Rank 0 finishes first and waits for the others.
        std::thread::sleep(Duration::from_millis(u64::from(session.world().rank) * 100));
        session.barrier("last step").unwrap();
        session.leave().unwrap();
    });
}

#[test]
fn several_nodes_need_a_token() {
    let world = World {
        rank: 0,
        world_size: 2,
        local_rank: 0,
        local_world_size: 1,
        node: 0,
        master_addr: "alpha".into(),
        port: 1,
        server: RendezvousHost::RankZero,
        restart: 0,
        started_by: StartedBy::Launcher,
    };
    let error = join(&world, options(None)).err().unwrap();
    assert_snapshot!(error, @"a run on 2 nodes needs a token, but none is set");
    assert_snapshot!(lockstep_core::Fault::hint(&error).unwrap(), @"Create one with `openssl rand -hex 32 > token; chmod 600 token`, copy it to every node, and set LOCKSTEP_TOKEN_FILE=token there.");
}
