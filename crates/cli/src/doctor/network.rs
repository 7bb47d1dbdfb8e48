//! The port of the rendezvous, and the network interfaces. Nothing is sent.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};

use lockstep_launch::DEFAULT_PORT;

use super::Finding;

/// A route of the kernel's table: the interface, and the addresses that it reaches.
struct Route {
    interface: String,
    network: u32,
    mask: u32,
}

pub(super) fn check() -> Vec<Finding> {
    vec![port(DEFAULT_PORT), interfaces()]
}

fn port(port: u16) -> Finding {
    const PART: &str = "port";
    match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
        Ok(_) => Finding::ok(PART, format!("{port} is free: the default of runs on several nodes")),
        Err(cause) => {
            let remedy =
                "Node 0 of several uses this port. Give another one with --master-port, on every node.";
            Finding::warn(PART, format!("{port} cannot be used: {cause}"), remedy)
        }
    }
}

fn interfaces() -> Finding {
    const PART: &str = "network";
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let addresses = addresses(&read("/proc/net/fib_trie"));
    let routes = routes(&read("/proc/net/route"));
    let shown: Vec<String> = addresses
        .iter()
        .filter(|address| !address.is_loopback())
        .map(|address| match interface_of(*address, &routes) {
            Some(interface) => format!("{interface} {address}"),
            None => address.to_string(),
        })
        .collect();
    match (addresses.is_empty(), shown.is_empty()) {
        (true, _) => Finding::none(PART, "the interfaces cannot be read"),
        (false, true) => Finding::none(PART, "only the loopback interface: one host works, several do not"),
        (false, false) => Finding::ok(PART, shown.join(", ")),
    }
}

/// The addresses of this host, from the kernel's forwarding table.
fn addresses(fib_trie: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut last = None;
    for line in fib_trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last.take().filter(|address| !found.contains(address)));
        }
    }
    found
}

/// The routes of `/proc/net/route`, whose numbers are hexadecimal in the host's byte order.
fn routes(table: &str) -> Vec<Route> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(|n| u32::from_be_bytes(n.to_ne_bytes()));
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (network, mask) = (number(fields.get(1)?)?, number(fields.get(7)?)?);
        Some(Route { interface: (*fields.first()?).to_owned(), network, mask })
    };
    table.lines().skip(1).filter_map(route).collect()
}

/// The interface with the most specific route to an address of this host.
fn interface_of(address: Ipv4Addr, routes: &[Route]) -> Option<&str> {
    let address = u32::from(address);
    let reaching = routes.iter().filter(|route| route.mask != 0 && address & route.mask == route.network);
    reaching.max_by_key(|route| route.mask).map(|route| route.interface.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIE: &str = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n\
                        |-- 127.0.0.1\n   /32 host LOCAL\n|-- 192.0.2.0\n  /24 link UNICAST\n\
                        |-- 192.0.2.2\n /32 host LOCAL\n|-- 192.0.2.255\n  /32 link BROADCAST\n";

    #[test]
    fn addresses_belong_to_interfaces() {
        let doubled = format!("{TRIE}Local:\n{TRIE}");
        assert_eq!(addresses(&doubled), [Ipv4Addr::LOCALHOST, Ipv4Addr::new(192, 0, 2, 2)]);
        let table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                     eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\n\
                     eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\nnonsense\n";
        let routes = routes(table);
        if cfg!(target_endian = "little") {
            assert_eq!(interface_of(Ipv4Addr::new(192, 0, 2, 2), &routes), Some("eth0"));
        }
        assert_eq!(interface_of(Ipv4Addr::new(10, 0, 0, 1), &routes), None);
        assert!(addresses("|-- x\n/32 host LOCAL").is_empty());
    }

    #[test]
    fn a_port_in_use_is_reported() {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let used = listener.local_addr().unwrap().port();
        let finding = port(used);
        assert_eq!(finding.status, super::super::Status::Warn, "{finding:?}");
        drop(listener);
        assert_eq!(port(used).status, super::super::Status::Ok);
    }
}
