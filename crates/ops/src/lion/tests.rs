use lockstep_core::DType;
use lockstep_device::Queue;
use proptest::prelude::*;

use super::*;
use crate::testing::{
    Operands, SameBits, TestArena, assert_near, bits, dtype, queue, queues, tolerance, values,
};

fn settings() -> impl Strategy<Value = reference::Settings> {
    let betas = prop_oneof![Just((0.9, 0.99)), Just((0.95, 0.98)), Just((0.0, 0.9999))];
    let weight_decay = prop_oneof![Just(0.0), Just(0.1)];
    (betas, weight_decay).prop_map(|(betas, weight_decay)| reference::Settings {
        lr: 1e-2,
        betas,
        weight_decay,
    })
}

fn hyperparams(with: &reference::Settings, clip: f32) -> Hyperparams {
    Hyperparams::new(with.lr, with.betas, clip)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Rounding decides the sign of a value near zero: parameters to which that happened are excluded.
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
        let (mut m, mut sure) = (vec![0.0; len], vec![true; len]);
        for g in &gradients {
            let g: Vec<f64> = g.iter().map(|g| f64::from(*g) * f64::from(clip)).collect();
            for i in 0..len {
                sure[i] &= reference::direction(m[i], g[i], &with).abs() > 1e-6 * (m[i].abs() + g[i].abs());
            }
            reference::update(&mut p, &mut m, &g, &with);
        }
        // Ten steps of 30 000 parameters have two of them on average.
        prop_assert!(sure.iter().filter(|sure| !**sure).count() <= 5 + len / 1000);
        let mut same = SameBits::new();
        let grad = arena.output(len, DType::F32);
        for queue in queues() {
            let (master, copy) =
                (arena.input(&start, DType::F32), working.map(|dtype| arena.output(len, dtype)));
            let m_view = arena.input(&vec![0.0; len], DType::F32);
            let range = ParamRange {
                params: Params::Master { master, working: copy },
                grad,
                m: m_view.into(),
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            for g in &gradients {
                grad.write_f32(g).unwrap();
                update(&queue, range, &hyperparams(&with, clip), None);
                let read = values(grad).into_iter().zip(g).all(|(kept, g)| kept == f64::from(*g));
                prop_assert!(read, "gradients must not change");
            }
            let scale = 0.1 * f64::from(clip * size) * (1.0 - with.betas.1) * (len as f64).sqrt();
            assert_near(&values(m_view), &m, len, scale, tolerance(DType::F32));
            let got: Vec<f64> =
                values(master).into_iter().zip(&p).zip(&sure).map(|((got, p), sure)| if *sure { got } else { *p }).collect();
            assert_near(&got, &p, len, 0.01 * (len as f64).sqrt(), tolerance(DType::F32));
            if let Some(copy) = copy {
                let masters: Vec<f32> = values(master).iter().map(|p| *p as f32).collect();
                prop_assert_eq!(bits(copy), bits(arena.weights(&masters, copy.dtype())));
            }
            same.check(&queue, vec![bits(m_view), bits(master)]);
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
        let run = |pick: usize, from: usize, len: usize| {
            let [master, m, grad] = [&p, &m, &g].map(|x| arena.input(&x[from..from + len], DType::F32));
            let working = arena.output(len, DType::BF16);
            let range = ParamRange {
                params: Params::Master { master, working: Some(working) },
                grad,
                m: m.into(),
                rounding: None,
                weight_decay: with.weight_decay as f32,
            };
            update(&queue(pick), range, &hyperparams(&with, 0.5), None);
            [master, working, m].map(bits)
        };
        let from = from % len;
        let part_len = part.min(len - from);
        let (whole, part) = (run(picks.0, 0, len), run(picks.1, from, part_len));
        for (whole, part) in whole.iter().zip(&part) {
            prop_assert_eq!(&part[..], &whole[from..][..part_len]);
        }
    }
}

/// The sign of zero is zero, and NaN is not hidden.
#[test]
fn signs_of_zero_and_nan() {
    let arena = TestArena::new(1);
    for queue in queues() {
        let input = |values: &[f32]| arena.input(values, DType::F32);
        let (master, grad) = (input(&[1.0, 1.0, 1.0, 1.0, 1.0]), input(&[0.0, -0.0, 3.0, -1e-30, f32::NAN]));
        let (params, m) = (Params::Master { master, working: None }, input(&[0.0; 5]).into());
        let range = ParamRange { params, grad, m, rounding: None, weight_decay: 0.0 };
        update(&queue, range, &Hyperparams::new(0.25, (0.5, 0.5), 1.0), None);
        let got = values(master);
        assert_eq!(got[..4], [1.0, 1.0, 0.75, 1.25]);
        assert!(got[4].is_nan());
    }
}

#[test]
fn without_gradients_only_weight_decay_applies() {
    let arena = TestArena::new(1);
    let zeros = || arena.input(&[0.0; 3], DType::F32);
    let master = arena.input(&[1.0, -2.0, 0.0], DType::F32);
    let (params, m) = (Params::Master { master, working: None }, zeros());
    let range = ParamRange { params, grad: zeros(), m: m.into(), rounding: None, weight_decay: 0.5 };
    update(&Queue::cpu(1), range, &Hyperparams::new(0.25, (0.9, 0.99), 1.0), None);
    assert_eq!((values(master), values(m)), (vec![0.875, -1.75, 0.0], vec![0.0; 3]));
}
