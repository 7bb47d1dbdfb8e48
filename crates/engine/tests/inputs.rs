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
    cu_seqlens: Vec<u32>,
    page_tables: Vec<u32>,
    page_copies: Vec<(u32, u32)>,
    done: bool,
}

impl DecodeDriver for Once {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        let first = !std::mem::replace(&mut self.done, true);
        first.then_some(DecodeBatch {
            tokens: &self.tokens,
            positions: &self.positions,
            cu_seqlens: &self.cu_seqlens,
            page_tables: &self.page_tables,
            page_copies: &self.page_copies,
        })
    }

    fn sample(&mut self, _: usize, _: &[f32]) -> u32 {
        0
    }

    fn sampled(&mut self, _: &[f32]) {}
}

#[test]
fn invalid_decode_batches_are_rejected() {
    // Three sequences of at most 96 tokens: six pages. Two sequences, with two tokens and one.
    let run = |change: fn(&mut Once)| {
        let mut once = Once {
            tokens: vec![1, 2, 3],
            positions: vec![0, 1, 0],
            cu_seqlens: vec![0, 2, 3],
            page_tables: vec![5, 9, 4, 9],
            page_copies: vec![(0, 1), (1, 2)],
            done: false,
        };
        change(&mut once);
        fresh_engine().model_mut(ModelId::FIRST).generate(&mut once)
    };
    run(|_| {}).unwrap();
    let vocab = |once: &mut Once| once.tokens[1] = VOCAB as u32;
    assert!(matches!(run(vocab), Err(EngineError::UnknownToken { what: "token", .. })));
    let long = |once: &mut Once| once.positions = vec![95, 96, 0];
    assert!(matches!(run(long), Err(EngineError::TooLarge { .. })));
    let page = |once: &mut Once| once.page_tables[2] = 6;
    assert!(matches!(run(page), Err(EngineError::TooLarge { what: "pages", found: 7, planned: 6 })));
    let copies: [fn(&mut Once); 2] =
        [|once| once.page_copies[0] = (6, 0), |once| once.page_copies[1] = (0, u32::MAX)];
    for copy in copies {
        assert!(matches!(run(copy), Err(EngineError::TooLarge { what: "pages", .. })));
    }
    let onto_itself = |once: &mut Once| once.page_copies[0] = (3, 3);
    assert!(matches!(run(onto_itself), Err(EngineError::SharedPage { page: 3 })));
    let short = |once: &mut Once| once.page_tables.truncate(3);
    assert_eq!(
        run(short).unwrap_err().to_string(),
        "a decode batch of 2 sequences has 3 entries in its page tables, which need 2 each"
    );
    let shared = |once: &mut Once| once.page_tables[2] = 5;
    assert_eq!(
        run(shared).unwrap_err().to_string(),
        "page 5 of the KV cache is written to for one sequence of a decode batch and used by another"
    );
    let gap = |once: &mut Once| once.positions[1] = 2;
    assert!(matches!(run(gap), Err(EngineError::PositionGap { doc: 0 })));
    let none = |once: &mut Once| once.cu_seqlens = vec![0, 3, 3];
    assert!(run(none).is_err());
    let no_token = |once: &mut Once| (once.cu_seqlens, once.positions) = (vec![0, 0, 3], vec![0, 1, 2]);
    assert!(matches!(run(no_token), Err(EngineError::NoNewToken { doc: 0 })));
}

/// A page that is full is only read, and may be in several tables.
#[test]
fn sequences_share_full_pages() {
    let mut prefix = Once {
        tokens: vec![1; 64],
        positions: (0..64).collect(),
        cu_seqlens: vec![0, 64],
        page_tables: vec![3, 9],
        page_copies: vec![],
        done: false,
    };
    let mut both = Once {
        tokens: vec![1, 2],
        positions: vec![64, 64],
        cu_seqlens: vec![0, 1, 2],
        page_tables: vec![3, 0, 3, 1],
        page_copies: vec![],
        done: false,
    };
    let mut engine = fresh_engine();
    engine.model_mut(ModelId::FIRST).generate(&mut prefix).unwrap();
    engine.model_mut(ModelId::FIRST).generate(&mut both).unwrap();
}
