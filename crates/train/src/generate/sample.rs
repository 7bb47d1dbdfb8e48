//! Samples a token from logits, with the parameters of Hugging Face's `generate` in the same order.
//!
//! The order is repetition penalty, temperature, top-k, top-p, min-p, then one sample. The random number is a
//! function of (seed, sample, position), so a sequence does not depend on others in the batch.

use lockstep_core::rng::{Purpose, RngStream};
use lockstep_device::Isa;
use lockstep_ops::sampling;

/// Sampling parameters, as in Hugging Face's `GenerationConfig`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy decoding.
    pub temperature: f32,
    /// 0: off.
    pub top_k: usize,
    /// 1: off.
    pub top_p: f32,
    /// 0: off. Otherwise the minimum probability of a token, relative to the most likely one.
    pub min_p: f32,
    /// 1: off. Above 1, tokens that already occurred become less likely.
    pub repetition_penalty: f32,
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 42,
        }
    }
}

/// The number of candidates that top-p sorts first. It sorts more only if they are not enough.
const SORTED_FIRST: usize = 256;

/// Samples tokens, reusing its buffers.
#[derive(Debug)]
pub(super) struct Sampler {
    params: SamplingParams,
    isa: Isa,
    scores: Vec<f32>,
    weights: Vec<f32>,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    pub(super) fn new(params: SamplingParams) -> Sampler {
        let isa = Isa::detect();
        Sampler { params, isa, scores: Vec::new(), weights: Vec::new(), candidates: Vec::new() }
    }

    /// Samples the token after `history`. `sample` is the index of the sequence.
    pub(super) fn sample(&mut self, logits: &[f32], history: &[u32], sample: u32) -> u32 {
        let penalized = self.params.repetition_penalty != 1.0;
        if penalized {
            self.penalize(logits, history);
        }
        let scores = if penalized { &self.scores[..] } else { logits };
        if self.params.temperature == 0.0 {
            return argmax(scores);
        }
        let [word, _, _, _] =
            RngStream::new(self.params.seed, Purpose::Sampling, 0, sample).block(history.len() as u32);
        let at = f64::from(word) / 4_294_967_296.0;
        let inverse_temperature = 1.0 / self.params.temperature;
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            return sampling::pick(self.isa, scores, inverse_temperature, at, &mut self.weights) as u32;
        }
        self.candidates.clear();
        self.candidates.extend(scores.iter().zip(0..).map(|(score, id)| (score * inverse_temperature, id)));
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        pick(&self.candidates, at)
    }

    fn penalize(&mut self, logits: &[f32], history: &[u32]) {
        self.scores.clear();
        self.scores.extend_from_slice(logits);
        for id in history {
            // Start from the original logits, so that a token that occurred twice is penalized once.
            let (at, penalty) = (*id as usize, self.params.repetition_penalty);
            self.scores[at] = if logits[at] < 0.0 { logits[at] * penalty } else { logits[at] / penalty };
        }
    }

    /// Keeps the candidates that are at least as likely as the k-th, including ties.
    fn keep_top_k(&mut self) {
        let k = self.params.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, descending);
            let least = self.candidates[k - 1].0;
            self.candidates.retain(|(score, _)| *score >= least);
        }
    }

    /// Keeps the most likely candidates until their total probability reaches `top_p`.
    fn keep_top_p(&mut self) {
        let p = f64::from(self.params.top_p);
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
        if self.params.min_p > 0.0 {
            let largest = self.candidates.iter().fold(f32::NEG_INFINITY, |m, (score, _)| m.max(*score));
            let least = largest + self.params.min_p.ln();
            self.candidates.retain(|(score, _)| *score >= least);
        }
    }
}

/// Sorts by descending score, then by id.
fn descending(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The index of the largest score; the first one of ties.
fn argmax(scores: &[f32]) -> u32 {
    let mut best = 0;
    for (i, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = i;
        }
    }
    best as u32
}

/// The candidate at the point `at`, in [0, 1), of the cumulative distribution.
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
    // Rounding can leave a small remainder: return the last candidate with a nonzero weight.
    candidates.iter().rev().find(|(score, _)| weight(*score) > 0.0).map_or(0, |(_, id)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -1.0, 3.0, 2.0];

    /// How often each token is sampled.
    fn counts(params: SamplingParams) -> Vec<usize> {
        let mut counts = vec![0; LOGITS.len()];
        let mut sampler = Sampler::new(SamplingParams { temperature: 1.0, ..params });
        for sample in 0..4000 {
            counts[sampler.sample(&LOGITS, &[], sample) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_decoding_with_and_without_a_repetition_penalty() {
        let mut greedy = Sampler::new(SamplingParams::default());
        assert_eq!(greedy.sample(&LOGITS, &[], 0), 1);
        let mut penalized =
            Sampler::new(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() });
        assert_eq!(penalized.sample(&LOGITS, &[1, 1], 0), 3);
        assert_eq!(penalized.sample(&LOGITS, &[1, 3, 2], 0), 4);
        let below_zero = [-2.0, -1.0];
        assert_eq!(penalized.sample(&below_zero, &[1], 0), 0);
    }

    #[test]
    fn frequencies_match_the_probabilities() {
        let weights: Vec<f64> = LOGITS.iter().map(|l| f64::from(*l).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts(SamplingParams::default()).iter().zip(&weights) {
            let (frequency, expected) = (*count as f64 / 4000.0, weight / total);
            assert!((frequency - expected).abs() < 0.03, "{frequency} for {expected}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_right_tokens() {
        let kept = |params| counts(params).iter().map(|count| *count > 0).collect::<Vec<_>>();
        let default = SamplingParams::default();
        assert_eq!(kept(SamplingParams { top_k: 1, ..default }), [false, true, false, true, false], "a tie");
        assert_eq!(kept(SamplingParams { top_k: 3, ..default }), [false, true, false, true, true]);
        // 0.40, 0.40, 0.15, 0.05, 0.01
        assert_eq!(kept(SamplingParams { top_p: 0.3, ..default }), [false, true, false, false, false]);
        assert_eq!(kept(SamplingParams { top_p: 0.9, ..default }), [false, true, false, true, true]);
        assert_eq!(kept(SamplingParams { min_p: 0.3, ..default }), [false, true, false, true, true]);
    }

    #[test]
    fn top_p_works_on_a_large_flat_vocabulary() {
        // With a flat distribution top-p must sort more candidates than it does first.
        let logits = vec![0.0f32; 5000];
        let mut sampler =
            Sampler::new(SamplingParams { temperature: 1.0, top_p: 0.5, ..SamplingParams::default() });
        let sampled: Vec<u32> = (0..500).map(|s| sampler.sample(&logits, &[], s)).collect();
        assert!(sampled.iter().all(|id| *id < 2501) && sampled.iter().any(|id| *id > 2000));
    }
}
