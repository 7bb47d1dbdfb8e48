//! Exchanges: every rank puts in a value and gets everybody's. All ranks make the same exchanges in the
//! same order; where they do not, that is told instead of waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::abort::ranks;
use crate::error::printable;

/// A rank's part of an exchange.
#[derive(Debug)]
pub(crate) struct Put {
    pub(crate) name: String,
    pub(crate) hex: String,
    pub(crate) timeout: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    Waiting,
    All { name: String, hex: Vec<String> },
    Desync(String),
}

struct Round {
    name: String,
    values: Vec<Option<String>>,
    since: Duration,
    deadline: Duration,
}

impl Round {
    fn here(&self) -> impl Iterator<Item = u32> {
        self.values.iter().enumerate().filter(|(_, v)| v.is_some()).map(|(rank, _)| rank as u32)
    }

    fn absent(&self) -> impl Iterator<Item = u32> {
        self.values.iter().enumerate().filter(|(_, v)| v.is_none()).map(|(rank, _)| rank as u32)
    }
}

pub(crate) struct Rounds {
    /// How many exchanges each rank has come to.
    counts: Vec<u64>,
    open: BTreeMap<u64, Round>,
    gone: BTreeSet<u32>,
}

impl Rounds {
    pub(crate) fn new(world_size: u32) -> Rounds {
        Rounds { counts: vec![0; world_size as usize], open: BTreeMap::new(), gone: BTreeSet::new() }
    }

    pub(crate) fn put(&mut self, now: Duration, rank: u32, put: Put) -> Settled {
        let world = self.counts.len();
        let number = self.counts[rank as usize];
        self.counts[rank as usize] += 1;
        let deadline = now.saturating_add(put.timeout);
        let round = self.open.entry(number).or_insert_with(|| Round {
            name: put.name.clone(),
            values: vec![None; world],
            since: now,
            deadline,
        });
        if round.name != put.name {
            return Settled::Desync(format!(
                "ranks are not doing the same: rank {rank} has come to `{}`, {} to `{}`",
                printable(&put.name),
                ranks(round.here()),
                printable(&round.name)
            ));
        }
        round.deadline = round.deadline.min(deadline);
        round.values[rank as usize] = Some(put.hex);
        if let Some(gone) = self.gone.iter().find(|gone| round.values[**gone as usize].is_none()) {
            return Settled::Desync(finished(*gone, round));
        }
        if round.values.iter().any(Option::is_none) {
            return Settled::Waiting;
        }
        let round = self.open.remove(&number).expect("it was just there");
        Settled::All { name: round.name, hex: round.values.into_iter().flatten().collect() }
    }

    /// A rank has finished. The complaint, where others wait for it.
    pub(crate) fn left(&mut self, rank: u32) -> Option<String> {
        self.gone.insert(rank);
        let waiting = self.open.values().find(|round| round.values[rank as usize].is_none());
        waiting.map(|round| finished(rank, round))
    }

    /// The complaint about an exchange that some ranks have not come to.
    pub(crate) fn overdue(&self, now: Duration) -> Option<String> {
        let round = self.open.values().find(|round| round.deadline <= now)?;
        Some(format!(
            "{} did not come to `{}` within {:.0} s of {}",
            ranks(round.absent()),
            printable(&round.name),
            now.saturating_sub(round.since).as_secs_f64(),
            ranks(round.here())
        ))
    }
}

fn finished(rank: u32, round: &Round) -> String {
    let (waits, name) = (ranks(round.here()), printable(&round.name));
    let verb = if round.here().count() == 1 { "waits" } else { "wait" };
    format!("ranks are not doing the same: rank {rank} has finished, {waits} {verb} for it in `{name}`")
}
