//! Invalid batches are rejected with a precise error before anything reaches the device. A GPU would read past the end
//! of a table, or fail without a reason.

use lockstep_core::{DType, Fault, FaultClass};
use lockstep_engine::{DecodeBatch, DecodeDriver, Engine, EngineError, UpdateRule, UpdateSettings};
use lockstep_plan::ModelId;
use lockstep_shape::ModelShape;
use lockstep_testkit::{TestBatch, TestObjective, TestSetup, engine};

const VOCAB: usize = 101;
const UPDATES: UpdateSettings = UpdateSettings {
    t: 1,
    lr: 0.0,
    rule: UpdateRule::AdamW { betas: (0.9, 0.95), eps: 1e-8 },
    weight_decay: 0.0,
    max_norm: None,
};

fn fresh_engine() -> Engine {
    let shape = ModelShape { layers: 1, ..ModelShape::named("tiny", VOCAB).unwrap() };
    engine(&shape, &TestSetup { storage: DType::F32, generates: Some((3, 96)), ..TestSetup::default() })
}

/// A step with a batch that `spoil` has changed.
fn step(spoil: impl FnOnce(&mut TestBatch)) -> Result<(), EngineError> {
    let mut micro_batch = TestBatch::random(&[20, 5], VOCAB, 7);
    spoil(&mut micro_batch);
    fresh_engine()
        .model_mut(ModelId::FIRST)
        .train_step(&mut TestObjective::new(vec![micro_batch]), &UPDATES)
        .map(drop)
}

#[test]
fn a_batch_within_bounds_runs() {
    step(|_| ()).unwrap();
    step(|micro_batch| {
        (micro_batch.tokens[3], micro_batch.targets[4]) = (VOCAB as u32 - 1, VOCAB as u32 - 1)
    })
    .unwrap();
}

#[test]
fn ids_outside_the_vocabulary_are_rejected() {
    for id in [VOCAB as u32, u32::MAX] {
        let error = step(|micro_batch| micro_batch.tokens[3] = id).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("token {id}, at index 3 of a micro-batch, is outside the model's vocabulary of {VOCAB}")
        );
        assert_eq!(error.class(), FaultClass::BadData);
        let error = step(|micro_batch| micro_batch.targets[24] = id).unwrap_err();
        assert!(error.to_string().starts_with(&format!("target {id}, at index 24")), "{error}");
    }
}

#[test]
fn positions_past_the_rotary_table_are_rejected() {
    // The rotary table covers the longest document, in training and in generation.
    let planned = 96.max(TestSetup::default().max_doc);
    for position in [planned as u32, u32::MAX] {
        let error = step(|micro_batch| micro_batch.positions[7] = position).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "position {position}, at index 7 of a micro-batch, is outside the {planned} positions of the rotary table"
            )
        );
    }
    step(|micro_batch| micro_batch.positions[7] = planned as u32 - 1).unwrap();
}

#[test]
fn invalid_cu_seqlens_are_rejected() {
    for bounds in [vec![0, 30, 25], vec![1, 20, 25], vec![0, 20, 24], vec![0, 20, 26], vec![]] {
        let error = step(|micro_batch| micro_batch.cu_seqlens.clone_from(&bounds)).unwrap_err();
        assert!(matches!(error, EngineError::BadSequenceBounds { .. }), "{bounds:?}: {error}");
    }
    let error = step(|micro_batch| _ = micro_batch.targets.pop()).unwrap_err();
    assert_eq!(error.to_string(), "a micro-batch of 25 tokens has 24 targets");
    let error = step(|micro_batch| _ = micro_batch.positions.pop()).unwrap_err();
    assert_eq!(error.to_string(), "a micro-batch of 25 tokens has 24 positions");
}

/// Returns one decode batch, and then no more.
struct Once {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slot: u32,
    done: bool,
}

impl DecodeDriver for Once {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        let first = !std::mem::replace(&mut self.done, true);
        first.then_some(DecodeBatch {
            tokens: &self.tokens,
            positions: &self.positions,
            cu_seqlens: &[0, 2],
            slots: std::slice::from_ref(&self.slot),
        })
    }

    fn sample(&mut self, _: usize, _: &[f32]) -> u32 {
        0
    }

    fn sampled(&mut self, _: &[f32]) {}
}

#[test]
fn invalid_decode_batches_are_rejected() {
    let run = |token: u32, position: u32, slot: u32| {
        let mut once = Once { tokens: vec![1, token], positions: vec![0, position], slot, done: false };
        fresh_engine().model_mut(ModelId::FIRST).generate(&mut once)
    };
    run(2, 1, 2).unwrap();
    assert!(matches!(run(VOCAB as u32, 1, 0), Err(EngineError::UnknownToken { what: "token", .. })));
    assert!(matches!(run(2, 96, 0), Err(EngineError::TooLarge { .. })));
    assert!(matches!(run(2, 1, 3), Err(EngineError::TooLarge { what: "slots", found: 4, planned: 3 })));
}
