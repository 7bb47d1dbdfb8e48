//! `lockstep train`

use std::io::IsTerminal;

use lockstep_core::Elems;
use lockstep_observe::{PlainLines, Progress, TerminalBar};

use crate::args::Run;
use crate::report::{self, Failure};

pub(crate) fn run(args: &Run) -> Result<(), Failure> {
    let (config, text) = report::load(&args.settings, &[])?;
    let prepared = lockstep_train::prepare(&config).map_err(boxed)?;
    let mut progress: Box<dyn Progress> = if std::io::stderr().is_terminal() {
        Box::new(TerminalBar::new())
    } else {
        Box::new(PlainLines::new(std::io::stdout()))
    };
    let stats = prepared.dataset.stats();
    let plan = &prepared.plan;
    let model = &plan.input.models[0];
    println!(
        "{} {} parameters | {} documents in {} rows, {} tokens | {} {} on {} threads | memory {}",
        Elems(model.params()),
        model.shape.architecture.class_name(),
        stats.docs,
        stats.rows,
        stats.tokens,
        plan.input.storage,
        format!("{:?}", config.plan.strategy).to_lowercase(),
        prepared.num_threads,
        plan.process_bytes(),
    );
    if stats.skipped > 0 {
        println!("{} bad rows skipped; the first: {}", stats.skipped, first_skipped(&prepared.dataset));
    }
    let outcome = lockstep_train::train(&config, &text, prepared, &mut *progress).map_err(boxed)?;
    drop(progress);
    println!("model in {}", outcome.model_dir.display());
    if let Some(checkpoint) = outcome.checkpoint {
        println!("checkpoint in {}", checkpoint.display());
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
