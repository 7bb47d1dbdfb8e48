//! Optimizers other than AdamW follow their formula, and give the same bits under every strategy.

use lockstep_core::DType;
use lockstep_engine::{Engine, UpdateRule, UpdateSettings};
use lockstep_plan::{MemoryTier, ModelId, ParamState};
use lockstep_shape::ModelShape;
use lockstep_testkit::{
    Case, CaseTraining, TestBatch, TestObjective, TestSetup, assert_same_as_plain_ddp, engine,
    pairwise_cases, read_state, run_case_with,
};

const SGD: UpdateRule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
const MOMENTUM: UpdateRule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
const NESTEROV: UpdateRule = UpdateRule::Sgd { momentum: 0.9, nesterov: true };
const LION: UpdateRule = UpdateRule::Lion { betas: (0.9, 0.99) };

#[test]
fn sgd_has_the_same_bits_under_every_strategy() {
    assert_same_as_plain_ddp(pairwise_cases(), CaseTraining { rule: NESTEROV, ..CaseTraining::ADAMW });
}

#[test]
fn lion_has_the_same_bits_under_every_strategy() {
    assert_same_as_plain_ddp(pairwise_cases(), CaseTraining { rule: LION, ..CaseTraining::ADAMW });
}

/// SGD without momentum has no optimizer states; it must still run with every offload setting.
#[test]
fn sgd_without_momentum_runs_with_every_offload() {
    let offloads = |case: &Case| case.optimizer.tier != MemoryTier::Device;
    for case in pairwise_cases().into_iter().filter(offloads) {
        let trained = CaseTraining { rule: SGD, ..CaseTraining::ADAMW };
        assert!(run_case_with(&case, trained) == run_case_with(&case.baseline(), trained), "{case}");
    }
}

fn decays(engine: &Engine) -> Vec<bool> {
    let units = engine.model(ModelId::FIRST).units().iter();
    units.flat_map(|u| &u.segments).flat_map(|s| vec![s.decay; s.elems()]).collect()
}

/// The weight and the first state after a step, from those before it and the gradient, in f64.
fn step(rule: UpdateRule, lr: f64, decay: f64, [p, g, m]: [f64; 3]) -> [f64; 2] {
    match rule {
        UpdateRule::Sgd { momentum, nesterov } => {
            let g = g + decay * p;
            let m = momentum * m + g;
            let by = if nesterov { g + momentum * m } else { m };
            [p - lr * by, m]
        }
        UpdateRule::Lion { betas: (one, two) } => {
            let direction = one * m + (1.0 - one) * g;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            [p * (1.0 - lr * decay) - lr * sign, two * m + (1.0 - two) * g]
        }
        UpdateRule::AdamW { .. } => unreachable!("has its own goldens"),
    }
}

/// Checks four steps, each against the formula applied to the engine's previous state. The sign in Lion's update may
/// differ where its argument is almost zero.
#[test]
fn updates_follow_the_formula() {
    let shape = ModelShape { vocab: 101, layers: 2, ..ModelShape::named("tiny", 101).unwrap() };
    for rule in [SGD, MOMENTUM, NESTEROV, LION] {
        for storage in [DType::F32, DType::BF16] {
            let setup = TestSetup { optimizer: rule.spec(), storage, ..TestSetup::default() };
            let mut engine = engine(&shape, &setup);
            let decay = decays(&engine);
            let has_state = !rule.spec().states.is_empty();
            for t in 1..=4 {
                let before = read_state(&engine, ParamState::Working);
                let state = |engine: &Engine| match has_state {
                    true => read_state(engine, ParamState::Optimizer(0)),
                    false => vec![0.0; before.len()],
                };
                let m = state(&engine);
                let updates = UpdateSettings { t, lr: 0.05, rule, weight_decay: 0.1, max_norm: None };
                let mut window = TestObjective::new(vec![TestBatch::random(&[20, 9], 101, t)]);
                engine.model_mut(ModelId::FIRST).train_step(&mut window, &updates).unwrap();
                let (grad, after, next) = (
                    read_state(&engine, ParamState::Grad),
                    read_state(&engine, ParamState::Working),
                    state(&engine),
                );
                let mut undecided = 0;
                for i in 0..before.len() {
                    let numbers = [before[i], grad[i], m[i]].map(f64::from);
                    let [p, m] = step(rule, 0.05, if decay[i] { 0.1 } else { 0.0 }, numbers);
                    let (p_error, m_error) = (f64::from(after[i]) - p, f64::from(next[i]) - m);
                    if rule == LION && p_error.abs() > 1e-6 {
                        undecided += 1;
                        continue;
                    }
                    assert!(
                        p_error.abs() <= 2e-7 * (1.0 + p.abs()),
                        "{rule:?} {storage} step {t}: {p_error}"
                    );
                    let m_error = if has_state { m_error } else { 0.0 };
                    assert!(
                        m_error.abs() <= 2e-7 * (1.0 + m.abs()),
                        "{rule:?} {storage} step {t}: {m_error}"
                    );
                }
                assert!(undecided * 10_000 < before.len(), "{undecided} signs differ");
            }
        }
    }
}
