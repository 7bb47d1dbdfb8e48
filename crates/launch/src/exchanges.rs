//! Exchanges: every rank contributes a value and receives the values of all ranks. All ranks must make the same
//! exchanges in the same order; if they do not, that is reported at once instead of after a timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::abort::ranks;
use crate::error::printable;

/// One rank's value for an exchange.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub(crate) name: String,
    pub(crate) hex: String,
    pub(crate) timeout: Duration,
}

/// The state of an exchange after a contribution.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ExchangeState {
    Waiting,
    Complete { name: String, hex: Vec<String> },
    Desync(String),
}

struct OpenExchange {
    name: String,
    values: Vec<Option<String>>,
    since: Duration,
    deadline: Duration,
}

impl OpenExchange {
    fn present(&self) -> impl Iterator<Item = u32> {
        self.values.iter().enumerate().filter(|(_, v)| v.is_some()).map(|(rank, _)| rank as u32)
    }

    fn absent(&self) -> impl Iterator<Item = u32> {
        self.values.iter().enumerate().filter(|(_, v)| v.is_none()).map(|(rank, _)| rank as u32)
    }
}

pub(crate) struct Exchanges {
    /// The number of exchanges that each rank has reached.
    counts: Vec<u64>,
    open: BTreeMap<u64, OpenExchange>,
    /// Ranks that have left the run.
    gone: BTreeSet<u32>,
}

impl Exchanges {
    pub(crate) fn new(world_size: u32) -> Exchanges {
        Exchanges { counts: vec![0; world_size as usize], open: BTreeMap::new(), gone: BTreeSet::new() }
    }

    pub(crate) fn put(&mut self, now: Duration, rank: u32, contribution: Contribution) -> ExchangeState {
        let world = self.counts.len();
        let number = self.counts[rank as usize];
        self.counts[rank as usize] += 1;
        let deadline = now.saturating_add(contribution.timeout);
        let exchange = self.open.entry(number).or_insert_with(|| OpenExchange {
            name: contribution.name.clone(),
            values: vec![None; world],
            since: now,
            deadline,
        });
        if exchange.name != contribution.name {
            return ExchangeState::Desync(format!(
                "ranks are out of step: rank {rank} is at `{}`, but {} at `{}`",
                printable(&contribution.name),
                ranks_are(exchange),
                printable(&exchange.name)
            ));
        }
        exchange.deadline = exchange.deadline.min(deadline);
        exchange.values[rank as usize] = Some(contribution.hex);
        if let Some(gone) = self.gone.iter().find(|gone| exchange.values[**gone as usize].is_none()) {
            return ExchangeState::Desync(finished(*gone, exchange));
        }
        if exchange.values.iter().any(Option::is_none) {
            return ExchangeState::Waiting;
        }
        let exchange = self.open.remove(&number).expect("it was found above");
        ExchangeState::Complete { name: exchange.name, hex: exchange.values.into_iter().flatten().collect() }
    }

    /// Records that a rank has left. Returns a message if other ranks are waiting for it.
    pub(crate) fn left(&mut self, rank: u32) -> Option<String> {
        self.gone.insert(rank);
        let waiting = self.open.values().find(|exchange| exchange.values[rank as usize].is_none());
        waiting.map(|exchange| finished(rank, exchange))
    }

    /// A message about an exchange that some ranks have not reached in time.
    pub(crate) fn overdue(&self, now: Duration) -> Option<String> {
        let exchange = self.open.values().find(|exchange| exchange.deadline <= now)?;
        Some(format!(
            "{} did not reach `{}` within {:.1} s of {}",
            ranks(exchange.absent()),
            printable(&exchange.name),
            exchange.deadline.saturating_sub(exchange.since).as_secs_f64(),
            ranks(exchange.present())
        ))
    }
}

fn finished(rank: u32, exchange: &OpenExchange) -> String {
    let name = printable(&exchange.name);
    format!(
        "ranks are out of step: rank {rank} has finished, but {} waiting for it at `{name}`",
        ranks_are(exchange)
    )
}

/// `rank 1 is` or `ranks 1, 2 are`: the ranks that have reached the exchange.
fn ranks_are(exchange: &OpenExchange) -> String {
    let verb = if exchange.present().count() == 1 { "is" } else { "are" };
    format!("{} {verb}", ranks(exchange.present()))
}
