//! Initial weights depend only on the seed and on a tensor's name.

use std::collections::BTreeMap;

use lockstep_core::DType;
use lockstep_device::Queue;
use lockstep_engine::{Engine, Resources};
use lockstep_plan::{ModelId, ParamState};
use lockstep_shape::{Architecture, ModelShape};
use lockstep_testkit::{TestSetup, plan};

fn shape() -> ModelShape {
    let tiny = ModelShape::named("tiny", 101).unwrap();
    ModelShape { architecture: Architecture::Qwen3, layers: 2, ..tiny }
}

/// The initial values of every tensor, by its name.
fn weights(setup: TestSetup, seed: u64) -> BTreeMap<String, Vec<f32>> {
    let plan = plan(&shape(), &setup);
    let resources = Resources::single_rank(&plan, Queue::cpu(1)).unwrap();
    let mut engine = Engine::new(plan, resources).unwrap();
    engine.model_mut(ModelId::FIRST).initialise(seed).unwrap();
    let mut found = BTreeMap::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().to_vec().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0f32; segment.elems().min(64)];
            let part = 0..values.len();
            assert!(
                engine
                    .model(ModelId::FIRST)
                    .read(u, segment, ParamState::Working, part, &mut values)
                    .unwrap()
            );
            found.insert(segment.name.clone(), values);
        }
    }
    found
}

/// Asserts that every tensor of `some` is in `all` with the same values.
fn assert_among(some: &BTreeMap<String, Vec<f32>>, all: &BTreeMap<String, Vec<f32>>, what: &str) {
    let other = some.iter().find(|(name, values)| all.get(*name) != Some(*values));
    assert!(other.is_none(), "{what}: {} differs", other.unwrap().0);
}

#[test]
fn the_layout_does_not_change_initial_weights() {
    let plain = weights(TestSetup::default(), 7);
    let decaying = weights(TestSetup { decay_norms: true, ..TestSetup::default() }, 7);
    assert_among(&plain, &decaying, "decay_norms_and_biases moves norms");
    let frozen = weights(TestSetup { frozen: &["*k_proj", "model.layers.1"], ..TestSetup::default() }, 7);
    assert_among(&plain, &frozen, "freeze");
    // With bf16 storage the f32 master copy is read.
    assert_among(&plain, &weights(TestSetup { storage: DType::BF16, ..TestSetup::default() }, 7), "bf16");
}

#[test]
fn every_tensor_and_every_seed_has_different_weights() {
    let (one, other) = (weights(TestSetup::default(), 7), weights(TestSetup::default(), 8));
    let drawn: Vec<&Vec<f32>> = one.values().filter(|values| values[0] != values[1]).collect();
    assert!(drawn.len() >= 2 * 7 + 2, "every matrix is drawn");
    for (i, values) in drawn.iter().enumerate() {
        assert!(drawn[..i].iter().all(|before| before[..8] != values[..8]), "two tensors alike");
    }
    assert_ne!(
        one["model.layers.0.self_attn.q_proj.weight"],
        other["model.layers.0.self_attn.q_proj.weight"]
    );
}
