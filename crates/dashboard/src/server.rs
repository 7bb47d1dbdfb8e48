//! Listens, and gives every connection a thread. Their number is bounded.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::access::Access;
use crate::connection;
use crate::error::DashboardError;
use crate::response::Response;
use crate::routes::Site;
use crate::runs::Runs;
use crate::token::Token;

/// The port of the dashboard, unless another is chosen.
pub const DEFAULT_PORT: u16 = 8420;

/// A page has up to six connections of a browser.
const MAX_CONNECTIONS: usize = 64;
const STACK_BYTES: usize = 512 * 1024;
/// How soon the listener sees that it should stop.
const STOP_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Higher than that of the training threads, which thus come first.
const NICENESS: i32 = 10;

/// What to serve, and to whom.
#[derive(Debug)]
pub struct Options {
    pub address: IpAddr,
    /// `None`: the default port, or any free one if that is in use.
    pub port: Option<u16>,
    /// Required on any address but a loopback one; then a missing one is generated.
    pub token: Option<Token>,
    /// The name of this machine.
    pub host_name: String,
    /// Other names under which a browser may reach the page.
    pub hosts: Vec<String>,
    /// Output folders, and folders with output folders in them. They need not exist yet.
    pub folders: Vec<PathBuf>,
    /// The most numbers of a run to keep in memory; longer series are thinned.
    pub max_values: usize,
}

impl Options {
    /// Numbers to keep of a run: 32 MB.
    pub const MANY_VALUES: usize = 1 << 22;
    /// Numbers to keep of a run inside of the process that trains: 8 MB.
    pub const FEW_VALUES: usize = 1 << 20;
}

/// A dashboard that is being served, until it is dropped.
#[derive(Debug)]
pub struct Dashboard {
    address: SocketAddr,
    host_name: String,
    token: Option<Token>,
    stopping: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Listens and answers on threads of its own.
    pub fn start(options: Options) -> Result<Dashboard, DashboardError> {
        let listener = listen(options.address, options.port)?;
        let failed = |what| move |source| DashboardError::System { what, source };
        let address = listener.local_addr().map_err(failed("reading its own address"))?;
        listener.set_nonblocking(true).map_err(failed("setting up the listener"))?;
        let token = match options.token {
            None if !options.address.is_loopback() => Some(Token::random()?),
            token => token,
        };
        let mut hosts = options.hosts;
        hosts.push(options.host_name.clone());
        let access = Access::new(token.as_ref(), address.port(), hosts);
        let stopping = Arc::new(AtomicBool::new(false));
        let runs = Runs::new(options.folders, options.max_values);
        let site = Arc::new(Site { access, runs, stopping: Arc::clone(&stopping) });
        let thread = thread::Builder::new().name("dashboard".into()).stack_size(STACK_BYTES);
        let listener = thread.spawn(move || accept(&listener, &site)).map_err(failed("starting a thread"))?;
        let host_name = options.host_name;
        Ok(Dashboard { address, host_name, token, stopping, listener: Some(listener) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address to open. It has the token if that was generated, and so must be shown to nobody but the user.
    pub fn url(&self) -> String {
        // A browser cannot open the address that means all addresses.
        let host = match self.address.ip() {
            ip if ip.is_unspecified() => self.host_name.clone(),
            IpAddr::V6(ip) => format!("[{ip}]"),
            IpAddr::V4(ip) => ip.to_string(),
        };
        let token = self.token.as_ref().and_then(Token::new_text).map(|token| format!("?token={token}"));
        format!("http://{host}:{}/{}", self.address.port(), token.unwrap_or_default())
    }

    /// Waits until the listener ends, which it does by itself only if the system fails it.
    pub fn wait(mut self) {
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

fn listen(address: IpAddr, port: Option<u16>) -> Result<TcpListener, DashboardError> {
    let at = SocketAddr::new(address, port.unwrap_or(DEFAULT_PORT));
    let bound = match (TcpListener::bind(at), port) {
        (Err(error), None) if error.kind() == std::io::ErrorKind::AddrInUse => {
            TcpListener::bind(SocketAddr::new(address, 0))
        }
        (bound, _) => bound,
    };
    bound.map_err(|source| DashboardError::Listen { address: at, source })
}

/// Counts a connection while it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts connections until it should stop.
fn accept(listener: &TcpListener, site: &Arc<Site>) {
    be_nice();
    let connections = Arc::new(AtomicUsize::new(0));
    while !site.stopping.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        let _ = poll(&mut ready, Some(&STOP_CHECK));
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) => {
                // Such as too many open files: some will be closed.
                thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if stream.set_nonblocking(false).is_err() {
            continue;
        }
        let counted = Counted(Arc::clone(&connections));
        if connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            refuse(stream);
            continue;
        }
        let site = Arc::clone(site);
        let thread = thread::Builder::new().name("dashboard connection".into()).stack_size(STACK_BYTES);
        // Without a thread the connection is closed, and the browser tries later.
        let _ = thread.spawn(move || {
            let _counted = counted;
            connection::serve(stream, &site);
        });
    }
}

/// There are too many connections. The answer fits the socket's buffer, so this does not wait.
fn refuse(mut stream: TcpStream) {
    let response = Response::text(503, "too many connections").with_header("Retry-After", "5");
    let _ = stream.set_nonblocking(true);
    let _ = response.write(&mut stream, false, true);
}

/// Lets the threads that train come first. On Linux a thread has a niceness of its own, which those that it starts inherit.
fn be_nice() {
    if cfg!(target_os = "linux") {
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
    }
}
