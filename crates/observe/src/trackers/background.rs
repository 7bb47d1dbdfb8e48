//! Sends rows to a server from a thread of its own, so that a slow or missing server never holds up a step.
//!
//! The queue is bounded: rows that find it full are dropped and counted. A request that fails is repeated, with growing
//! pauses, and the first failure is reported: if the server comes back, everything in the queue still arrives. A server that
//! refuses a request gets no more.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard};
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
    /// The first failure that may pass, until it is reported.
    trouble: Option<String>,
    /// A failure was reported, so that later ones are not.
    reported: bool,
    /// The failure that ended the thread.
    refusal: Option<String>,
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

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The failure that ended the thread.
    fn refusal(&self) -> Result<(), TrackerError> {
        self.status().refusal.clone().map_or(Ok(()), |why| Err(TrackerError::Server(why)))
    }
}

impl Tracker for Background {
    fn row(&mut self, row: &Row) -> Result<(), TrackerError> {
        match self.queue.try_send(Item::Row(row.clone())) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => {
                self.dropped += 1;
                Ok(())
            }
            Err(TrySendError::Disconnected(_)) => self.refusal(),
        }
    }

    fn warning(&mut self) -> Option<String> {
        let mut status = self.status();
        let trouble = status.trouble.take();
        status.reported |= trouble.is_some();
        trouble.map(|why| format!("{why}; up to {QUEUE_ROWS} rows wait for it"))
    }

    fn finish(&mut self, completed: bool) -> Result<(), TrackerError> {
        let _ = self.queue.try_send(Item::Finish { completed });
        let in_time = self.ended.recv_timeout(LAST_WAIT).is_ok();
        self.refusal()?;
        let status = self.status();
        if status.reported || status.trouble.is_some() {
            return Ok(());
        }
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
                    let mut status = self.status.lock().unwrap_or_else(|e| e.into_inner());
                    let text = failure.to_string();
                    if let Failure::Refused { .. } = failure {
                        status.refusal = Some(text);
                        return false;
                    }
                    if !status.reported {
                        status.trouble.get_or_insert(text);
                    }
                }
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// Fails with these failures, then passes rows on.
    struct Flaky {
        failures: Vec<Failure>,
        arrived: mpsc::Sender<u64>,
    }

    impl Sender for Flaky {
        fn send(&mut self, rows: &[Row]) -> Result<(), Failure> {
            match self.failures.pop() {
                Some(failure) => Err(failure),
                None => {
                    rows.iter().for_each(|row| self.arrived.send(row.step).unwrap());
                    Ok(())
                }
            }
        }
    }

    fn start(failures: Vec<Failure>) -> (Background, Receiver<u64>) {
        let (arrived, rows) = mpsc::channel();
        (Background::start("flaky", Flaky { failures, arrived }).unwrap(), rows)
    }

    fn row(step: u64) -> Row {
        Row { step, at: SystemTime::now(), numbers: vec![] }
    }

    #[test]
    fn rows_arrive_when_the_server_is_back() {
        let busy = || Failure::Later("http://host is busy".into());
        let (mut background, rows) = start(vec![busy(), busy()]);
        (1..=3).for_each(|step| background.row(&row(step)).unwrap());
        background.finish(true).unwrap();
        assert_eq!(rows.try_iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(background.warning().as_deref(), Some("http://host is busy; up to 1024 rows wait for it"));
        assert_eq!(background.warning(), None, "one warning for two failures");
    }

    #[test]
    fn a_server_that_refuses_gets_no_more() {
        let answer = serde_json::Value::Null;
        let refused =
            Failure::Refused { status: 401, answer, text: "http://host answers with status 401".into() };
        let (mut background, rows) = start(vec![refused]);
        background.row(&row(1)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let failed = loop {
            if let Err(failed) = background.row(&row(2)) {
                break failed;
            }
            assert!(Instant::now() < deadline, "the refusal is reported");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(failed.to_string(), "http://host answers with status 401");
        assert!(background.finish(true).is_err() && rows.try_iter().next().is_none());
    }
}
