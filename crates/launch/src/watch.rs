//! When the ranks of a node are stopped, and when they are started again. Pure.

use std::time::Duration;

use crate::cause::STOPPED;
use crate::signals::EndSignal;

/// From asking ranks to end to ending them, when one has failed: they have nothing to save.
const FAILURE_GRACE: Duration = Duration::from_millis(500);
/// A rank that ends because of another may end first; the other one still has to write why.
const SECOND_THOUGHTS: Duration = Duration::from_millis(200);
/// A rank that is asked to stop notifies the others. Ranks that still run this long after it ended are sent SIGTERM.
const OTHERS_STOP: Duration = Duration::from_secs(1);
/// `timeout` sends its signal twice, to the process and to its group: that is one request.
const REPEATED: Duration = Duration::from_millis(100);
/// A process that does not go even when it is killed hangs in the system, and is left there.
const UNKILLABLE: Duration = Duration::from_secs(5);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    pub(crate) fn is_success(self) -> bool {
        self == Exit::Code(0)
    }

    /// Whether the rank ended because another one did.
    pub(crate) fn is_consequence(self) -> bool {
        matches!(self, Exit::Code(71 | 72))
    }

    /// Whether the rank stopped because SIGTERM or SIGUSR1 asked it to.
    pub(crate) fn is_stop(self) -> bool {
        self == Exit::Code(STOPPED.into())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A rank, by its place on this node.
    Exited {
        local: usize,
        exit: Exit,
    },
    /// The launcher was asked to stop.
    Signalled(EndSignal),
    /// The rendezvous has told the ranks to end.
    RunFailed,
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Asks every rank that runs to save a checkpoint and end.
    Stop,
    /// Asks every rank that runs to end at once.
    Interrupt,
    /// Ends every rank that runs.
    Kill,
    /// Nothing is left to watch.
    Finished,
}

#[derive(Debug)]
pub(crate) struct Watch {
    exits: Vec<Option<Exit>>,
    grace: Duration,
    stopping: Option<Stopping>,
    /// When the launcher was first asked to stop.
    stop_requested: Option<Duration>,
    finished: bool,
}

#[derive(Debug)]
struct Stopping {
    /// The signal that stopped the launcher or a rank. `None`: a rank has failed.
    signal: Option<EndSignal>,
    ask_at: Option<Duration>,
    kill_at: Duration,
    killed: Option<Duration>,
}

impl Watch {
    pub(crate) fn new(ranks: usize, grace: Duration) -> Watch {
        Watch { exits: vec![None; ranks], grace, stopping: None, stop_requested: None, finished: false }
    }

    /// The signal that made everything stop, if one did.
    pub(crate) fn signal(&self) -> Option<EndSignal> {
        self.stopping.as_ref().and_then(|stopping| stopping.signal)
    }

    /// Whether the launcher itself was asked to stop, whatever else ended the ranks.
    pub(crate) fn stop_requested(&self) -> bool {
        self.stop_requested.is_some()
    }

    pub(crate) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Exited { local, exit } => {
                self.exits[local] = Some(exit);
                if exit.is_stop() {
                    let signal = EndSignal::Stop { name: "SIGTERM" };
                    if self.stopping.is_none() {
                        self.stop(now + OTHERS_STOP, self.grace, Some(signal));
                    }
                } else if !exit.is_success() {
                    // Ctrl-C reaches the ranks as well, and perhaps before us.
                    let early = exit.is_consequence() || matches!(exit, Exit::Signal(1 | 2 | 15));
                    let wait = if early { SECOND_THOUGHTS } else { Duration::ZERO };
                    self.stop(now + wait, FAILURE_GRACE, None);
                }
            }
            // The ranks hear of it from the rendezvous, and mostly end by themselves.
            Event::RunFailed => self.stop(now + FAILURE_GRACE, FAILURE_GRACE, None),
            Event::Signalled(signal) => self.signalled(now, signal),
            Event::Tick => {}
        }
        if let Some(stopping) = &mut self.stopping {
            if stopping.ask_at.take_if(|at| *at <= now).is_some() {
                let saves = matches!(stopping.signal, Some(EndSignal::Stop { .. }));
                out.push(if saves { Action::Stop } else { Action::Interrupt });
            }
            if stopping.kill_at <= now && stopping.killed.is_none() {
                stopping.killed = Some(now);
                out.push(Action::Kill);
            }
        }
        let hopeless = self.stopping.as_ref().and_then(|s| s.killed).is_some_and(|at| now >= at + UNKILLABLE);
        if !self.finished && (self.exits.iter().all(Option::is_some) || hopeless) {
            self.finished = true;
            out.push(Action::Finished);
        }
        out
    }

    fn signalled(&mut self, now: Duration, signal: EndSignal) {
        let first = self.stop_requested.replace(self.stop_requested.unwrap_or(now));
        let by_same = Exit::Signal(signal.number().into());
        match (&mut self.stopping, first) {
            (None, _) => self.stop(now, self.grace, Some(signal)),
            // The ranks got it as well, and were faster.
            (Some(stopping), None) if stopping.signal.is_none() && self.exits.contains(&Some(by_same)) => {
                stopping.signal = Some(signal);
                stopping.ask_at = stopping.ask_at.map(|_| now);
                stopping.kill_at = now + self.grace;
            }
            (Some(stopping), None) if stopping.signal.is_some() => {
                stopping.ask_at = stopping.ask_at.map(|_| now);
            }
            (Some(_), Some(first)) if now < first + REPEATED && signal != EndSignal::Interrupt => {}
            (Some(stopping), _) => {
                stopping.ask_at = stopping.ask_at.map(|_| now);
                stopping.kill_at = now;
            }
        }
    }

    /// Asks ranks to end at `at`, and ends them after `grace`. What has been decided before may only come sooner: a
    /// rank that fails while all are stopping leaves nothing to wait for.
    fn stop(&mut self, at: Duration, grace: Duration, signal: Option<EndSignal>) {
        let kill_at = at + grace;
        let stopping = Stopping { signal, ask_at: Some(at), kill_at, killed: None };
        let stopping = self.stopping.get_or_insert(stopping);
        stopping.kill_at = stopping.kill_at.min(kill_at);
        stopping.ask_at = stopping.ask_at.map(|before| before.min(at));
    }
}

/// How often ranks have been and may be started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restarts {
    pub(crate) done: u32,
    pub(crate) most: u32,
}

impl Restarts {
    /// How long to wait before ranks that ended with `code` are started again; `None`: they are not. What
    /// was wrong with the configuration, the data or the token is wrong the next time as well.
    pub(crate) fn next(&mut self, code: u8) -> Option<Duration> {
        if self.done >= self.most || [2, 64, 65, 66, 77].contains(&code) {
            return None;
        }
        self.done += 1;
        Some(Duration::from_secs(1 << (self.done - 1).min(5)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CTRL_C: EndSignal = EndSignal::Interrupt;
    const TERM: EndSignal = EndSignal::Stop { name: "SIGTERM" };

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn one_failure_stops_all() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(
            watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(70) }),
            [Action::Interrupt]
        );
        assert_eq!(watch.handle(ms(499), Event::Tick), []);
        assert_eq!(watch.handle(ms(500), Event::Tick), [Action::Kill]);
        assert_eq!(
            watch.handle(ms(510), Event::Exited { local: 0, exit: Exit::Signal(9) }),
            [Action::Finished]
        );
        assert_eq!(watch.signal(), None);
    }

    #[test]
    fn a_consequence_waits_for_its_cause() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(71) }), []);
        assert_eq!(watch.handle(ms(199), Event::Tick), []);
        assert_eq!(watch.handle(ms(200), Event::Tick), [Action::Interrupt]);
    }

    #[test]
    fn a_second_signal_kills() {
        let mut watch = Watch::new(1, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(watch.handle(ms(50), Event::Signalled(TERM)), [], "sent twice at once");
        assert_eq!(watch.handle(ms(1000), Event::Tick), []);
        assert_eq!(watch.handle(ms(1001), Event::Signalled(TERM)), [Action::Kill]);
        assert_eq!(watch.signal(), Some(TERM));
        let mut watch = Watch::new(1, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(watch.handle(ms(50), Event::Signalled(CTRL_C)), [Action::Kill]);
        let mut watch = Watch::new(1, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Signalled(CTRL_C)), [Action::Interrupt]);
        assert_eq!(watch.handle(ms(200), Event::Signalled(CTRL_C)), [Action::Kill]);
        assert_eq!(watch.signal(), Some(CTRL_C));
    }

    #[test]
    fn ranks_that_stop_have_the_grace() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(watch.handle(ms(100), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(watch.handle(ms(4999), Event::Tick), []);
        assert_eq!(watch.handle(ms(5000), Event::Tick), [Action::Kill]);
        // One that fails leaves the others nothing to save.
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(watch.handle(ms(100), Event::Exited { local: 1, exit: Exit::Code(73) }), []);
        assert_eq!(watch.handle(ms(600), Event::Tick), [Action::Kill]);
        assert_eq!(watch.signal(), Some(TERM));
    }

    /// It was asked to stop, and all ranks stop with it: not a failure.
    #[test]
    fn a_rank_that_was_asked_to_stop() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(watch.signal(), Some(TERM));
        assert!(!watch.stop_requested());
        // The launcher's first signal is not the second request.
        assert_eq!(watch.handle(ms(1), Event::Signalled(TERM)), [Action::Stop]);
        assert!(watch.stop_requested());
        assert_eq!(
            watch.handle(ms(300), Event::Exited { local: 0, exit: Exit::Code(143) }),
            [Action::Finished]
        );
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(watch.handle(ms(1000), Event::Tick), [Action::Stop]);
        assert_eq!(watch.handle(ms(6000), Event::Tick), [Action::Kill]);
    }

    /// A signal that comes while ranks are ended for a failure is not forgotten.
    #[test]
    fn a_signal_after_a_failure() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(
            watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(70) }),
            [Action::Interrupt]
        );
        assert_eq!(watch.handle(ms(10), Event::Signalled(TERM)), [Action::Kill]);
        assert_eq!((watch.signal(), watch.stop_requested()), (None, true));
    }

    /// As a terminal sends it, to all processes of a job.
    #[test]
    fn a_signal_that_ranks_got_first() {
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Signal(2) }), []);
        assert_eq!(watch.handle(ms(1), Event::Signalled(CTRL_C)), [Action::Interrupt]);
        assert_eq!(watch.signal(), Some(CTRL_C));
        assert_eq!(
            watch.handle(ms(2), Event::Exited { local: 0, exit: Exit::Signal(2) }),
            [Action::Finished]
        );
        // A rank that SIGTERM killed before it handled signals has failed, unless the whole run was asked to stop.
        let mut watch = Watch::new(2, ms(5000));
        assert_eq!(watch.handle(ms(0), Event::Exited { local: 1, exit: Exit::Signal(15) }), []);
        assert_eq!(watch.handle(ms(200), Event::Tick), [Action::Interrupt]);
        assert_eq!(watch.signal(), None);
    }

    #[test]
    fn restarts() {
        let mut restarts = Restarts { done: 0, most: 4 };
        assert_eq!(restarts.next(64), None);
        let waits: Vec<_> = (0..5).map(|_| restarts.next(71).map(|wait| wait.as_secs())).collect();
        assert_eq!(waits, [Some(1), Some(2), Some(4), Some(8), None]);
    }

    fn any_event(ranks: usize) -> impl Strategy<Value = Event> {
        let exits = prop_oneof![
            Just(Exit::Code(0)),
            Just(Exit::Code(71)),
            Just(Exit::Code(1)),
            Just(Exit::Code(143)),
            Just(Exit::Signal(9)),
            Just(Exit::Signal(2)),
        ];
        prop_oneof![
            4 => (0..ranks, exits).prop_map(|(local, exit)| Event::Exited { local, exit }),
            1 => prop_oneof![Just(CTRL_C), Just(TERM)].prop_map(Event::Signalled),
            1 => Just(Event::RunFailed),
            8 => Just(Event::Tick),
        ]
    }

    proptest! {
        /// Whatever happens: asked to end before killed, each once, and finished exactly when all are gone
        /// or cannot be killed; from the first sign of trouble on, that takes grace + 5.7 s at most.
        #[test]
        fn always_ends(events in prop::collection::vec((any_event(4), 0..300u64), 1..60)) {
            let mut watch = Watch::new(4, ms(1000));
            let (mut now, mut all, mut trouble) = (Duration::ZERO, Vec::new(), None);
            let mut gone = [false; 4];
            for (event, wait) in events {
                now += ms(wait);
                match event {
                    Event::Exited { local, .. } if gone[local] => continue,
                    Event::Exited { local, exit } => {
                        gone[local] = true;
                        if !exit.is_success() {
                            trouble.get_or_insert(now);
                        }
                    }
                    Event::Tick => {}
                    _ => _ = trouble.get_or_insert(now),
                }
                all.extend(watch.handle(now, event));
                if let Some(since) = trouble && now > since + ms(1000 + 500 + 500 + 200) {
                    prop_assert!(all.contains(&Action::Kill) || all.contains(&Action::Finished));
                }
            }
            let end = now + ms(10_000);
            all.extend(watch.handle(end, Event::Tick));
            all.extend(watch.handle(end + ms(10_000), Event::Tick));
            let asks = |action: &Action| matches!(action, Action::Stop | Action::Interrupt);
            prop_assert!(all.iter().filter(|a| asks(a)).count() <= 1);
            for action in [Action::Kill, Action::Finished] {
                prop_assert!(all.iter().filter(|a| **a == action).count() <= 1);
            }
            prop_assert_eq!(all.contains(&Action::Finished), trouble.is_some() || gone == [true; 4]);
            if let Some(kill) = all.iter().position(|a| *a == Action::Kill) {
                prop_assert!(all[..kill].iter().any(asks));
            }
        }
    }
}
