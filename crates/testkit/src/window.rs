//! A window of micro-batches with the plain causal-LM objective.

use lockstep_engine::{Coefficients, Driver, Engine, MicroBatch, Outputs};
use lockstep_plan::ModelId;

/// One micro-batch.
#[derive(Clone, Debug, Default)]
pub struct Micro {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub weights: Vec<f32>,
    pub positions: Vec<u32>,
    pub cu_seqlens: Vec<u32>,
    /// Which sample each document is: its place, unless a test says otherwise.
    pub samples: Vec<u32>,
}

impl Micro {
    pub fn new(tokens: Vec<u32>, targets: Vec<u32>, weights: Vec<f32>, cu_seqlens: Vec<u32>) -> Micro {
        let positions = cu_seqlens.windows(2).flat_map(|w| 0..w[1] - w[0]).collect();
        let samples = (1..cu_seqlens.len() as u32).collect();
        Micro { tokens, targets, weights, positions, cu_seqlens, samples }
    }

    /// Documents of random tokens, all supervised.
    pub fn random(lengths: &[usize], vocab: usize, seed: u64) -> Micro {
        use lockstep_core::rng::{Purpose, Stream};
        let total: usize = lengths.iter().sum();
        let draw = |purpose_b| {
            let stream = Stream::new(seed, Purpose::Sampling, 0, purpose_b);
            (0..total as u32).map(|i| stream.below(i, vocab as u64) as u32).collect::<Vec<_>>()
        };
        let mut cu = vec![0];
        for len in lengths {
            cu.push(cu[cu.len() - 1] + *len as u32);
        }
        Micro::new(draw(0), draw(1), vec![1.0; total], cu)
    }

    /// The given documents of this batch, in the given order.
    pub fn select(&self, docs: &[usize]) -> Micro {
        let mut out = Micro { cu_seqlens: vec![0], ..Micro::default() };
        for doc in docs {
            let at = self.cu_seqlens[*doc] as usize..self.cu_seqlens[*doc + 1] as usize;
            out.tokens.extend(&self.tokens[at.clone()]);
            out.targets.extend(&self.targets[at.clone()]);
            out.weights.extend(&self.weights[at.clone()]);
            out.positions.extend(&self.positions[at]);
            out.cu_seqlens.push(out.tokens.len() as u32);
            out.samples.push(self.samples[*doc]);
        }
        out
    }
}

/// Drives a step: coefficient −w/N, and remembers the log-probabilities.
#[derive(Clone, Debug)]
pub struct Window {
    pub micros: Vec<Micro>,
    pub denominator: f64,
    pub log_probs: Vec<Vec<f32>>,
}

impl Window {
    pub fn new(micros: Vec<Micro>) -> Window {
        let denominator = micros.iter().flat_map(|m| &m.weights).map(|w| f64::from(*w)).sum();
        let log_probs = micros.iter().map(|m| vec![0.0; m.tokens.len()]).collect();
        Window { micros, denominator, log_probs }
    }

    pub fn loss(&self) -> f64 {
        let all = self.micros.iter().zip(&self.log_probs).flat_map(|(m, l)| m.weights.iter().zip(l));
        -all.map(|(w, l)| f64::from(*w) * f64::from(*l)).sum::<f64>() / self.denominator
    }
}

impl Driver for Window {
    fn batch(&self, micro: u32) -> MicroBatch<'_> {
        let m = &self.micros[micro as usize];
        MicroBatch {
            tokens: &m.tokens,
            targets: &m.targets,
            positions: &m.positions,
            cu_seqlens: &m.cu_seqlens,
            samples: &m.samples,
        }
    }

    fn coefficients(&mut self, micro: u32, _: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        for (out, weight) in out.log_probs().iter_mut().zip(&self.micros[micro as usize].weights) {
            *out = (-f64::from(*weight) / self.denominator) as f32;
        }
    }

    fn outputs(&mut self, micro: u32, outputs: Outputs<'_>) {
        self.log_probs[micro as usize].copy_from_slice(outputs.log_probs());
    }
}

/// The log-probability of every target of a batch, with the parameters of the first model as they are.
pub fn score(engine: &mut Engine, micro: &Micro) -> Vec<f32> {
    score_with(engine, ModelId::FIRST, micro)
}

/// As [`score`], with those of any model.
pub fn score_with(engine: &mut Engine, model: ModelId, micro: &Micro) -> Vec<f32> {
    let mut all = Vec::new();
    let batch = MicroBatch {
        tokens: &micro.tokens,
        targets: &micro.targets,
        positions: &micro.positions,
        cu_seqlens: &micro.cu_seqlens,
        samples: &[],
    };
    engine
        .model_mut(model)
        .score(batch, &mut |outputs| all.extend_from_slice(outputs.log_probs()))
        .expect("a batch within bounds");
    all
}
