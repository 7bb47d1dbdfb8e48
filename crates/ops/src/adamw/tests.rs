use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_close, bits, dtype, queue, queues, tolerance, values,
};

fn settings() -> impl Strategy<Value = reference::Settings> {
    let betas =
        prop_oneof![Just((0.9, 0.999)), Just((0.9, 0.95)), Just((0.0, 0.9999)), Just((0.95, 0.99999))];
    let weight_decay = prop_oneof![Just(0.0), Just(0.1)];
    (betas, weight_decay, prop_oneof![Just(1e-8), Just(1e-6)])
        .prop_map(|(betas, weight_decay, eps)| reference::Settings { lr: 1e-2, betas, eps, weight_decay })
}

fn hyperparams(t: u64, with: &reference::Settings, clip: f32) -> Hyperparams {
    Hyperparams::at(t, with.lr, with.betas, with.eps, clip)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Parameters are as small as their updates, so that they cannot hide an error in an update.
    #[test]
    fn ten_steps_match_the_reference(
        len in prop_oneof![5 => 1usize..600, 1 => 33_000usize..36_000], with in settings(),
        clip in prop_oneof![Just(1f32), Just(0.37)], size in prop_oneof![Just(1f32), Just(1e-4), Just(1e3)],
        working in prop::option::of(dtype()), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start: Vec<f32> = arena.normal_values(len).iter().map(|p| p * 0.02).collect();
        let gradients: Vec<Vec<f32>> =
            (0..10).map(|_| arena.normal_values(len).iter().map(|g| g * size).collect()).collect();
        let mut p: Vec<f64> = start.iter().copied().map(f64::from).collect();
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        for (t, g) in (1..).zip(&gradients) {
            let g: Vec<f64> = g.iter().map(|g| f64::from(*g) * f64::from(clip)).collect();
            reference::update(&mut p, &mut m, &mut v, &g, t, &with);
        }
        let mut same = SameBits::new();
        let grad = arena.output(len, DType::F32);
        for queue in queues() {
            let zeros = vec![0.0; len];
            let (master, copy) =
                (arena.input(&start, DType::F32), working.map(|dtype| arena.output(len, dtype)));
            let [m_view, v_view] = [(); 2].map(|()| arena.input(&zeros, DType::F32));
            let range = ParamRange {
                params: Params::Master { master, working: copy },
                grad,
                m: m_view.into(),
                v: v_view.into(),
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            for (t, g) in (1..).zip(&gradients) {
                grad.write_f32(g).unwrap();
                update(&queue, range, &hyperparams(t, &with, clip), None);
                let read = values(grad).into_iter().zip(g).all(|(kept, g)| kept == f64::from(*g));
                prop_assert!(read, "gradients must not change");
            }
            assert_close(m_view, &m, m.len(), tolerance(DType::F32));
            assert_close(v_view, &v, v.len(), tolerance(DType::F32));
            assert_close(master, &p, p.len(), tolerance(DType::F32));
            if let Some(copy) = copy {
                let masters: Vec<f32> = values(master).iter().map(|p| *p as f32).collect();
                prop_assert_eq!(bits(copy), bits(arena.weights(&masters, copy.dtype())));
            }
            same.check(&queue, [m_view, v_view, master].map(bits).to_vec());
        }
    }

    /// A shard is updated as it would be inside the whole range, wherever it starts and ends.
    #[test]
    fn an_element_does_not_depend_on_the_others(
        len in 1usize..600, from in 0usize..600, part in 1usize..600, with in settings(),
        picks in (0usize..9, 0usize..9), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let [p, m, g] = [(); 3].map(|()| arena.normal_values(len));
        let v: Vec<f32> = arena.normal_values(len).iter().map(|v| v * v).collect();
        let run = |pick: usize, from: usize, len: usize| {
            let [master, m, v, grad] =
                [&p, &m, &v, &g].map(|x| arena.input(&x[from..from + len], DType::F32));
            let working = arena.output(len, DType::BF16);
            let range = ParamRange {
                params: Params::Master { master, working: Some(working) },
                grad,
                m: m.into(),
                v: v.into(),
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            update(&queue(pick), range, &hyperparams(3, &with, 0.5), None);
            [master, working, m, v].map(bits)
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
fn without_gradients_only_weight_decay_applies() {
    let arena = TestArena::new(1);
    let zeros = || arena.input(&[0.0; 3], DType::F32);
    let master = arena.input(&[1.0, -2.0, 0.0], DType::F32);
    let (params, grad, m, v) = (Params::Master { master, working: None }, zeros(), zeros(), zeros());
    let range = ParamRange { params, grad, m: m.into(), v: v.into(), rounding: None, weight_decay: 0.5 };
    update(&Queue::cpu(1), range, &Hyperparams::at(1, 0.25, (0.9, 0.999), 1e-8, 1.0), None);
    assert_eq!(values(master), [0.875, -1.75, 0.0]);
    assert_eq!((values(m), values(v)), (vec![0.0; 3], vec![0.0; 3]));
}
