//! Test batches, and a step driver with the plain causal-LM objective.

use lockstep_engine::{Coefficients, Engine, MicroBatch, Outputs, StepDriver};
use lockstep_plan::ModelId;

/// One micro-batch.
#[derive(Clone, Debug, Default)]
pub struct TestBatch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub weights: Vec<f32>,
    pub positions: Vec<u32>,
    pub cu_seqlens: Vec<u32>,
    /// The data set index of each document: its position in the batch, counted from 1, unless a test sets it.
    pub samples: Vec<u32>,
    /// How many of its first tokens each document has in common with the one before it; empty: not known.
    pub shared: Vec<u32>,
    /// Whether the head runs only where `weights` are not zero.
    pub selects: bool,
}

impl TestBatch {
    pub fn new(tokens: Vec<u32>, targets: Vec<u32>, weights: Vec<f32>, cu_seqlens: Vec<u32>) -> TestBatch {
        let positions = cu_seqlens.windows(2).flat_map(|w| 0..w[1] - w[0]).collect();
        let samples = (1..cu_seqlens.len() as u32).collect();
        let (shared, selects) = (Vec::new(), false);
        TestBatch { tokens, targets, weights, positions, cu_seqlens, samples, shared, selects }
    }

    /// Documents of random tokens, all with weight 1.
    pub fn random(lengths: &[usize], vocab: usize, seed: u64) -> TestBatch {
        use lockstep_core::rng::{Purpose, RngStream};
        let total: usize = lengths.iter().sum();
        let draw = |purpose_b| {
            let stream = RngStream::new(seed, Purpose::Sampling, 0, purpose_b);
            (0..total as u32).map(|i| stream.below(i, vocab as u64) as u32).collect::<Vec<_>>()
        };
        let mut cu = vec![0];
        for len in lengths {
            cu.push(cu[cu.len() - 1] + *len as u32);
        }
        TestBatch::new(draw(0), draw(1), vec![1.0; total], cu)
    }

    /// The same batch, with what documents have in common, and with the head only where weights are not zero.
    pub fn compact(mut self) -> TestBatch {
        let doc = |d: usize| &self.tokens[self.cu_seqlens[d] as usize..self.cu_seqlens[d + 1] as usize];
        let common = |d: usize| match d {
            0 => 0,
            _ => doc(d - 1).iter().zip(doc(d)).take_while(|(a, b)| a == b).count() as u32,
        };
        self.shared = (0..self.cu_seqlens.len() - 1).map(common).collect();
        self.selects = true;
        self
    }

    /// A batch of the given documents of this one, in the given order.
    pub fn select(&self, docs: &[usize]) -> TestBatch {
        let mut out = TestBatch { cu_seqlens: vec![0], ..TestBatch::default() };
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

/// Drives a step with coefficients −w/N, and records the log-probabilities.
#[derive(Clone, Debug)]
pub struct TestObjective {
    pub micro_batches: Vec<TestBatch>,
    pub denominator: f64,
    pub log_probs: Vec<Vec<f32>>,
}

impl TestObjective {
    pub fn new(micro_batches: Vec<TestBatch>) -> TestObjective {
        let denominator = micro_batches.iter().flat_map(|m| &m.weights).map(|w| f64::from(*w)).sum();
        let log_probs = micro_batches.iter().map(|m| vec![0.0; m.tokens.len()]).collect();
        TestObjective { micro_batches, denominator, log_probs }
    }

    pub fn loss(&self) -> f64 {
        let all = self.micro_batches.iter().zip(&self.log_probs).flat_map(|(m, l)| m.weights.iter().zip(l));
        -all.map(|(w, l)| f64::from(*w) * f64::from(*l)).sum::<f64>() / self.denominator
    }
}

impl StepDriver for TestObjective {
    fn batch(&self, micro_batch: u32) -> MicroBatch<'_> {
        let m = &self.micro_batches[micro_batch as usize];
        MicroBatch {
            tokens: &m.tokens,
            targets: &m.targets,
            positions: &m.positions,
            cu_seqlens: &m.cu_seqlens,
            samples: &m.samples,
            weights: if m.selects { &m.weights } else { &[] },
            shared: &m.shared,
        }
    }

    fn coefficients(&mut self, micro_batch: u32, _: Option<Outputs<'_>>, out: &mut Coefficients<'_>) {
        for (out, weight) in out.log_probs().iter_mut().zip(&self.micro_batches[micro_batch as usize].weights)
        {
            *out = (-f64::from(*weight) / self.denominator) as f32;
        }
    }

    fn outputs(&mut self, micro_batch: u32, outputs: Outputs<'_>) {
        self.log_probs[micro_batch as usize].copy_from_slice(outputs.log_probs());
    }
}

/// The log-probability of every target of a batch, under the first model.
pub fn score(engine: &mut Engine, micro_batch: &TestBatch) -> Vec<f32> {
    score_with(engine, ModelId::FIRST, micro_batch)
}

/// Like [`score`], under any model.
pub fn score_with(engine: &mut Engine, model: ModelId, micro_batch: &TestBatch) -> Vec<f32> {
    let mut all = Vec::new();
    let batch = MicroBatch {
        tokens: &micro_batch.tokens,
        targets: &micro_batch.targets,
        positions: &micro_batch.positions,
        cu_seqlens: &micro_batch.cu_seqlens,
        samples: &[],
        weights: &[],
        shared: &[],
    };
    engine
        .model_mut(model)
        .score(batch, &mut |outputs| all.extend_from_slice(outputs.log_probs()))
        .expect("a batch within bounds");
    all
}
