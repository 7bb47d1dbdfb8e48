//! Connects a rank to all others: chooses a carrier and sets it up.
//!
//! Ranks exchange their addresses through an all-gather of small byte strings that the caller provides (the
//! rendezvous). Ranks on one host try to open each other's memory and share the result. If one of them fails, all
//! ranks of that host use TCP among themselves. Every rank decides from the same results, so all make the same
//! choice.

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
use crate::mixed::MixedCarrier;
use crate::shm::{ShmAddress, ShmCarrier, ShmExport};
use crate::tcp::{Sockets, TcpCarrier, TcpSpec};
use crate::thread::thread_world;
use crate::wire::{RankAddress, decode_text, encode_text};

/// How long a wait spins before it sleeps, if the host has a core for each of its ranks.
const SPIN: Duration = Duration::from_micros(20);

/// Which carrier to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CarrierChoice {
    /// Shared memory within a host where it is available, TCP otherwise.
    #[default]
    Auto,
    /// Shared memory; an error if it is not available.
    Shm,
    /// TCP, even within a host.
    Tcp,
}

/// What [`connect`] needs to know about a rank.
pub struct ConnectSpec<'a> {
    pub rank: Rank,
    pub world: u32,
    /// Ranks with the same host try to use shared memory. Defaults to [`host_identity`].
    pub host: Option<String>,
    /// The memory that holds all views offered to peers, allocated with [`Memory::allocate_shared`].
    pub regions: Vec<Arc<Memory>>,
    /// The address to listen on, if TCP is needed. Port 0 picks a free port.
    pub bind: SocketAddr,
    /// The address at which other ranks reach this one, if it differs from `bind`.
    pub advertise: Option<IpAddr>,
    /// The secret shared by all ranks of the run.
    pub session: &'a Secret,
    pub run_id: &'a str,
    /// The limit for every wait of the carrier, and for connecting.
    pub deadline: Duration,
    pub abort: Abort,
    pub carrier: CarrierChoice,
    /// How long a wait spins before it sleeps. By default 20 microseconds if the host has a core for each of its
    /// ranks, else zero.
    pub spin: Option<Duration>,
}

/// An all-gather of byte strings over the world, in the order of ranks.
pub type Exchange<'a> = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>, CommError> + 'a;

/// Connects a rank to all others. Every rank of the world must call it; it calls `exchange` the same number of times
/// on each.
pub fn connect(spec: &ConnectSpec<'_>, exchange: &mut Exchange<'_>) -> Result<Comm, CommError> {
    assert!(spec.rank.0 < spec.world, "{} is outside a world of {}", spec.rank, spec.world);
    if spec.world == 1 {
        let alone = thread_world(1, spec.deadline).remove(0);
        return Ok(Comm::new(Box::new(alone)).with_note("none needed, one rank".into()));
    }
    let (mine, export) = prepare(spec);
    let all = exchange_addresses(&mine, exchange)?;
    let same_host: Vec<bool> =
        (0..).zip(&all).map(|(r, at)| r != spec.rank.0 && at.host == mine.host).collect();
    let num_same_host = same_host.iter().filter(|same| **same).count();
    let spin = spec.spin.unwrap_or_else(|| {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if cores > num_same_host { SPIN } else { Duration::ZERO }
    });
    let shm = open_shm(spec, export, &all, &same_host, spin);
    let all = exchange_shm_results(all, &shm, exchange)?;
    let why_not = shm_failure(&all, &mine.host);
    if let (CarrierChoice::Shm, Some(why)) =
        (spec.carrier, why_not.clone().or_else(|| rank_elsewhere(&all, &mine.host)))
    {
        return Err(CommError::Setup { what: "shared memory", why });
    }
    let shm = shm.ok().filter(|_| why_not.is_none() && num_same_host > 0);
    let by_shm: Vec<bool> = same_host.iter().map(|same| *same && shm.is_some()).collect();
    let by_tcp: Vec<bool> = (0..).zip(&by_shm).map(|(r, shm)| r != spec.rank.0 && !shm).collect();
    // Whether any pair needs TCP follows from data that every rank has. Opening TCP takes one more exchange, which
    // all ranks must take part in, or none.
    let one_host = all.iter().all(|at| at.host == mine.host);
    let note = match (&why_not, one_host) {
        (None, true) => "shared memory".to_string(),
        (None, false) if num_same_host == 0 => "TCP".to_string(),
        (None, false) => {
            format!("shared memory with {num_same_host} of the other ranks, TCP with the rest")
        }
        (Some(why), _) => format!("TCP ({why})"),
    };
    let carrier: Box<dyn Carrier> = match shm {
        Some(shm) if one_host => Box::new(shm),
        Some(shm) => Box::new(MixedCarrier::new(shm, open_tcp(spec, &by_tcp, spin, exchange)?, by_shm)),
        None => Box::new(open_tcp(spec, &by_tcp, spin, exchange)?),
    };
    Ok(Comm::new(carrier).with_note(note))
}

/// This rank's address, and its shared memory if that is requested and available.
fn prepare(spec: &ConnectSpec<'_>) -> (RankAddress, Option<ShmExport>) {
    let export = match spec.carrier {
        CarrierChoice::Tcp => Err("carrier is set to tcp".to_string()),
        _ => ShmExport::new(spec.rank.0, spec.world, &spec.regions)
            .and_then(|export| Ok((export.address()?, export)))
            .map_err(|e| e.to_string()),
    };
    let (shm, export) = match export {
        Ok((address, export)) => (Ok(address), Some(export)),
        Err(why) => (Err(why), None),
    };
    let host = spec.host.clone().unwrap_or_else(host_identity);
    (RankAddress { rank: spec.rank.0, world: spec.world, host, shm }, export)
}

/// The first exchange: the address of every rank.
fn exchange_addresses(
    mine: &RankAddress,
    exchange: &mut Exchange<'_>,
) -> Result<Vec<RankAddress>, CommError> {
    let answers = exchange(&mine.encode())?;
    let all: Vec<RankAddress> = answers.iter().filter_map(|bytes| RankAddress::decode(bytes)).collect();
    let is_valid = |(r, at): (u32, &RankAddress)| at.rank == r && at.world == mine.world;
    if all.len() != mine.world as usize || answers.len() != all.len() || !(0..).zip(&all).all(is_valid) {
        return Err(not_decodable());
    }
    Ok(all)
}

fn open_shm(
    spec: &ConnectSpec<'_>,
    export: Option<ShmExport>,
    all: &[RankAddress],
    same_host: &[bool],
    spin: Duration,
) -> Result<ShmCarrier, String> {
    let Some(export) = export else {
        return Err(all[spec.rank.0 as usize].shm.as_ref().err().cloned().unwrap_or_default());
    };
    let addresses: Vec<Option<ShmAddress>> = all
        .iter()
        .zip(same_host)
        .map(|(at, same)| if *same { at.shm.clone().map(Some) } else { Ok(None) })
        .collect::<Result<_, _>>()?;
    ShmCarrier::open(spec.rank, export, &addresses, (spec.deadline, spin), spec.abort.clone())
        .map_err(|e| e.to_string())
}

/// The second exchange: whether each rank could open the memory of all ranks on its host. In the result, the `shm` of
/// a rank that failed holds the reason.
fn exchange_shm_results(
    mut all: Vec<RankAddress>,
    shm: &Result<ShmCarrier, String>,
    exchange: &mut Exchange<'_>,
) -> Result<Vec<RankAddress>, CommError> {
    // An empty string means success.
    let failure = shm.as_ref().err().map_or("", String::as_str);
    let failures = exchange(&encode_text(failure))?;
    if failures.len() != all.len() {
        return Err(not_decodable());
    }
    for (at, failure) in all.iter_mut().zip(&failures) {
        let failure = decode_text(failure).ok_or_else(not_decodable)?;
        if !failure.is_empty() {
            at.shm = Err(failure);
        }
    }
    Ok(all)
}

/// Why the ranks of a host cannot share memory: the reason of the first of them that failed.
fn shm_failure(all: &[RankAddress], host: &str) -> Option<String> {
    all.iter().filter(|at| at.host == host).find_map(|at| at.shm.as_ref().err().cloned())
}

fn rank_elsewhere(all: &[RankAddress], host: &str) -> Option<String> {
    all.iter().find(|at| at.host != host).map(|at| format!("{} is on another host", Rank(at.rank)))
}

/// Opens the TCP connections, after one more exchange: the addresses that ranks listen on.
fn open_tcp(
    spec: &ConnectSpec<'_>,
    peers: &[bool],
    spin: Duration,
    exchange: &mut Exchange<'_>,
) -> Result<TcpCarrier<Sockets>, CommError> {
    let setup = |why: String| CommError::Setup { what: "TCP connections", why };
    let listening = listen(spec);
    // A rank that cannot listen sends an empty address, so that the others do not wait for it.
    let mine = listening.as_ref().map_or_else(|_| String::new(), |(_, address)| address.to_string());
    let answers = exchange(&encode_text(&mine))?;
    let (mut sockets, _) = listening.map_err(setup)?;
    let parse = |bytes: &Vec<u8>| decode_text(bytes).and_then(|text| text.parse::<SocketAddr>().ok());
    let addresses: Vec<_> = answers.iter().map(parse).collect();
    if let Some(r) = (0..peers.len()).find(|r| addresses.get(*r).is_none_or(Option::is_none)) {
        return Err(setup(format!("{} cannot listen for connections; see its error", Rank(r as u32))));
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

/// A listener, and the address at which other ranks reach it.
fn listen(spec: &ConnectSpec<'_>) -> Result<(Sockets, SocketAddr), String> {
    let failed = |e| format!("{} cannot listen on {}: {e}", spec.rank, spec.bind);
    let sockets = Sockets::listen(spec.bind).map_err(failed)?;
    let mut address = sockets.local_address().map_err(failed)?;
    address.set_ip(spec.advertise.unwrap_or(address.ip()));
    if address.ip().is_unspecified() {
        let why = format!("{} listens on {address}, which other ranks cannot connect to", spec.rank);
        return Err(format!("{why}; give it an address to advertise"));
    }
    Ok((sockets, address))
}

fn not_decodable() -> CommError {
    let why =
        "a rank sent an address that cannot be decoded; all ranks must run the same version of lockstep";
    CommError::Setup { what: "connections between ranks", why: why.into() }
}
