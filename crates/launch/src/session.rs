//! A rank's session with the rendezvous, from joining to leaving.

use std::net::IpAddr;
use std::time::Duration;

use lockstep_core::proof::Secret;

use crate::abort::Member;
use crate::agree;
use crate::control::{AbortReason, Command, Control, ControlHandle, Start};
use crate::error::LaunchError;
use crate::serve::RunningServer;
use crate::wire::{MAX_VALUE_BYTES, to_hex};
use crate::world::World;

/// The default limit for an exchange. Ranks may be minutes apart when one of them prepares data.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(1800);
/// How long to wait for a failure report to be delivered before this process ends.
const REPORT_TIMEOUT: Duration = Duration::from_millis(300);

/// A rank's membership in a run. While it exists, it exchanges heartbeats with the rendezvous. Dropping it without
/// [`leave`](Session::leave) counts as a failure of this rank.
pub struct Session {
    world: World,
    members: Vec<Member>,
    secret: Secret,
    local_ip: IpAddr,
    control: Control,
    server: Option<RunningServer>,
}

impl Session {
    pub(crate) fn new(
        world: World,
        secret: Secret,
        start: Start,
        control: Control,
        server: Option<RunningServer>,
    ) -> Session {
        let secret = secret.derive("run", &[&start.run]);
        Session { world, members: start.members, secret, local_ip: start.local_ip, control, server }
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// The ranks of the run, indexed by rank.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A secret shared by the ranks of this run only.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// This host's address on its connection to the rendezvous, at which other ranks can reach it.
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Sends `mine` to all ranks and returns the values of all ranks, indexed by rank. All ranks must make the same
    /// exchanges in the same order; if one does not, all ranks get an error that names it.
    pub fn exchange(&mut self, name: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, LaunchError> {
        self.exchange_within(name, mine, EXCHANGE_TIMEOUT)
    }

    /// Like [`exchange`](Session::exchange), with a time limit. After `timeout` all ranks get an error that names the
    /// ranks that are missing.
    pub fn exchange_within(
        &mut self,
        name: &str,
        mine: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, LaunchError> {
        if mine.len() > MAX_VALUE_BYTES {
            return Err(LaunchError::TooLarge {
                name: name.into(),
                bytes: mine.len(),
                most: MAX_VALUE_BYTES,
            });
        }
        self.control.submit(Command::Put { name: name.into(), hex: to_hex(mine), timeout });
        self.control.wait(|state| match (state.exchanged.pop_front(), &state.ended) {
            (Some((_, values)), _) => Some(Ok(values)),
            (None, Some(Err(error))) => Some(Err(error.duplicate())),
            (None, Some(Ok(()))) => Some(Err(LaunchError::Ended)),
            (None, None) => None,
        })
    }

    /// Waits until all ranks have reached this point.
    pub fn barrier(&mut self, name: &str) -> Result<(), LaunchError> {
        self.exchange(name, &[]).map(drop)
    }

    /// Compares a list of keys and values over all ranks. If they differ, every rank gets an error that says which
    /// ranks have which values.
    pub fn agree(&mut self, name: &str, mine: &[(&str, String)]) -> Result<(), LaunchError> {
        let lists = self.exchange(name, &agree::encode(mine))?;
        match agree::difference(name, &lists) {
            None => Ok(()),
            Some(text) => Err(LaunchError::Disagree { text }),
        }
    }

    /// Calls `hook` with the reason, on the control thread, when another rank ends the run; immediately if that has
    /// already happened. Several hooks are called one after the other.
    pub fn on_abort(&self, hook: Box<dyn FnOnce(String) + Send>) {
        self.control.on_abort(hook);
    }

    /// Why another rank ended the run, if one has.
    pub fn aborted(&self) -> Option<LaunchError> {
        self.abort_reason().get()
    }

    /// Like [`aborted`](Session::aborted), but waits for up to `limit`: a rank may see the consequences of another
    /// rank's failure before it receives the reason.
    pub fn aborted_within(&self, limit: Duration) -> Option<LaunchError> {
        self.control.wait_for_end(limit);
        self.aborted()
    }

    /// A handle with which another thread can ask for the reason later.
    pub fn abort_reason(&self) -> AbortReason {
        self.control.reason()
    }

    /// A handle for a thread that may have to end this process while the session is in use.
    pub fn failure_notice(&self) -> Result<FailureNotice, LaunchError> {
        Ok(FailureNotice { handle: self.control.handle()?, serves: self.server.is_some() })
    }

    /// Reports to all ranks that this one has failed, and why. Waits briefly for the report to be delivered.
    pub fn fail(self, text: &str, code: u8) {
        self.control.submit(Command::Fail { text: text.into(), code });
        self.control.wait_for_end(REPORT_TIMEOUT);
        if let Some(server) = self.server {
            // This process runs the rendezvous, so it must still forward the report to the other ranks.
            drop(self.control);
            server.finish();
        }
    }

    /// Leaves the run successfully. If this process runs the rendezvous, it waits until all other ranks have left.
    pub fn leave(self) -> Result<(), LaunchError> {
        self.control.submit(Command::Leave);
        let result = self.control.wait(|state| match &state.ended {
            Some(Err(error)) => Some(Err(error.duplicate())),
            Some(Ok(())) => Some(Ok(())),
            None => None,
        });
        if let Some(server) = self.server {
            let outcome = server.wait();
            server.finish();
            if let crate::serve::RendezvousOutcome::Failed(abort) = outcome {
                return Err(LaunchError::Aborted(abort));
            }
        }
        result
    }
}

/// Reports a failure of this rank to the others, from any thread, right before the process ends.
pub struct FailureNotice {
    handle: ControlHandle,
    /// Whether this process runs the rendezvous.
    serves: bool,
}

impl FailureNotice {
    /// Like [`Session::fail`].
    pub fn fail(&self, text: &str, code: u8) {
        self.handle.submit(Command::Fail { text: text.into(), code });
        self.handle.wait_for_end(REPORT_TIMEOUT);
        if self.serves {
            // The server runs in this process: give it time to forward the report.
            std::thread::sleep(REPORT_TIMEOUT);
        }
    }
}
