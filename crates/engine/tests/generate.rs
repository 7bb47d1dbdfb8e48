//! Scoring has the bits of training's forward, and decoding with a KV cache has the bits of scoring whole documents. So
//! the log-probabilities of a rollout are those of training.

use lockstep_config::StrategyName;
use lockstep_core::{DType, Mesh};
use lockstep_engine::{DecodeBatch, DecodeDriver, Engine, UpdateRule, UpdateSettings};
use lockstep_plan::ModelId;
use lockstep_shape::{
    ALL_LINEAR, Architecture, Biases, Lora, ModelShape, Recompute, SlidingWindow, WeightFormat,
};
use lockstep_testkit::{CarrierKind, TestBatch, TestObjective, TestSetup, engine, run_in_world, score};

const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.0,
    max_norm: None,
};

fn shapes() -> Vec<ModelShape> {
    let llama = ModelShape { layers: 3, ..ModelShape::named("tiny", 101).unwrap() };
    let qwen = ModelShape { architecture: Architecture::Qwen3, tied: true, head_dim: 20, ..llama.clone() };
    let sliding = ModelShape {
        biases: Biases { qkv: true, out: true, mlp: true },
        window: Some(SlidingWindow { keys: 20, layers: vec![true, false, true] }),
        ..llama.clone()
    };
    let targets = Lora::targets_of(&[ALL_LINEAR.into()], 3).unwrap();
    let lora =
        Lora { rank: 4, alpha: 8.0, dropout: 0.0, rank_stabilized: false, targets, modules_to_save: vec![] };
    let quantised = ModelShape { lora: Some(lora), frozen_projections: WeightFormat::Nf4, ..sliding.clone() };
    vec![llama, qwen, sliding, quantised]
}

fn setup(storage: DType, recompute: Recompute) -> TestSetup {
    // Training, scoring and generation must agree at every temperature.
    let temperature = if storage == DType::BF16 { 0.8 } else { 1.0 };
    let generates = Some((5, 96));
    TestSetup { storage, recompute, temperature, evaluates: true, generates, ..TestSetup::default() }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Decodes the documents of a batch token by token, `stride(doc, pass)` at a time, and "samples" their targets.
struct Replay<'a> {
    micro_batch: &'a TestBatch,
    stride: fn(usize, usize) -> usize,
    pass: usize,
    grown: Vec<usize>,
    running: Vec<usize>,
    new: (Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>),
    /// For every sampled position: its index, and the log-probability.
    seen: Vec<(usize, f32)>,
}

impl<'a> Replay<'a> {
    fn new(micro_batch: &'a TestBatch, stride: fn(usize, usize) -> usize) -> Replay<'a> {
        let grown = vec![0; micro_batch.cu_seqlens.len() - 1];
        Replay { micro_batch, stride, pass: 0, grown, running: vec![], new: Default::default(), seen: vec![] }
    }

    fn at(&self, doc: usize) -> usize {
        self.micro_batch.cu_seqlens[doc] as usize + self.grown[doc]
    }
}

impl DecodeDriver for Replay<'_> {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        self.new = (vec![], vec![], vec![0], vec![]);
        self.running.clear();
        self.pass += 1;
        for doc in 0..self.grown.len() {
            let left = self.micro_batch.cu_seqlens[doc + 1] as usize - self.at(doc);
            let len = left.min((self.stride)(doc, self.pass));
            if len > 0 {
                let at = self.at(doc)..self.at(doc) + len;
                self.new.0.extend(&self.micro_batch.tokens[at.clone()]);
                self.new.1.extend(&self.micro_batch.positions[at]);
                self.new.2.push(self.new.0.len() as u32);
                // Two pages for each sequence, in an order of no meaning.
                self.new.3.extend([9 - doc as u32, 2 * doc as u32 % 5]);
                self.grown[doc] += len;
                self.running.push(doc);
            }
        }
        let (tokens, positions, cu_seqlens, page_tables) = &self.new;
        let batch = DecodeBatch { tokens, positions, cu_seqlens, page_tables, page_copies: &[] };
        (!self.running.is_empty()).then_some(batch)
    }

    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32 {
        assert!(logits.iter().all(|l| l.is_finite()));
        self.micro_batch.targets[self.at(self.running[doc]) - 1]
    }

    fn sampled(&mut self, log_probs: &[f32]) {
        for (doc, log_prob) in self.running.clone().into_iter().zip(log_probs) {
            self.seen.push((self.at(doc) - 1, *log_prob));
        }
    }
}

fn batch(vocab: usize) -> TestBatch {
    TestBatch::random(&[70, 3, 1, 65], vocab, 11)
}

#[test]
fn scoring_has_the_bits_of_training() {
    for shape in shapes() {
        for storage in [DType::F32, DType::BF16, DType::F16] {
            for recompute in [Recompute::None, Recompute::Full] {
                let mut engine = engine(&shape, &setup(storage, recompute));
                let micro_batch = batch(shape.vocab);
                let scored = score(&mut engine, &micro_batch);
                let mut window = TestObjective::new(vec![micro_batch]);
                engine.model_mut(ModelId::FIRST).train_step(&mut window, &UPDATES).unwrap();
                assert_eq!(bits(&scored), bits(&window.log_probs[0]));
            }
        }
    }
}

#[test]
fn decoding_has_the_bits_of_scoring_whole_documents() {
    let strides: [fn(usize, usize) -> usize; 3] =
        [|_, _| 1, |_, pass| if pass == 1 { 40 } else { 1 }, |doc, pass| (doc + pass * 7) % 20];
    for shape in shapes() {
        for storage in [DType::F32, DType::BF16] {
            for (recompute, late) in [
                (Recompute::Selective, None),
                (Recompute::Full, None),
                (Recompute::Full, Some((Recompute::None, 1))),
            ] {
                let mut engine = engine(&shape, &TestSetup { late, ..setup(storage, recompute) });
                let micro_batch = batch(shape.vocab);
                let whole = score(&mut engine, &micro_batch);
                for stride in strides {
                    let mut replay = Replay::new(&micro_batch, stride);
                    engine.model_mut(ModelId::FIRST).generate(&mut replay).unwrap();
                    assert!(replay.seen.len() >= 8);
                    for (at, log_prob) in &replay.seen {
                        assert_eq!(log_prob.to_bits(), whole[*at].to_bits(), "position {at}");
                    }
                }
            }
        }
    }
}

/// Sharded parameters are gathered for the phase; every rank decodes its own sequences.
#[test]
fn decoding_with_sharded_parameters_has_the_same_bits() {
    for shape in [&shapes()[0], &shapes()[3]] {
        decode_with_sharded_parameters(shape);
    }
}

fn decode_with_sharded_parameters(shape: &ModelShape) {
    let alone = TestSetup { recompute: Recompute::Full, ..setup(DType::F32, Recompute::Full) };
    let micro_batch = batch(shape.vocab);
    let whole = score(&mut engine(shape, &alone), &micro_batch);
    for strategy in [StrategyName::Zero3, StrategyName::Zero1] {
        let shared = TestSetup { strategy, mesh: Mesh { replicate: 1, shard: 2, per_node: 2 }, ..alone };
        let grow = |engine: &mut Engine| {
            let scored = score(engine, &micro_batch);
            let mut replay = Replay::new(&micro_batch, |_, pass| if pass == 1 { 9 } else { 3 });
            engine.model_mut(ModelId::FIRST).generate(&mut replay).unwrap();
            // A training step in between does not disturb the other phases.
            engine
                .model_mut(ModelId::FIRST)
                .train_step(&mut TestObjective::new(vec![micro_batch.clone()]), &UPDATES)
                .unwrap();
            assert_eq!(bits(&score(engine, &micro_batch)), bits(&scored));
            (scored, replay.seen)
        };
        for (scored, seen) in run_in_world(shape, &shared, CarrierKind::Thread, None, &grow) {
            assert_eq!(bits(&scored), bits(&whole));
            assert!(seen.iter().all(|(at, l)| l.to_bits() == whole[*at].to_bits()));
        }
    }
}

/// Documents of one pack do not attend to each other.
#[test]
fn changing_a_document_does_not_change_its_neighbours() {
    for shape in shapes() {
        let mut engine = engine(&shape, &setup(DType::F32, Recompute::None));
        let micro_batch = batch(shape.vocab);
        let before = score(&mut engine, &micro_batch);
        let mut other = micro_batch.clone();
        other.tokens[..70].iter_mut().for_each(|t| *t = (*t + 1) % shape.vocab as u32);
        let after = score(&mut engine, &other);
        assert_eq!(bits(&before[70..]), bits(&after[70..]));
        assert!(before[..70].iter().zip(&after[..70]).all(|(a, b)| a != b));
    }
}
