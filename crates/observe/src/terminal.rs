//! A progress bar on a terminal.
//!
//! It is drawn on stderr, to keep stdout clean, and only if stderr is a terminal; otherwise use `PlainLines`. Fields
//! have fixed widths, so that nothing moves from step to step. If the terminal is too narrow the line is truncated at
//! the right, where the least important fields are. At the end the bar is replaced by a one-line summary.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::progress::Progress;
use crate::record::{StepRecord, log_lines};
use crate::time::human_duration;

/// Redraws per second at most.
const REDRAWS_PER_SECOND: u8 = 10;

/// A progress bar on stderr.
#[derive(Debug)]
pub struct TerminalBar {
    bar: ProgressBar,
    started: Instant,
    first_step: u64,
    total_steps: u64,
    first: Option<StepRecord>,
    last: Option<StepRecord>,
}

impl Default for TerminalBar {
    fn default() -> Self {
        Self::new()
    }
}

impl TerminalBar {
    pub fn new() -> Self {
        Self::on(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND))
    }

    fn on(target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(None, target);
        bar.set_style(running(1));
        TerminalBar { bar, started: Instant::now(), first_step: 1, total_steps: 0, first: None, last: None }
    }

    /// The estimated time for the remaining steps, at the speed so far.
    fn remaining_seconds(&self, record: &StepRecord) -> f64 {
        let taken = record.step.saturating_sub(self.first_step) + 1;
        let left = self.total_steps.saturating_sub(record.step);
        self.started.elapsed().as_secs_f64() / taken as f64 * left as f64
    }

    fn summary(&self, seconds: f64) -> String {
        let (Some(first), Some(last)) = (&self.first, &self.last) else {
            return "no steps were run".into();
        };
        let taken = last.step.saturating_sub(self.first_step) + 1;
        let tokens = last.tokens_total.saturating_sub(first.tokens_total) as f64;
        // The first total already includes the tokens of the first step, so measure from the end of that step.
        let speed = tokens / (seconds - first.step_seconds);
        let speed =
            if taken > 1 && speed.is_finite() && speed > 0.0 { speed } else { last.tokens_per_second };
        format!(
            "step {}/{} | {} (initially {:.4}) | {taken} steps in {} | {speed:.0} tok/s",
            last.step,
            self.total_steps,
            last.loss_text(),
            first.loss,
            human_duration(seconds),
        )
    }
}

/// The style of a running bar: the bar, the step with `digits` digits, and the message.
fn running(digits: usize) -> ProgressStyle {
    style(&format!("{{bar:12.cyan/dim}} {{pos:>{digits}}}/{{len}} | {{wide_msg}}"))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is valid")
}

impl Progress for TerminalBar {
    fn start(&mut self, first_step: u64, total_steps: u64) {
        self.started = Instant::now();
        (self.first_step, self.total_steps) = (first_step, total_steps);
        self.bar.set_style(running(total_steps.to_string().len()));
        self.bar.set_length(total_steps);
        self.bar.set_position(first_step.saturating_sub(1));
    }

    fn step(&mut self, record: &StepRecord) {
        self.first.get_or_insert_with(|| record.clone());
        self.last = Some(record.clone());
        self.bar.set_message(format!(
            "{:<14}{} | {:>7} left | {:>6.0} tok/s | lr {:.2e}",
            record.loss_text(),
            record.shown_metrics(),
            human_duration(self.remaining_seconds(record)),
            record.tokens_per_second,
            record.learning_rate,
        ));
        self.bar.set_position(record.step);
    }

    fn note(&mut self, text: &str) {
        log_lines(text).for_each(|line| self.bar.println(line));
    }

    fn finish(&mut self) {
        self.bar.set_style(style("{msg}"));
        self.bar.abandon_with_message(self.summary(self.started.elapsed().as_secs_f64()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{RECORD, parsed};

    #[test]
    fn the_bar_ends_as_a_one_line_summary() {
        let mut bar = TerminalBar::on(ProgressDrawTarget::hidden());
        bar.start(12, 13);
        bar.note("a note");
        bar.step(&RECORD);
        let message = bar.bar.message();
        assert!(message.starts_with("loss: 3.456789 | "), "{message}");
        assert!(message.ends_with(" left |   2345 tok/s | lr 3.00e-4"), "{message}");
        assert!(message.len() <= 57, "next to the bar it must fit into 80 columns: {message}");
        bar.step(&StepRecord { step: 13, loss: 2.5, tokens_total: 26576, ..RECORD });
        assert_eq!(bar.bar.position(), 13);
        let summary = bar.summary(2.873);
        assert_eq!(
            summary,
            "step 13/13 | loss: 2.500000 (initially 3.4568) | 2 steps in 2.87 s | 1000 tok/s"
        );
        assert_eq!(parsed(&summary), Some((13, 2.5)));
        bar.finish();
        assert!(bar.bar.is_finished());
    }

    #[test]
    fn a_run_without_steps_has_a_summary() {
        let mut bar = TerminalBar::on(ProgressDrawTarget::hidden());
        bar.start(1, 0);
        bar.finish();
        assert_eq!(bar.bar.message(), "no steps were run");
    }
}
