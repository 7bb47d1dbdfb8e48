//! Decides when the ranks of a node are stopped, and when they are restarted. Pure: no clock, no processes.

use std::time::Duration;

use crate::cause::STOPPED;
use crate::signals::EndSignal;

/// After a failure: the time from asking ranks to end to killing them. It is short, because they have nothing to
/// save.
const FAILURE_GRACE: Duration = Duration::from_millis(500);
/// A rank that fails because of another may end first. This is the time for the other rank to write its error.
const CAUSE_DELAY: Duration = Duration::from_millis(200);
/// A rank that is asked to stop notifies the others. Ranks that still run this long after it ended are sent SIGTERM.
const OTHERS_STOP: Duration = Duration::from_secs(1);
/// `timeout` sends its signal twice, to the process and to its group. Within this time both count as one request.
const REPEATED: Duration = Duration::from_millis(100);
/// A process that still exists this long after SIGKILL is stuck in the kernel, and is left behind.
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

    /// Whether the rank ended because another rank failed.
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
    /// A rank, by its index on this node, has ended.
    Exited {
        local: usize,
        exit: Exit,
    },
    /// The launcher was asked to stop.
    Signalled(EndSignal),
    /// The rendezvous has aborted the run.
    RunFailed,
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask every running rank to save a checkpoint and end.
    Stop,
    /// Ask every running rank to end at once.
    Interrupt,
    /// Kill every running rank.
    Kill,
    /// No rank is left to supervise.
    Finished,
}

#[derive(Debug)]
pub(crate) struct StopPolicy {
    exits: Vec<Option<Exit>>,
    grace: Duration,
    stopping: Option<StopPlan>,
    /// When the launcher was first asked to stop.
    stop_requested: Option<Duration>,
    finished: bool,
}

/// When running ranks will be asked to end, and when they will be killed.
#[derive(Debug)]
struct StopPlan {
    /// The signal that stopped the launcher or a rank; `None` if a rank has failed.
    signal: Option<EndSignal>,
    ask_at: Option<Duration>,
    kill_at: Duration,
    killed: Option<Duration>,
}

impl StopPolicy {
    pub(crate) fn new(ranks: usize, grace: Duration) -> StopPolicy {
        StopPolicy { exits: vec![None; ranks], grace, stopping: None, stop_requested: None, finished: false }
    }

    /// The signal that made all ranks stop, if one did.
    pub(crate) fn signal(&self) -> Option<EndSignal> {
        self.stopping.as_ref().and_then(|stopping| stopping.signal)
    }

    /// Whether the launcher itself was asked to stop, even if something else ended the ranks.
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
                    // Ctrl-C reaches the ranks too, possibly before the launcher.
                    let early = exit.is_consequence() || matches!(exit, Exit::Signal(1 | 2 | 15));
                    let wait = if early { CAUSE_DELAY } else { Duration::ZERO };
                    self.stop(now + wait, FAILURE_GRACE, None);
                }
            }
            // The rendezvous has notified the ranks, and most of them end by themselves.
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
        let unkillable =
            self.stopping.as_ref().and_then(|s| s.killed).is_some_and(|at| now >= at + UNKILLABLE);
        if !self.finished && (self.exits.iter().all(Option::is_some) || unkillable) {
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
            // The ranks received the same signal, and one of them ended before the launcher handled it.
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

    /// Plans to ask ranks to end at `at`, and to kill them after `grace`. An existing plan can only be moved forward:
    /// when a rank fails while all are stopping, there is nothing left to wait for.
    fn stop(&mut self, at: Duration, grace: Duration, signal: Option<EndSignal>) {
        let kill_at = at + grace;
        let stopping = StopPlan { signal, ask_at: Some(at), kill_at, killed: None };
        let stopping = self.stopping.get_or_insert(stopping);
        stopping.kill_at = stopping.kill_at.min(kill_at);
        stopping.ask_at = stopping.ask_at.map(|before| before.min(at));
    }
}

/// How many times ranks have been restarted, and how many times they may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restarts {
    pub(crate) done: u32,
    pub(crate) most: u32,
}

impl Restarts {
    /// How long to wait before ranks that ended with `code` are restarted; `None` if they are not. An error in the
    /// configuration, the data or the token would only occur again.
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
    fn one_failure_stops_all_ranks() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(
            policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(70) }),
            [Action::Interrupt]
        );
        assert_eq!(policy.handle(ms(499), Event::Tick), []);
        assert_eq!(policy.handle(ms(500), Event::Tick), [Action::Kill]);
        assert_eq!(
            policy.handle(ms(510), Event::Exited { local: 0, exit: Exit::Signal(9) }),
            [Action::Finished]
        );
        assert_eq!(policy.signal(), None);
    }

    #[test]
    fn a_consequence_leaves_time_for_its_cause() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(71) }), []);
        assert_eq!(policy.handle(ms(199), Event::Tick), []);
        assert_eq!(policy.handle(ms(200), Event::Tick), [Action::Interrupt]);
    }

    #[test]
    fn a_second_signal_kills_the_ranks() {
        let mut policy = StopPolicy::new(1, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(policy.handle(ms(50), Event::Signalled(TERM)), [], "sent twice at once");
        assert_eq!(policy.handle(ms(1000), Event::Tick), []);
        assert_eq!(policy.handle(ms(1001), Event::Signalled(TERM)), [Action::Kill]);
        assert_eq!(policy.signal(), Some(TERM));
        let mut policy = StopPolicy::new(1, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(policy.handle(ms(50), Event::Signalled(CTRL_C)), [Action::Kill]);
        let mut policy = StopPolicy::new(1, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Signalled(CTRL_C)), [Action::Interrupt]);
        assert_eq!(policy.handle(ms(200), Event::Signalled(CTRL_C)), [Action::Kill]);
        assert_eq!(policy.signal(), Some(CTRL_C));
    }

    #[test]
    fn ranks_get_the_grace_period_to_stop() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(policy.handle(ms(100), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(policy.handle(ms(4999), Event::Tick), []);
        assert_eq!(policy.handle(ms(5000), Event::Tick), [Action::Kill]);
        // If one rank fails, the others cannot save any more.
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Signalled(TERM)), [Action::Stop]);
        assert_eq!(policy.handle(ms(100), Event::Exited { local: 1, exit: Exit::Code(73) }), []);
        assert_eq!(policy.handle(ms(600), Event::Tick), [Action::Kill]);
        assert_eq!(policy.signal(), Some(TERM));
    }

    /// If one rank is asked to stop, all ranks stop with it. That is not a failure.
    #[test]
    fn a_signal_to_one_rank_stops_all_ranks() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(policy.signal(), Some(TERM));
        assert!(!policy.stop_requested());
        // The first signal to the launcher does not count as a second request.
        assert_eq!(policy.handle(ms(1), Event::Signalled(TERM)), [Action::Stop]);
        assert!(policy.stop_requested());
        assert_eq!(
            policy.handle(ms(300), Event::Exited { local: 0, exit: Exit::Code(143) }),
            [Action::Finished]
        );
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(143) }), []);
        assert_eq!(policy.handle(ms(1000), Event::Tick), [Action::Stop]);
        assert_eq!(policy.handle(ms(6000), Event::Tick), [Action::Kill]);
    }

    /// A signal that arrives while ranks are being stopped after a failure is recorded.
    #[test]
    fn a_signal_after_a_failure_is_recorded() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(
            policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Code(70) }),
            [Action::Interrupt]
        );
        assert_eq!(policy.handle(ms(10), Event::Signalled(TERM)), [Action::Kill]);
        assert_eq!((policy.signal(), policy.stop_requested()), (None, true));
    }

    /// A terminal sends Ctrl-C to all processes of a job.
    #[test]
    fn a_signal_that_reached_the_ranks_first() {
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Signal(2) }), []);
        assert_eq!(policy.handle(ms(1), Event::Signalled(CTRL_C)), [Action::Interrupt]);
        assert_eq!(policy.signal(), Some(CTRL_C));
        assert_eq!(
            policy.handle(ms(2), Event::Exited { local: 0, exit: Exit::Signal(2) }),
            [Action::Finished]
        );
        // A rank that SIGTERM killed before it handled signals has failed, unless the whole run was asked to stop.
        let mut policy = StopPolicy::new(2, ms(5000));
        assert_eq!(policy.handle(ms(0), Event::Exited { local: 1, exit: Exit::Signal(15) }), []);
        assert_eq!(policy.handle(ms(200), Event::Tick), [Action::Interrupt]);
        assert_eq!(policy.signal(), None);
    }

    #[test]
    fn restarts_back_off_and_stop_at_the_limit() {
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
        /// For any sequence of events: ranks are asked to end before they are killed, each at most once, and the
        /// policy finishes exactly when all ranks have ended or cannot be killed. After the first failure or signal
        /// this takes at most grace + 5.7 s.
        #[test]
        fn always_ends(events in prop::collection::vec((any_event(4), 0..300u64), 1..60)) {
            let mut policy = StopPolicy::new(4, ms(1000));
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
                all.extend(policy.handle(now, event));
                if let Some(since) = trouble && now > since + ms(1000 + 500 + 500 + 200) {
                    prop_assert!(all.contains(&Action::Kill) || all.contains(&Action::Finished));
                }
            }
            let end = now + ms(10_000);
            all.extend(policy.handle(end, Event::Tick));
            all.extend(policy.handle(end + ms(10_000), Event::Tick));
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
