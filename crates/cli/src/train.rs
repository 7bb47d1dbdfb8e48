//! `lockstep train`

use std::io::IsTerminal;

use lockstep_core::Elems;
use lockstep_observe::{PlainLines, Progress, TerminalBar};

use crate::args::Run;
use crate::host;
use crate::report::{self, Failure, say};

pub(crate) fn run(args: &Run) -> Result<(), Failure> {
    let (config, text) = report::load(&args.settings, &[])?;
    let mut prepared = lockstep_train::prepare(&config, lockstep_core::Rank(0)).map_err(boxed)?;
    prepared.peak_memory = host::peak_memory;
    let mut progress: Box<dyn Progress> = if std::io::stderr().is_terminal() {
        Box::new(TerminalBar::new())
    } else {
        Box::new(PlainLines::new(std::io::stdout()))
    };
    let stats = prepared.dataset.stats();
    let plan = &prepared.plan;
    let model = &plan.input.models[0];
    say(&format!(
        "{}, {} parameters | {} {} on {} threads | memory {}",
        model.shape.architecture.class_name(),
        Elems(model.params()),
        plan.input.storage,
        lockstep_train::strategy_name(config.plan.strategy),
        prepared.num_threads,
        plan.process_bytes(),
    ));
    say(&format!("{} documents in {} rows, {} tokens", stats.docs, stats.rows, stats.tokens));
    if stats.skipped > 0 {
        let rows = if stats.skipped == 1 { "bad row" } else { "bad rows" };
        say(&format!("{} {rows} skipped; the first: {}", stats.skipped, first_skipped(&prepared.dataset)));
    }
    let outcome = lockstep_train::train(&config, &text, prepared, None, &mut *progress).map_err(boxed)?;
    drop(progress);
    say(&format!("model in {}", outcome.model_dir.display()));
    if let Some(checkpoint) = outcome.checkpoint {
        say(&format!("checkpoint in {}", checkpoint.display()));
    }
    if let Some(memory) = outcome.memory {
        say(&format!("peak memory {} (planned {})", memory.peak, memory.planned()));
    }
    Ok(())
}

fn first_skipped(dataset: &lockstep_data::Dataset) -> String {
    dataset
        .skipped()
        .first()
        .map_or_else(String::new, |s| format!("{} row {}: {}", s.file.display(), s.row, s.fault))
}

pub(crate) fn boxed(error: lockstep_train::TrainError) -> Failure {
    Box::new(error)
}
