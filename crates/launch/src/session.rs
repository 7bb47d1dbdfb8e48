//! A rank among the others, from joining to leaving.

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

/// Ranks may be minutes apart when one of them prepares data.
const EXCHANGE: Duration = Duration::from_secs(1800);
/// For a failure to reach the others before this process ends.
const LAST_WORD: Duration = Duration::from_millis(300);

/// A rank's place in a run. While it lives, signs of life go to the rendezvous and come from it. Dropped
/// without [`leave`](Session::leave), it counts as a failure of this rank.
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

    /// Every rank of the run, by number.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A secret that the ranks of this run share, and no other run has.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The address of this host on the way to the rendezvous: where other ranks can reach it.
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Gives `mine` to all ranks and returns what each of them gave, by rank. All ranks make the same
    /// exchanges in the same order; a rank that comes to another one is named to all.
    pub fn exchange(&mut self, name: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, LaunchError> {
        self.exchange_within(name, mine, EXCHANGE)
    }

    /// As [`exchange`](Session::exchange); after `timeout` the ranks that have not come are named to all.
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
        self.control.ask(Command::Put { name: name.into(), hex: to_hex(mine), timeout });
        self.control.wait(|heard| match (heard.exchanged.pop_front(), &heard.ended) {
            (Some((_, values)), _) => Some(Ok(values)),
            (None, Some(Err(error))) => Some(Err(error.again())),
            (None, Some(Ok(()))) => Some(Err(LaunchError::Ended)),
            (None, None) => None,
        })
    }

    /// Waits until all ranks have come here.
    pub fn barrier(&mut self, name: &str) -> Result<(), LaunchError> {
        self.exchange(name, &[]).map(drop)
    }

    /// Compares a list of keys and values with all ranks'. Where they differ, every rank gets an error
    /// that says which ranks have what.
    pub fn agree(&mut self, name: &str, mine: &[(&str, String)]) -> Result<(), LaunchError> {
        let lists = self.exchange(name, &agree::encode(mine))?;
        match agree::difference(name, &lists) {
            None => Ok(()),
            Some(text) => Err(LaunchError::Disagree { text }),
        }
    }

    /// Calls `hook` from the control thread when another rank ends the run, with the reason. At once
    /// where that has happened already. Several hooks are called one after the other.
    pub fn on_abort(&self, hook: Box<dyn FnOnce(String) + Send>) {
        self.control.on_abort(hook);
    }

    /// Why another rank ended the run, if one has.
    pub fn aborted(&self) -> Option<LaunchError> {
        self.abort_reason().get()
    }

    /// As [`aborted`](Session::aborted), after waiting for it a while: what a rank runs into when another
    /// one fails may come before the news.
    pub fn aborted_within(&self, most: Duration) -> Option<LaunchError> {
        self.control.wait_for_end(most);
        self.aborted()
    }

    /// For a thread that wants to know later.
    pub fn abort_reason(&self) -> AbortReason {
        self.control.reason()
    }

    /// For a thread that may have to end this process while the session is in use.
    pub fn failure_notice(&self) -> Result<FailureNotice, LaunchError> {
        Ok(FailureNotice { handle: self.control.handle()?, serves: self.server.is_some() })
    }

    /// Tells all ranks that this one has failed, and why. Waits a moment for the word to get out.
    pub fn fail(self, text: &str, code: u8) {
        self.control.ask(Command::Fail { text: text.into(), code });
        self.control.wait_for_end(LAST_WORD);
        if let Some(server) = self.server {
            // This process has the rendezvous: the others hear of it from here.
            drop(self.control);
            server.finish();
        }
    }

    /// This rank is done. Where it has the rendezvous, it stays until the others are done as well.
    pub fn leave(self) -> Result<(), LaunchError> {
        self.control.ask(Command::Leave);
        let result = self.control.wait(|heard| match &heard.ended {
            Some(Err(error)) => Some(Err(error.again())),
            Some(Ok(())) => Some(Ok(())),
            None => None,
        });
        if let Some(server) = self.server {
            let outcome = server.wait();
            server.finish();
            if let crate::serve::Outcome::Failed(abort) = outcome {
                return Err(LaunchError::Aborted(abort));
            }
        }
        result
    }
}

/// Tells the other ranks that this one ends, from any thread, right before the process does.
pub struct FailureNotice {
    handle: ControlHandle,
    /// This process has the rendezvous.
    serves: bool,
}

impl FailureNotice {
    /// As [`Session::fail`].
    pub fn fail(&self, text: &str, code: u8) {
        self.handle.ask(Command::Fail { text: text.into(), code });
        self.handle.wait_for_end(LAST_WORD);
        if self.serves {
            // The server that forwards the message runs in this process: give it time to.
            std::thread::sleep(LAST_WORD);
        }
    }
}
