//! Listens on a port, and finds out which process holds it if that fails.

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};

use crate::error::{LaunchError, printable};

/// The process that listens on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    /// The name of its command.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {}, {}", self.pid, printable(&self.name))
    }
}

pub(crate) fn listen(addr: SocketAddr) -> Result<TcpListener, LaunchError> {
    TcpListener::bind(addr).map_err(|cause| match cause.kind() {
        ErrorKind::AddrInUse => LaunchError::PortInUse { addr, holder: holder(addr.port()) },
        _ => LaunchError::Bind { addr, cause },
    })
}

/// The process that listens on `port`, if `/proc` shows it to this user.
fn holder(port: u16) -> Option<Holder> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .flat_map(|table| listening(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    for entry in std::fs::read_dir("/proc").ok()?.filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(files) = entry.path().join("fd").read_dir() else { continue };
        let mut links = files.filter_map(Result::ok).filter_map(|file| file.path().read_link().ok());
        if links.any(|link| inodes.iter().any(|inode| link.as_os_str() == inode.as_str())) {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            return Some(Holder { pid, name: name.trim().into() });
        }
    }
    None
}

/// The inodes of the sockets that listen on `port`, according to a table in `/proc/net`.
fn listening(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let here = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        (here == port && *state == LISTEN).then(|| inode.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn listening_sockets_are_found_in_the_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n\
             1: 0100007F:733C 0100007F:99AA 01 00000000:00000000 00:00000000 00000000     0        0 4712 1\n\
             2: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1\n\
             short line\n";
        assert_eq!(listening(table, 29500), [4711]);
        assert!(listening("", 29500).is_empty());
    }

    #[test]
    fn the_error_names_the_holder_within_300_ms() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let start = Instant::now();
        let error = listen(first.local_addr().unwrap()).unwrap_err();
        let took = start.elapsed();
        let port = first.local_addr().unwrap().port();
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("port {port} is already in use (by pid {}, ", std::process::id())),
            "{text}"
        );
        println!("reported in {took:?}");
        assert!(took < Duration::from_millis(300), "{took:?}");
    }
}
