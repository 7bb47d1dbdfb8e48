//! From a rank that knows nobody to one that reaches all: which carrier, and how.
//!
//! Ranks tell each other where they are through an all-gather of small byte strings that somebody else
//! provides (the rendezvous). Ranks of one host try to open each other's memory, and tell whether they
//! could. If one could not, all ranks of that host use TCP among themselves; everyone decides from the same
//! answers, so all decide alike.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_core::proof::Secret;
use lockstep_device::Memory;

use crate::carrier::Carrier;
use crate::comm::Comm;
use crate::error::{Abort, CommError};
use crate::host::host_identity;
use crate::mixed::Mixed;
use crate::shm::{Prepared, ShmAddress, ShmCarrier};
use crate::tcp::{Sockets, TcpCarrier, TcpSpec};
use crate::thread::thread_world;
use crate::wire::{Whereabouts, decode_text, encode_text};

/// How long a wait tries again and again before it sleeps, if every rank of the host has a core.
const SPIN: Duration = Duration::from_micros(20);

/// Which carrier to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// Shared memory on one host where it can be had, TCP for the rest.
    #[default]
    Auto,
    /// Shared memory or nothing.
    Shm,
    /// TCP, also on one host.
    Tcp,
}

/// A rank that wants to be connected.
pub struct ConnectSpec<'a> {
    pub rank: Rank,
    pub world: u32,
    /// Ranks with the same one try shared memory. `None`: [`host_identity`].
    pub host: Option<String>,
    /// The memory that views offered to peers lie in, taken with [`Memory::allocate_shared`].
    pub regions: Vec<Arc<Memory>>,
    /// Where to listen, if TCP is used at all. Port 0 is any.
    pub bind: SocketAddr,
    /// The address that others reach this rank at, if it is not the one it listens at.
    pub advertise: Option<IpAddr>,
    /// What all ranks of the run know, and nobody else.
    pub session: &'a Secret,
    pub run_id: &'a str,
    /// For every wait of the carrier, and for connecting.
    pub deadline: Duration,
    pub abort: Abort,
    pub prefer: Prefer,
    /// How long a wait tries again and again before it sleeps. `None`: 20 microseconds if the host has a
    /// core for every one of its ranks, else not at all.
    pub spin: Option<Duration>,
}

/// An all-gather of byte strings over the world, in the order of ranks.
pub type Exchange<'a> = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>, CommError> + 'a;

/// Connects a rank to all others. Every rank of the world calls it, and it calls `exchange` equally often on
/// all.
pub fn connect(spec: &ConnectSpec<'_>, exchange: &mut Exchange<'_>) -> Result<Comm, CommError> {
    assert!(spec.rank.0 < spec.world, "{} of a world of {}", spec.rank, spec.world);
    if spec.world == 1 {
        let alone = thread_world(1, spec.deadline).remove(0);
        return Ok(Comm::new(Box::new(alone)).with_note("nobody to talk to".into()));
    }
    let (mine, prepared) = prepare(spec);
    let all = tell_whereabouts(&mine, exchange)?;
    let near: Vec<bool> = (0..).zip(&all).map(|(r, at)| r != spec.rank.0 && at.host == mine.host).collect();
    let num_near = near.iter().filter(|near| **near).count();
    let spin = spec.spin.unwrap_or_else(|| {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if cores > num_near { SPIN } else { Duration::ZERO }
    });
    let shm = open_shm(spec, prepared, &all, &near, spin);
    let all = tell_verdicts(all, &shm, exchange)?;
    let why_not = failure(&all, &mine.host);
    if let (Prefer::Shm, Some(why)) = (spec.prefer, why_not.clone().or_else(|| far_rank(&all, &mine.host))) {
        return Err(CommError::Setup { what: "shared memory", why });
    }
    let shm = shm.ok().filter(|_| why_not.is_none() && num_near > 0);
    let by_shm: Vec<bool> = near.iter().map(|near| *near && shm.is_some()).collect();
    let by_tcp: Vec<bool> = (0..).zip(&by_shm).map(|(r, shm)| r != spec.rank.0 && !shm).collect();
    // From what everyone knows: whether any pair needs TCP. Opening it is one more exchange, for all or for
    // none.
    let one_host = all.iter().all(|at| at.host == mine.host);
    let note = match (&why_not, one_host) {
        (None, true) => "shared memory".to_string(),
        (None, false) if num_near == 0 => "TCP".to_string(),
        (None, false) => format!("shared memory with {num_near} of the other ranks, TCP with the rest"),
        (Some(why), _) => format!("TCP ({why})"),
    };
    let carrier: Box<dyn Carrier> = match shm {
        Some(shm) if one_host => Box::new(shm),
        Some(shm) => Box::new(Mixed::new(shm, open_tcp(spec, &by_tcp, spin, exchange)?, by_shm)),
        None => Box::new(open_tcp(spec, &by_tcp, spin, exchange)?),
    };
    Ok(Comm::new(carrier).with_note(note))
}

/// This rank's whereabouts, and its part of shared memory where that is wanted and can be had.
fn prepare(spec: &ConnectSpec<'_>) -> (Whereabouts, Option<Prepared>) {
    let prepared = match spec.prefer {
        Prefer::Tcp => Err("TCP was asked for".to_string()),
        _ => Prepared::new(spec.rank.0, spec.world, &spec.regions)
            .and_then(|prepared| Ok((prepared.address()?, prepared)))
            .map_err(|e| e.to_string()),
    };
    let (shm, prepared) = match prepared {
        Ok((address, prepared)) => (Ok(address), Some(prepared)),
        Err(why) => (Err(why), None),
    };
    let host = spec.host.clone().unwrap_or_else(host_identity);
    (Whereabouts { rank: spec.rank.0, world: spec.world, host, shm }, prepared)
}

/// The first exchange: where everyone is.
fn tell_whereabouts(mine: &Whereabouts, exchange: &mut Exchange<'_>) -> Result<Vec<Whereabouts>, CommError> {
    let answers = exchange(&mine.encode())?;
    let all: Vec<Whereabouts> = answers.iter().filter_map(|bytes| Whereabouts::decode(bytes)).collect();
    let right = |(r, at): (u32, &Whereabouts)| at.rank == r && at.world == mine.world;
    if all.len() != mine.world as usize || answers.len() != all.len() || !(0..).zip(&all).all(right) {
        return Err(unclear("where the ranks are"));
    }
    Ok(all)
}

fn open_shm(
    spec: &ConnectSpec<'_>,
    prepared: Option<Prepared>,
    all: &[Whereabouts],
    near: &[bool],
    spin: Duration,
) -> Result<ShmCarrier, String> {
    let Some(prepared) = prepared else {
        return Err(all[spec.rank.0 as usize].shm.as_ref().err().cloned().unwrap_or_default());
    };
    let addresses: Vec<Option<ShmAddress>> = all
        .iter()
        .zip(near)
        .map(|(at, near)| if *near { at.shm.clone().map(Some) } else { Ok(None) })
        .collect::<Result<_, _>>()?;
    ShmCarrier::open(spec.rank, prepared, &addresses, (spec.deadline, spin), spec.abort.clone())
        .map_err(|e| e.to_string())
}

/// The second exchange: who could open the memory of all ranks of its host. Whereabouts come back without
/// that of ranks who could not.
fn tell_verdicts(
    mut all: Vec<Whereabouts>,
    shm: &Result<ShmCarrier, String>,
    exchange: &mut Exchange<'_>,
) -> Result<Vec<Whereabouts>, CommError> {
    let verdict = shm.as_ref().err().map_or("", String::as_str);
    let verdicts = exchange(&encode_text(verdict))?;
    if verdicts.len() != all.len() {
        return Err(unclear("whether memory is shared"));
    }
    for (at, verdict) in all.iter_mut().zip(&verdicts) {
        let verdict = decode_text(verdict).ok_or_else(|| unclear("whether memory is shared"))?;
        if !verdict.is_empty() {
            at.shm = Err(verdict);
        }
    }
    Ok(all)
}

/// Why ranks of a host cannot share memory: the first of them that could not says it for all.
fn failure(all: &[Whereabouts], host: &str) -> Option<String> {
    all.iter().filter(|at| at.host == host).find_map(|at| at.shm.as_ref().err().cloned())
}

fn far_rank(all: &[Whereabouts], host: &str) -> Option<String> {
    all.iter().find(|at| at.host != host).map(|at| format!("{} is on another host", Rank(at.rank)))
}

/// Links by TCP, after one more exchange of addresses.
fn open_tcp(
    spec: &ConnectSpec<'_>,
    peers: &[bool],
    spin: Duration,
    exchange: &mut Exchange<'_>,
) -> Result<TcpCarrier<Sockets>, CommError> {
    let setup = |why: String| CommError::Setup { what: "the TCP links", why };
    let listening = listen(spec);
    // Who cannot listen tells the others by an empty address, so that nobody waits for it.
    let told = listening.as_ref().map_or_else(|_| String::new(), |(_, address)| address.to_string());
    let answers = exchange(&encode_text(&told))?;
    let (mut sockets, _) = listening.map_err(setup)?;
    let parse = |bytes: &Vec<u8>| decode_text(bytes).and_then(|text| text.parse::<SocketAddr>().ok());
    let addresses: Vec<_> = answers.iter().map(parse).collect();
    if let Some(r) = (0..peers.len()).find(|r| addresses.get(*r).is_none_or(Option::is_none)) {
        return Err(setup(format!("{} cannot listen", Rank(r as u32))));
    }
    sockets.set_addresses(addresses);
    let tcp = TcpSpec {
        rank: spec.rank,
        peers,
        session: spec.session,
        run_id: spec.run_id,
        deadline: spec.deadline,
        spin,
        abort: spec.abort.clone(),
    };
    let mut carrier = TcpCarrier::establish(sockets, &tcp)?;
    carrier.net_mut().stop_listening();
    Ok(carrier)
}

/// A listener, and the address that others reach it at.
fn listen(spec: &ConnectSpec<'_>) -> Result<(Sockets, SocketAddr), String> {
    let failed = |e| format!("{} cannot listen at {}: {e}", spec.rank, spec.bind);
    let sockets = Sockets::listen(spec.bind).map_err(failed)?;
    let mut address = sockets.local_address().map_err(failed)?;
    address.set_ip(spec.advertise.unwrap_or(address.ip()));
    if address.ip().is_unspecified() {
        let why = format!("{} listens at {address}, which leads nobody to it", spec.rank);
        return Err(format!("{why}; an address to be reached at is needed"));
    }
    Ok((sockets, address))
}

fn unclear(what: &'static str) -> CommError {
    let why = "ranks do not understand each other; they must run the same version of lockstep".to_string();
    CommError::Setup { what, why }
}
