//! A rank's end of the control connection on a real socket: one thread that asks `client` what to do.

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

const CONNECT: Duration = Duration::from_secs(2);
/// A server that does not take what it is sent.
const WRITE: Duration = Duration::from_secs(3);

pub(crate) type Hook = Box<dyn FnOnce(String) + Send>;

/// What a rank asks of its control thread.
pub(crate) enum Command {
    Put { name: String, hex: String, timeout: Duration },
    Fail { text: String, code: u8 },
    Leave,
}

/// What the control thread has heard.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) start: Option<Start>,
    pub(crate) exchanged: VecDeque<(String, Vec<Vec<u8>>)>,
    pub(crate) ended: Option<Result<(), LaunchError>>,
    hooks: Vec<Hook>,
    commands: VecDeque<Command>,
}

pub(crate) struct Start {
    pub(crate) members: Vec<Member>,
    pub(crate) run: Vec<u8>,
    /// Where the others can reach this host.
    pub(crate) local_ip: IpAddr,
}

/// The control thread, as the rank sees it.
pub(crate) struct Control {
    shared: Arc<Shared>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Shared {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, mut wake: &UnixStream, command: Command) {
        self.heard().commands.push_back(command);
        let _ = wake.write(&[0]);
    }

    fn wait_for_end(&self, most: Duration) {
        let _ = self.changed.wait_timeout_while(self.heard(), most, |heard| heard.ended.is_none());
    }
}

/// Asks things of the control thread; may outlive the session.
pub(crate) struct ControlHandle {
    shared: Arc<Shared>,
    wake: UnixStream,
}

impl ControlHandle {
    pub(crate) fn ask(&self, command: Command) {
        self.shared.ask(&self.wake, command);
    }

    pub(crate) fn wait_for_end(&self, most: Duration) {
        self.shared.wait_for_end(most);
    }
}

/// Says why a session was ended by another rank; outlives the session.
#[derive(Clone)]
pub struct AbortReason(Arc<Shared>);

impl AbortReason {
    /// `None`: it was not, so far.
    pub fn get(&self) -> Option<LaunchError> {
        match &self.0.heard().ended {
            Some(Err(error)) => Some(error.again()),
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
        let shared = Arc::new(Shared { heard: Mutex::default(), changed: Condvar::new() });
        let mut io = Io {
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

    pub(crate) fn heard(&self) -> MutexGuard<'_, Heard> {
        self.shared.heard()
    }

    pub(crate) fn ask(&self, command: Command) {
        self.shared.ask(&self.wake, command);
    }

    /// The same for another thread.
    pub(crate) fn handle(&self) -> Result<ControlHandle, LaunchError> {
        let wake = self.wake.try_clone();
        let wake =
            wake.map_err(|cause| LaunchError::System { what: "share the control connection", cause })?;
        Ok(ControlHandle { shared: Arc::clone(&self.shared), wake })
    }

    /// Waits until `ready` finds what it looks for. The control thread itself keeps the deadlines: it
    /// always ends.
    pub(crate) fn wait<T>(&self, mut ready: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let mut heard = self.heard();
        loop {
            if let Some(found) = ready(&mut heard) {
                return found;
            }
            heard = self.shared.changed.wait(heard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the end of the session, for at most so long.
    pub(crate) fn wait_for_end(&self, most: Duration) {
        self.shared.wait_for_end(most);
    }

    pub(crate) fn reason(&self) -> AbortReason {
        AbortReason(Arc::clone(&self.shared))
    }

    /// Calls `hook` when the session is ended by another; at once where that has happened.
    pub(crate) fn on_abort(&self, hook: Hook) {
        let mut heard = self.heard();
        match &heard.ended {
            Some(Err(error)) => {
                let text = error.to_string();
                drop(heard);
                hook(text);
            }
            Some(Ok(())) => {}
            None => heard.hooks.push(hook),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.wake.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take()
            // The hook may drop the session it was given to.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

struct Io {
    host: String,
    port: u16,
    stream: Option<TcpStream>,
    woken: UnixStream,
    start: Instant,
    shared: Arc<Shared>,
}

impl Io {
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

    /// Takes the wake-up bytes; whether the rank has let go.
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
                    self.tell(|heard| heard.start = Some(Start { members, run, local_ip }));
                }
                Action::All { name, values } => self.tell(|heard| heard.exchanged.push_back((name, values))),
                Action::Ended(result) => self.ended(result),
            }
        }
    }

    fn connect(&mut self) -> Result<[u8; 32], String> {
        let host = &self.host;
        let addrs = (host.as_str(), self.port).to_socket_addrs();
        let mut last = format!("the host `{}` has no address", host.escape_debug());
        for addr in addrs.map_err(|e| format!("cannot find the host `{}`: {e}", host.escape_debug()))? {
            match TcpStream::connect_timeout(&addr, CONNECT) {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    // Reads come after `poll`; a time limit still guards them.
                    let timeouts =
                        stream.set_read_timeout(Some(WRITE)).and(stream.set_write_timeout(Some(WRITE)));
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
        self.tell(|heard| {
            hooks = std::mem::take(&mut heard.hooks);
            heard.ended = Some(result);
        });
        if let Some(why) = why {
            hooks.into_iter().for_each(|hook| hook(why.clone()));
        }
    }

    fn tell(&self, change: impl FnOnce(&mut Heard)) {
        change(&mut self.lock());
        self.shared.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.shared.heard()
    }
}
