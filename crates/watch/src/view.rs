//! What the user has chosen to see, and how keys change it.

use lockstep_observe::History;

/// A key that means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Next,
    Previous,
    Escape,
    /// Ctrl-C or Ctrl-D.
    Interrupt,
}

/// The numbers of points over which a line can be averaged.
const WINDOWS: [usize; 7] = [1, 5, 10, 20, 50, 100, 200];
/// Metrics that come first, in this order.
const FIRST: [&str; 8] =
    ["loss", "reward", "rewards/margins", "kl", "grad_norm", "learning_rate", "step_seconds", "mfu"];
/// Not worth a chart.
const HIDDEN: [&str; 5] = ["epoch", "tokens_total", "skipped", "slowest_rank", "tokens"];

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// The metric of the first chart; the loss if the run does not have it.
    pub metric: String,
    pub log_scale: bool,
    /// An index of [`WINDOWS`].
    pub(crate) smoothing: usize,
    pub help: bool,
}

impl View {
    /// The number of points over which lines are averaged.
    pub fn window(&self) -> usize {
        WINDOWS[self.smoothing]
    }

    /// The metric of the first chart.
    pub(crate) fn shown_metric<'a>(&'a self, history: &History) -> &'a str {
        if history.column(&self.metric).is_some() { &self.metric } else { FIRST[0] }
    }

    /// Changes what is shown. Returns `false` if the key ends the program.
    pub fn press(&mut self, key: Key, history: &History) -> bool {
        match key {
            Key::Interrupt | Key::Char('q') => return false,
            Key::Escape if self.help => self.help = false,
            Key::Escape => {}
            Key::Char('?' | 'h') => self.help = !self.help,
            Key::Char('l') => self.log_scale = !self.log_scale,
            Key::Char('+' | '=') => self.smoothing = (self.smoothing + 1).min(WINDOWS.len() - 1),
            Key::Char('-' | '_') => self.smoothing = self.smoothing.saturating_sub(1),
            Key::Next => self.move_metric(history, 1),
            Key::Previous => self.move_metric(history, -1),
            Key::Char(_) => {}
        }
        true
    }

    fn move_metric(&mut self, history: &History, by: isize) {
        let all = metrics(history);
        let shown = self.shown_metric(history);
        let at = all.iter().position(|metric| *metric == shown).unwrap_or(0) as isize;
        if !all.is_empty() {
            self.metric = all[(at + by).rem_euclid(all.len() as isize) as usize].to_owned();
        }
    }
}

/// The metrics that have charts, the most important ones first.
fn metrics(history: &History) -> Vec<&str> {
    let columns = history.columns().iter().filter(|column| !column.evaluation);
    let mut all: Vec<&str> =
        columns.map(|column| column.key.as_str()).filter(|key| !HIDDEN.contains(key)).collect();
    // The sort keeps the run's own order among the others.
    all.sort_by_key(|key| FIRST.iter().position(|first| first == key).unwrap_or(FIRST.len()));
    all
}

#[cfg(test)]
mod tests {
    use lockstep_observe::MetricsLine;

    use super::*;

    #[test]
    fn keys_change_the_view() {
        let mut history = History::default();
        let numbers = ["epoch", "mfu", "forward_seconds", "loss"].map(|key| (key.to_owned(), 1.0)).to_vec();
        history.push(MetricsLine { step: 1, numbers, ..MetricsLine::default() });
        let mut view = View::default();
        let mut shown = Vec::new();
        for _ in 0..4 {
            shown.push(view.shown_metric(&history).to_owned());
            assert!(view.press(Key::Next, &history));
        }
        assert_eq!(shown, ["loss", "mfu", "forward_seconds", "loss"]);
        view.press(Key::Previous, &history);
        view.press(Key::Previous, &history);
        assert_eq!(view.shown_metric(&history), "forward_seconds");
        for key in ['l', '+', '+', '-', '?', 'x'] {
            assert!(view.press(Key::Char(key), &history));
        }
        assert!(view.log_scale && view.help && view.window() == 5);
        assert!(view.press(Key::Escape, &history) && !view.help);
        assert!(!view.press(Key::Char('q'), &history) && !view.press(Key::Interrupt, &history));
        (0..20).for_each(|_| assert!(view.press(Key::Char('+'), &history)));
        assert_eq!(view.window(), 200);
        assert!(view.press(Key::Next, &History::default()), "a run without metrics");
    }
}
