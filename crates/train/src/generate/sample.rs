//! From logits to a token: the choices of Hugging Face's `generate`, in its order.
//!
//! Repetition penalty, temperature, top-k, top-p, min-p, then one draw. The number drawn is a function of
//! (seed, sample, position), so a sample does not depend on what else runs beside it.

use lockstep_core::rng::{Purpose, RngStream};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest.
    pub temperature: f32,
    /// 0: all.
    pub top_k: usize,
    /// 1: all.
    pub top_p: f32,
    /// 0: all. Else tokens at least this likely, as a share of the likeliest's probability.
    pub min_p: f32,
    /// 1: none. Above it, what already occurred becomes less likely.
    pub repetition_penalty: f32,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 42 }
    }
}

/// Candidates that top-p sorts at first; more only if they are not enough.
const SORTED_FIRST: usize = 256;

/// Draws tokens; keeps its room between calls.
#[derive(Debug)]
pub(super) struct Sampler {
    how: Sampling,
    scores: Vec<f32>,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    pub(super) fn new(how: Sampling) -> Sampler {
        Sampler { how, scores: Vec::new(), candidates: Vec::new() }
    }

    /// The token after `history`, which is sample `sample` of the run.
    pub(super) fn draw(&mut self, logits: &[f32], history: &[u32], sample: u32) -> u32 {
        let penalised = self.how.repetition_penalty != 1.0;
        if penalised {
            self.penalise(logits, history);
        }
        let scores = if penalised { &self.scores[..] } else { logits };
        if self.how.temperature == 0.0 {
            return likeliest(scores);
        }
        self.candidates.clear();
        let cold = 1.0 / self.how.temperature;
        self.candidates.extend(scores.iter().zip(0..).map(|(score, id)| (score * cold, id)));
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        let [word, _, _, _] =
            RngStream::new(self.how.seed, Purpose::Sampling, 0, sample).block(history.len() as u32);
        pick(&self.candidates, f64::from(word) / 4_294_967_296.0)
    }

    fn penalise(&mut self, logits: &[f32], history: &[u32]) {
        self.scores.clear();
        self.scores.extend_from_slice(logits);
        for id in history {
            // From the logits themselves: a token that occurred twice is not punished twice.
            let (at, penalty) = (*id as usize, self.how.repetition_penalty);
            self.scores[at] = if logits[at] < 0.0 { logits[at] * penalty } else { logits[at] / penalty };
        }
    }

    /// Those at least as likely as the k-th; ties stay.
    fn keep_top_k(&mut self) {
        let k = self.how.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, descending);
            let least = self.candidates[k - 1].0;
            self.candidates.retain(|(score, _)| *score >= least);
        }
    }

    /// The likeliest, until together they have the probability `top_p`.
    fn keep_top_p(&mut self) {
        let p = f64::from(self.how.top_p);
        if p >= 1.0 {
            return;
        }
        let largest = self.candidates.iter().fold(f32::NEG_INFINITY, |m, (score, _)| m.max(*score));
        let weight = |score: f32| f64::from(score - largest).exp();
        let total: f64 = self.candidates.iter().map(|(score, _)| weight(*score)).sum();
        let mut sorted = SORTED_FIRST;
        loop {
            sorted = sorted.min(self.candidates.len());
            if sorted < self.candidates.len() {
                self.candidates.select_nth_unstable_by(sorted, descending);
            }
            self.candidates[..sorted].sort_unstable_by(descending);
            let mut sum = 0.0;
            let enough = self.candidates[..sorted].iter().position(|(score, _)| {
                sum += weight(*score) / total;
                sum >= p
            });
            match enough {
                Some(last) => return self.candidates.truncate(last + 1),
                None if sorted == self.candidates.len() => return,
                None => sorted *= 8,
            }
        }
    }

    fn keep_min_p(&mut self) {
        if self.how.min_p > 0.0 {
            let largest = self.candidates.iter().fold(f32::NEG_INFINITY, |m, (score, _)| m.max(*score));
            let least = largest + self.how.min_p.ln();
            self.candidates.retain(|(score, _)| *score >= least);
        }
    }
}

/// Likelier first; of equals, the smaller id.
fn descending(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Of equals, the first.
fn likeliest(scores: &[f32]) -> u32 {
    let mut best = 0;
    for (i, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = i;
        }
    }
    best as u32
}

/// Where `at`, in [0, 1), falls among the candidates' probabilities.
fn pick(candidates: &[(f32, u32)], at: f64) -> u32 {
    let largest = candidates.iter().fold(f32::NEG_INFINITY, |m, (score, _)| m.max(*score));
    let weight = |score: f32| f64::from(score - largest).exp();
    let total: f64 = candidates.iter().map(|(score, _)| weight(*score)).sum();
    let mut left = at * total;
    for (score, id) in candidates {
        left -= weight(*score);
        if left < 0.0 {
            return *id;
        }
    }
    // Rounding left a crumb: the last one that has a weight at all.
    candidates.iter().rev().find(|(score, _)| weight(*score) > 0.0).map_or(0, |(_, id)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -1.0, 3.0, 2.0];

    /// Which tokens are ever drawn, and how often each.
    fn drawn(how: Sampling) -> Vec<usize> {
        let mut counts = vec![0; LOGITS.len()];
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, ..how });
        for sample in 0..4000 {
            counts[sampler.draw(&LOGITS, &[], sample) as usize] += 1;
        }
        counts
    }

    #[test]
    fn the_likeliest_and_what_a_penalty_makes_of_it() {
        let mut greedy = Sampler::new(Sampling::default());
        assert_eq!(greedy.draw(&LOGITS, &[], 0), 1);
        let mut penalised = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::default() });
        assert_eq!(penalised.draw(&LOGITS, &[1, 1], 0), 3);
        assert_eq!(penalised.draw(&LOGITS, &[1, 3, 2], 0), 4);
        let below_zero = [-2.0, -1.0];
        assert_eq!(penalised.draw(&below_zero, &[1], 0), 0);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let weights: Vec<f64> = LOGITS.iter().map(|l| f64::from(*l).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (count, weight) in drawn(Sampling::default()).iter().zip(&weights) {
            let (share, wanted) = (*count as f64 / 4000.0, weight / total);
            assert!((share - wanted).abs() < 0.03, "{share} for {wanted}");
        }
    }

    #[test]
    fn cuts_keep_what_they_should() {
        let kept = |how| drawn(how).iter().map(|count| *count > 0).collect::<Vec<_>>();
        let default = Sampling::default();
        assert_eq!(kept(Sampling { top_k: 1, ..default }), [false, true, false, true, false], "a tie");
        assert_eq!(kept(Sampling { top_k: 3, ..default }), [false, true, false, true, true]);
        // 0.40, 0.40, 0.15, 0.05, 0.01
        assert_eq!(kept(Sampling { top_p: 0.3, ..default }), [false, true, false, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.9, ..default }), [false, true, false, true, true]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..default }), [false, true, false, true, true]);
    }

    #[test]
    fn a_large_vocabulary_is_cut_like_a_small_one() {
        // Flat: top-p must go beyond what it sorts at first.
        let logits = vec![0.0f32; 5000];
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::default() });
        let drawn: Vec<u32> = (0..500).map(|s| sampler.draw(&logits, &[], s)).collect();
        assert!(drawn.iter().all(|id| *id < 2501) && drawn.iter().any(|id| *id > 2000));
    }
}
