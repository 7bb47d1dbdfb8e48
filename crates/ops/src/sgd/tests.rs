use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, bits, dtype, norm, panic_message, queue, queues, tolerance,
    values,
};

fn settings() -> impl Strategy<Value = reference::Settings> {
    let momentum = prop_oneof![Just((0.0, false)), Just((0.9, false)), Just((0.9, true)), Just((0.99, true))];
    let weight_decay = prop_oneof![Just(0.0), Just(0.1)];
    (momentum, weight_decay).prop_map(|((momentum, nesterov), weight_decay)| reference::Settings {
        lr: 1e-2,
        momentum,
        nesterov,
        weight_decay,
    })
}

fn hyperparams(with: &reference::Settings, clip: f32) -> Hyperparams {
    Hyperparams { lr: with.lr as f32, momentum: with.momentum as f32, nesterov: with.nesterov, clip }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Parameters are as small as their updates, so that they cannot hide an error in an update.
    #[test]
    fn ten_steps_match_the_reference(
        len in prop_oneof![5 => 1usize..600, 1 => 33_000usize..36_000], with in settings(),
        clip in prop_oneof![Just(1f32), Just(0.37)], working in prop::option::of(dtype()), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start: Vec<f32> = arena.normal_values(len).iter().map(|p| p * 0.02).collect();
        let gradients: Vec<Vec<f32>> = (0..10).map(|_| arena.normal_values(len)).collect();
        let mut p: Vec<f64> = start.iter().copied().map(f64::from).collect();
        let mut momentum = vec![0.0; len];
        for g in &gradients {
            let g: Vec<f64> = g.iter().map(|g| f64::from(*g) * f64::from(clip)).collect();
            reference::update(&mut p, &mut momentum, &g, &with);
        }
        let mut same = SameBits::new();
        let grad = arena.output(len, DType::F32);
        for queue in queues() {
            let (master, copy) =
                (arena.input(&start, DType::F32), working.map(|dtype| arena.output(len, dtype)));
            let buffer = (with.momentum != 0.0).then(|| arena.input(&vec![0.0; len], DType::F32));
            let range = ParamRange {
                params: Params::Master { master, working: copy },
                grad,
                momentum: buffer.map(State::from),
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            for g in &gradients {
                grad.write_f32(g).unwrap();
                update(&queue, range, &hyperparams(&with, clip), None);
                let read = values(grad).into_iter().zip(g).all(|(kept, g)| kept == f64::from(*g));
                prop_assert!(read, "gradients must not change");
            }
            // Gradients of opposite signs cancel.
            let size = f64::from(clip) * (len as f64).sqrt();
            assert_near(&values(master), &p, len, 0.01 * size, tolerance(DType::F32));
            let mut results = vec![bits(master)];
            if let Some(buffer) = buffer {
                assert_near(&values(buffer), &momentum, len, size, tolerance(DType::F32));
                results.push(bits(buffer));
            }
            if let Some(copy) = copy {
                let masters: Vec<f32> = values(master).iter().map(|p| *p as f32).collect();
                prop_assert_eq!(bits(copy), bits(arena.weights(&masters, copy.dtype())));
            }
            same.check(&queue, results);
        }
        prop_assert!(norm(&p).is_finite());
    }

    /// A shard is updated as it would be inside the whole range, wherever it starts and ends.
    #[test]
    fn an_element_does_not_depend_on_the_others(
        len in 1usize..600, from in 0usize..600, part in 1usize..600, with in settings(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let [p, b, g] = [(); 3].map(|()| arena.normal_values(len));
        let run = |pick: usize, from: usize, len: usize| {
            let [master, buffer, grad] = [&p, &b, &g].map(|x| arena.input(&x[from..from + len], DType::F32));
            let working = arena.output(len, DType::BF16);
            let momentum = (with.momentum != 0.0).then_some(buffer.into());
            let range = ParamRange {
                params: Params::Master { master, working: Some(working) },
                grad,
                momentum,
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            update(&queue(pick), range, &hyperparams(&with, 0.5), None);
            [master, working, buffer].map(bits)
        };
        let from = from % len;
        let part_len = part.min(len - from);
        let (whole, part) = (run(picks.0, 0, len), run(picks.1, from, part_len));
        for (whole, part) in whole.iter().zip(&part) {
            prop_assert_eq!(&part[..], &whole[from..][..part_len]);
        }
    }
}

#[test]
fn momentum_requires_a_buffer_and_only_momentum_does() {
    let arena = TestArena::new(1);
    let [master, grad, buffer] = [(); 3].map(|()| arena.normals(3, DType::F32));
    let run = |momentum: Option<View>, factor: f32, nesterov: bool| {
        let (params, momentum) = (Params::Master { master, working: None }, momentum.map(State::from));
        let range = ParamRange { params, grad, momentum, rounding: None, weight_decay: 0.0 };
        panic_message(|| {
            update(
                &Queue::cpu(1),
                range,
                &Hyperparams { lr: 0.1, momentum: factor, nesterov, clip: 1.0 },
                None,
            )
        })
    };
    assert!(run(None, 0.9, false).contains("momentum needs a buffer"));
    assert!(run(Some(buffer), 0.0, false).contains("momentum needs a buffer"));
    assert!(run(None, 0.0, true).contains("Nesterov needs momentum"));
}
