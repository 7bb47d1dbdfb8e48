//! Sends rows to a server from a thread of its own, so that a slow or missing server never holds up a step.
//!
//! The queue is bounded: rows that find it full are dropped and counted. A request that fails is repeated, with growing
//! pauses. The first failure is reported; then, if the server comes back, everything in the queue still arrives.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::http::Failure;
use super::{Row, Tracker, TrackerError};

/// Rows that wait for the server.
const QUEUE_ROWS: usize = 1024;
/// Rows of one request.
const BATCH_ROWS: usize = 64;
/// How long to collect rows for a request.
const COLLECT: Duration = Duration::from_millis(500);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long the end of a run waits for rows that are not sent yet.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Speaks the protocol of a server. Called on the thread.
pub(super) trait Sender: Send + 'static {
    /// Starts the run, if that is not done, and sends rows.
    fn send(&mut self, rows: &[Row]) -> Result<(), Failure>;

    /// The run has ended.
    fn finish(&mut self, _completed: bool) -> Result<(), Failure> {
        Ok(())
    }
}

enum Item {
    Row(Row),
    Finish { completed: bool },
}

/// What the thread and the run share.
#[derive(Default)]
struct Status {
    /// Reported to the user once.
    warning: Option<String>,
    warned: bool,
}

/// The run's end of the queue.
pub(super) struct Background {
    queue: SyncSender<Item>,
    ended: Receiver<()>,
    status: Arc<Mutex<Status>>,
    dropped: u64,
}

impl Background {
    pub(super) fn start(name: &str, sender: impl Sender) -> Result<Background, TrackerError> {
        let (queue, rows) = mpsc::sync_channel(QUEUE_ROWS);
        let (end, ended) = mpsc::channel();
        let status = Arc::new(Mutex::new(Status::default()));
        let shared = Arc::clone(&status);
        let work = move || {
            SendLoop { sender, rows, status: shared }.run();
            let _ = end.send(());
        };
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        spawned.map_err(|cause| TrackerError::Server(format!("its thread cannot be started ({cause})")))?;
        Ok(Background { queue, ended, status, dropped: 0 })
    }

    /// The first failure. Later ones are not reported.
    fn check(&self) -> Result<(), TrackerError> {
        let mut status = self.status.lock().unwrap_or_else(|e| e.into_inner());
        match status.warning.take() {
            Some(why) => Err(TrackerError::Server(why)),
            None => Ok(()),
        }
    }
}

impl Tracker for Background {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError> {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Item::Row(row.clone())) {
            self.dropped += 1;
        }
        self.check()
    }

    fn finish(&mut self, completed: bool) -> Result<(), TrackerError> {
        let _ = self.queue.try_send(Item::Finish { completed });
        let in_time = self.ended.recv_timeout(LAST_WAIT).is_ok();
        self.check()?;
        match (in_time, self.dropped) {
            (false, _) => Err(TrackerError::Server("its server has not taken the last rows in time".into())),
            (true, 0) => Ok(()),
            (true, dropped) => {
                Err(TrackerError::Server(format!("its server was too slow for {dropped} rows")))
            }
        }
    }
}

/// The thread.
struct SendLoop<S> {
    sender: S,
    rows: Receiver<Item>,
    status: Arc<Mutex<Status>>,
}

impl<S: Sender> SendLoop<S> {
    fn run(mut self) {
        loop {
            let (batch, end) = self.collect();
            if !batch.is_empty() && !self.persist(|sender| sender.send(&batch)) {
                return;
            }
            match end {
                Some(Some(completed)) => {
                    self.persist(|sender| sender.finish(completed));
                    return;
                }
                Some(None) => return,
                None => {}
            }
        }
    }

    /// Waits for rows, and collects those that follow soon. Also returns whether the run has ended: `Some(None)` if it was
    /// cut short.
    fn collect(&self) -> (Vec<Row>, Option<Option<bool>>) {
        let mut batch = Vec::new();
        let mut deadline = None;
        while batch.len() < BATCH_ROWS {
            let item = match deadline {
                None => self.rows.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => self.rows.recv_timeout(Instant::saturating_duration_since(&at, Instant::now())),
            };
            match item {
                Ok(Item::Row(row)) => batch.push(row),
                Ok(Item::Finish { completed }) => return (batch, Some(Some(completed))),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return (batch, Some(None)),
            }
            deadline.get_or_insert_with(|| Instant::now() + COLLECT);
        }
        (batch, None)
    }

    /// Repeats a request until it succeeds. Returns false if it never will.
    fn persist(&mut self, request: impl Fn(&mut S) -> Result<(), Failure>) -> bool {
        let mut pause = FIRST_PAUSE;
        loop {
            match request(&mut self.sender) {
                Ok(()) => return true,
                Err(failure) => {
                    let is_final = matches!(failure, Failure::Refused { .. });
                    let mut status = self.status.lock().unwrap_or_else(|e| e.into_inner());
                    if !status.warned {
                        (status.warned, status.warning) = (true, Some(failure.to_string()));
                    }
                    drop(status);
                    if is_final {
                        return false;
                    }
                }
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
