//! A rank's end of the control connection: one thread that runs `client` on a real socket.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::abort::Member;
use crate::client::{Action, Client, ClientConfig, Event};
use crate::error::LaunchError;
use crate::serve::IDLE;
use crate::token::nonce;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The limit for a server to accept what it is sent.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) type Hook = Box<dyn FnOnce(String) + Send>;

/// A request from a rank to its control thread.
pub(crate) enum Command {
    Put { name: String, hex: String, timeout: Duration },
    Fail { text: String, code: u8 },
    Leave,
}

/// The state that a rank shares with its control thread.
#[derive(Default)]
pub(crate) struct ControlState {
    pub(crate) start: Option<Start>,
    pub(crate) exchanged: VecDeque<(String, Vec<Vec<u8>>)>,
    pub(crate) ended: Option<Result<(), LaunchError>>,
    hooks: Vec<Hook>,
    commands: VecDeque<Command>,
}

pub(crate) struct Start {
    pub(crate) members: Vec<Member>,
    pub(crate) run: Vec<u8>,
    /// The address at which other ranks can reach this host.
    pub(crate) local_ip: IpAddr,
}

/// A rank's handle to its control thread.
pub(crate) struct Control {
    shared: Arc<Shared>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<ControlState>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, mut wake: &UnixStream, command: Command) {
        self.state().commands.push_back(command);
        let _ = wake.write(&[0]);
    }

    fn wait_for_end(&self, limit: Duration) {
        let _ = self.changed.wait_timeout_while(self.state(), limit, |state| state.ended.is_none());
    }
}

/// Sends commands to the control thread; may outlive the session.
pub(crate) struct ControlHandle {
    shared: Arc<Shared>,
    wake: UnixStream,
}

impl ControlHandle {
    pub(crate) fn submit(&self, command: Command) {
        self.shared.submit(&self.wake, command);
    }

    pub(crate) fn wait_for_end(&self, limit: Duration) {
        self.shared.wait_for_end(limit);
    }
}

/// The reason why another rank ended a session; outlives the session.
#[derive(Clone)]
pub struct AbortReason(Arc<Shared>);

impl AbortReason {
    /// `None` if no other rank has ended the session so far.
    pub fn get(&self) -> Option<LaunchError> {
        match &self.0.state().ended {
            Some(Err(error)) => Some(error.duplicate()),
            _ => None,
        }
    }
}

impl Control {
    /// Starts to connect to `host:port`.
    pub(crate) fn start(host: &str, port: u16, config: ClientConfig) -> Result<Control, LaunchError> {
        let failed = |cause| LaunchError::System { what: "start the control connection", cause };
        let (wake, woken) = UnixStream::pair().map_err(failed)?;
        woken.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let mut io = ControlLoop {
            host: host.into(),
            port,
            stream: None,
            woken,
            start: Instant::now(),
            shared: Arc::clone(&shared),
        };
        let run = move || io.run(Client::new(config));
        let thread = std::thread::Builder::new().name("control".into()).spawn(run).map_err(failed)?;
        Ok(Control { shared, wake, thread: Some(thread) })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ControlState> {
        self.shared.state()
    }

    pub(crate) fn submit(&self, command: Command) {
        self.shared.submit(&self.wake, command);
    }

    /// A handle for another thread.
    pub(crate) fn handle(&self) -> Result<ControlHandle, LaunchError> {
        let wake = self.wake.try_clone();
        let wake =
            wake.map_err(|cause| LaunchError::System { what: "share the control connection", cause })?;
        Ok(ControlHandle { shared: Arc::clone(&self.shared), wake })
    }

    /// Waits until `ready` returns a value. It needs no timeout, because the control thread enforces all deadlines
    /// and always ends.
    pub(crate) fn wait<T>(&self, mut ready: impl FnMut(&mut ControlState) -> Option<T>) -> T {
        let mut state = self.state();
        loop {
            if let Some(found) = ready(&mut state) {
                return found;
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the end of the session, for at most `limit`.
    pub(crate) fn wait_for_end(&self, limit: Duration) {
        self.shared.wait_for_end(limit);
    }

    pub(crate) fn reason(&self) -> AbortReason {
        AbortReason(Arc::clone(&self.shared))
    }

    /// Calls `hook` when another rank ends the session, or immediately if that has already happened.
    pub(crate) fn on_abort(&self, hook: Hook) {
        let mut state = self.state();
        match &state.ended {
            Some(Err(error)) => {
                let text = error.to_string();
                drop(state);
                hook(text);
            }
            Some(Ok(())) => {}
            None => state.hooks.push(hook),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.wake.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take()
            // A hook runs on this thread and may drop its own session: a thread cannot join itself.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

struct ControlLoop {
    host: String,
    port: u16,
    stream: Option<TcpStream>,
    woken: UnixStream,
    start: Instant,
    shared: Arc<Shared>,
}

impl ControlLoop {
    fn run(&mut self, mut client: Client) {
        self.event(&mut client, Event::Tick);
        while !client.is_over() {
            let (woken, readable) = self.wait();
            if woken && self.dropped() {
                return;
            }
            loop {
                let command = self.lock().commands.pop_front();
                match command {
                    None => break,
                    Some(Command::Put { name, hex, timeout }) => {
                        self.event(&mut client, Event::Put { name, hex, timeout });
                    }
                    Some(Command::Fail { text, code }) => self.event(&mut client, Event::Fail { text, code }),
                    Some(Command::Leave) => self.event(&mut client, Event::Leave),
                }
            }
            if readable {
                self.read(&mut client);
            }
            self.event(&mut client, Event::Tick);
        }
    }

    fn wait(&self) -> (bool, bool) {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        fds.extend(self.stream.as_ref().map(|stream| PollFd::new(stream, PollFlags::IN)));
        let _ = poll(&mut fds, Some(&IDLE));
        let hit = |idx: usize| fds.get(idx).is_some_and(|fd| !fd.revents().is_empty());
        (hit(0), hit(1))
    }

    /// Reads the wake-up bytes. Returns whether the rank has dropped its handle.
    fn dropped(&mut self) -> bool {
        matches!(self.woken.read(&mut [0; 64]), Ok(0))
    }

    fn read(&mut self, client: &mut Client) {
        let mut buffer = [0; 16 << 10];
        let Some(stream) = &mut self.stream else { return };
        match stream.read(&mut buffer) {
            Ok(0) => {
                self.stream = None;
                self.event(client, Event::Closed("it closed the connection".into()));
            }
            Ok(count) => self.event(client, Event::Bytes(&buffer[..count])),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(cause) => {
                self.stream = None;
                self.event(client, Event::Closed(cause.to_string()));
            }
        }
    }

    fn event(&mut self, client: &mut Client, event: Event<'_>) {
        let mut actions: VecDeque<Action> = client.handle(self.start.elapsed(), event).into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Connect => {
                    let event = match self.connect() {
                        Ok(nonce) => Event::Connected { nonce },
                        Err(why) => Event::ConnectFailed(why),
                    };
                    actions.extend(client.handle(self.start.elapsed(), event));
                }
                Action::Send(bytes) => {
                    let Some(stream) = &mut self.stream else { continue };
                    if let Err(cause) = stream.write_all(&bytes) {
                        self.stream = None;
                        actions.extend(client.handle(self.start.elapsed(), Event::Closed(cause.to_string())));
                    }
                }
                Action::Close => self.stream = None,
                Action::Joined { members, run } => {
                    let local = self.stream.as_ref().and_then(|stream| stream.local_addr().ok());
                    let local_ip = local.map_or(IpAddr::from([127, 0, 0, 1]), |addr| addr.ip());
                    self.update(|state| state.start = Some(Start { members, run, local_ip }));
                }
                Action::All { name, values } => {
                    self.update(|state| state.exchanged.push_back((name, values)))
                }
                Action::Ended(result) => self.ended(result),
            }
        }
    }

    fn connect(&mut self) -> Result<[u8; 32], String> {
        let host = &self.host;
        let addrs = (host.as_str(), self.port).to_socket_addrs();
        let mut last = format!("host `{}` has no address", host.escape_debug());
        for addr in addrs.map_err(|e| format!("cannot resolve host `{}`: {e}", host.escape_debug()))? {
            match TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT) {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    // Reads follow `poll` and should not block; the timeout is a safeguard.
                    let timeouts = stream
                        .set_read_timeout(Some(WRITE_TIMEOUT))
                        .and(stream.set_write_timeout(Some(WRITE_TIMEOUT)));
                    timeouts.map_err(|e| e.to_string())?;
                    self.stream = Some(stream);
                    return nonce().map_err(|e| e.to_string());
                }
                Err(cause) => last = cause.to_string(),
            }
        }
        Err(last)
    }

    fn ended(&mut self, result: Result<(), LaunchError>) {
        let why = result.as_ref().err().map(ToString::to_string);
        let mut hooks = Vec::new();
        self.update(|state| {
            hooks = std::mem::take(&mut state.hooks);
            state.ended = Some(result);
        });
        if let Some(why) = why {
            hooks.into_iter().for_each(|hook| hook(why.clone()));
        }
    }

    fn update(&self, change: impl FnOnce(&mut ControlState)) {
        change(&mut self.lock());
        self.shared.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.shared.state()
    }
}
