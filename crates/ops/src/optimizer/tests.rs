use lockstep_core::DType;
use lockstep_core::rounding::{bf16_stochastic, bf16_ties_away, join, split};
use lockstep_device::{Isa, Pool, Queue};
use proptest::prelude::*;

use super::operands::{param_values, params, raw, rounding, state, state_values};
use super::*;
use crate::quant::dynamic_map::{SIGNED, UNSIGNED};
use crate::testing::{Operands, TestArena, bits, queue, queues};
use crate::{adamw, lion, sgd};

/// Non-temporal stores write the same copy.
#[test]
fn a_nontemporal_copy_has_the_same_bits() {
    let Queue::Cpu(cpu) = Queue::cpu(2) else { unreachable!("created for the CPU") };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let arena = TestArena::new(7);
        let len = 70_001;
        let start = arena.normal_values(len);
        let grad = arena.input(&arena.normal_values(len), DType::F32);
        let both = [0, usize::MAX].map(|nontemporal_bytes| {
            let [master, state] = [(); 2].map(|()| arena.input(&start, DType::F32));
            let working = arena.output(len, dtype);
            let params = Params::Master { master, working: Some(working) };
            let range = FlatRange { params, grad, states: [state.into()], maps: [&SIGNED], rounding: None };
            cpu::update_with(
                &cpu,
                range,
                nontemporal_bytes,
                #[inline(always)]
                |p, [state], g| {
                    for ((p, state), g) in p.iter_mut().zip(state).zip(g) {
                        *state += g;
                        *p -= *state;
                    }
                },
            );
            [working, master, state].map(bits)
        });
        assert_eq!(both[0], both[1]);
        assert_eq!(both[0][0], bits(arena.weights(&values_of(&both[0][1]), dtype)), "the rounded parameters");
    }
}

fn values_of(bits: &[u32]) -> Vec<f32> {
    bits.iter().copied().map(f32::from_bits).collect()
}

/// All 2³² masters: those that are not NaN are rebuilt bit for bit, NaN stays NaN, and the weight is one of the two
/// neighbours in bf16, the nearer one.
#[test]
fn every_master_is_rebuilt_from_weight_and_remainder() {
    const PER_ITEM: u32 = 1 << 20;
    let failed = std::sync::atomic::AtomicU32::new(0);
    let isa = Isa::detect();
    Pool::new(2).run(1 << 12, &|item, _| {
        let first = item as u32 * PER_ITEM;
        let wrong = isa.run(
            #[inline(always)]
            || {
                let mut wrong = 0;
                for i in 0..PER_ITEM {
                    let bits = first + i;
                    let master = f32::from_bits(bits);
                    let (weight, remainder) = split(master);
                    let rebuilt = join(weight, remainder);
                    let nan = join(weight, 0).is_nan() & rebuilt.is_nan();
                    let is_exact = rebuilt.to_bits() == bits;
                    // The low half decides: below 0x8000 the weight is the upper half, otherwise one more.
                    let nearest = u32::from(weight) == (bits >> 16) + ((bits >> 15) & 1);
                    let is_right = if master.is_nan() { nan } else { is_exact & nearest };
                    wrong += u32::from(!is_right);
                }
                wrong
            },
        );
        failed.fetch_add(wrong, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(failed.into_inner(), 0, "masters that are not rebuilt");
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    AdamW,
    Sgd,
    Momentum,
    Lion,
}

const RULES: [Rule; 4] = [Rule::AdamW, Rule::Sgd, Rule::Momentum, Rule::Lion];

fn rule() -> impl Strategy<Value = Rule> {
    prop_oneof![3 => Just(Rule::AdamW), 1 => Just(Rule::Sgd), 1 => Just(Rule::Momentum), 1 => Just(Rule::Lion)]
}

fn params_format() -> impl Strategy<Value = ParamFormat> {
    let master = |working| ParamFormat::Master { working };
    prop_oneof![Just(master(DType::F32)), Just(ParamFormat::Split), Just(ParamFormat::Stochastic)]
}

fn state_format() -> impl Strategy<Value = StateFormat> {
    prop_oneof![Just(StateFormat::F32), Just(StateFormat::Bf16), Just(StateFormat::Blockwise)]
}

const RATES: (f64, (f64, f64)) = (1e-2, (0.9, 0.99));

fn adamw_rates(t: u64) -> adamw::Hyperparams {
    adamw::Hyperparams::at(t, RATES.0, RATES.1, 1e-8, 0.5)
}

/// A range of parameters with states of its own.
#[derive(Clone, Copy)]
struct Range<'m> {
    params: Params<'m>,
    m: State<'m>,
    v: State<'m>,
    /// The index of the first element in its tensor.
    first_elem: usize,
}

impl<'m> Range<'m> {
    fn new(
        arena: &'m TestArena,
        start: &[Vec<f32>; 3],
        (p, s): (ParamFormat, StateFormat),
        first: usize,
    ) -> Range<'m> {
        let [p_start, m, v] = start;
        Range {
            params: params(arena, p_start, p, 0),
            m: state(arena, m, s, &SIGNED, 0),
            v: state(arena, v, s, &UNSIGNED, 0),
            first_elem: first,
        }
    }

    fn update(&self, rule: Rule, queue: &Queue, grad: View, t: u64) {
        let Range { params, m, v, first_elem } = *self;
        let (rounding, weight_decay) = (rounding(t, first_elem), 0.1);
        let (lr, clip) = (RATES.0 as f32, 0.5);
        match rule {
            Rule::AdamW => {
                let range = adamw::ParamRange { params, grad, m, v, rounding, weight_decay };
                adamw::update(queue, range, &adamw_rates(t), None);
            }
            Rule::Sgd | Rule::Momentum => {
                let has_momentum = rule == Rule::Momentum;
                let (momentum, nesterov) = (if has_momentum { 0.9 } else { 0.0 }, has_momentum);
                let range = sgd::ParamRange {
                    params,
                    grad,
                    momentum: has_momentum.then_some(m),
                    rounding,
                    weight_decay,
                };
                sgd::update(queue, range, &sgd::Hyperparams { lr, momentum, nesterov, clip }, None);
            }
            Rule::Lion => {
                let range = lion::ParamRange { params, grad, m, rounding, weight_decay };
                lion::update(queue, range, &lion::Hyperparams::new(RATES.0, RATES.1, clip), None);
            }
        }
    }

    /// The bits of parameters and states.
    fn bits(&self, arena: &TestArena) -> [Vec<u32>; 3] {
        let to_bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        [
            to_bits(param_values(arena, self.params)),
            to_bits(state_values(arena, self.m, &SIGNED)),
            to_bits(state_values(arena, self.v, &UNSIGNED)),
        ]
    }
}

/// The bits of the weights that the model uses, if they are 16-bit.
fn weight_bits(operands: &TestArena, params: Params) -> Option<Vec<u16>> {
    match params {
        Params::Master { working, .. } => working.map(|working| raw(operands, working)),
        Params::Split { weight, .. } | Params::Stochastic { weight } => Some(raw(operands, weight)),
    }
}

/// Parameters, first and second moments.
fn start(arena: &TestArena, len: usize) -> [Vec<f32>; 3] {
    let numbers = |size: f32| arena.normal_values(len).into_iter().map(|x| size * x).collect::<Vec<f32>>();
    [numbers(0.02), numbers(0.1), numbers(0.1).into_iter().map(|x| x * x).collect()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Weights and remainders are the masters and working copies of the f32 path, bit for bit, whatever else is stored
    /// how.
    #[test]
    fn split_parameters_have_the_bits_of_f32_parameters(
        len in prop_oneof![5 => 1usize..3000, 1 => 33_000usize..36_000], rule in rule(), states in state_format(),
        pick in 0usize..9, seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start = start(&arena, len);
        let whole = Range::new(&arena, &start, (ParamFormat::Master { working: DType::BF16 }, states), 5);
        let split = Range::new(&arena, &start, (ParamFormat::Split, states), 5);
        for t in 1..=5 {
            let grad = arena.normals(len, DType::F32);
            whole.update(rule, &queue(pick), grad, t);
            split.update(rule, &queue(pick), grad, t);
            prop_assert_eq!(whole.bits(&arena), split.bits(&arena));
            prop_assert_eq!(weight_bits(&arena, whole.params), weight_bits(&arena, split.params));
            let Params::Master { master, .. } = whole.params else { unreachable!("just made") };
            let rounded: Vec<u16> = super::operands::floats(&arena, master).into_iter().map(bf16_ties_away).collect();
            prop_assert_eq!(weight_bits(&arena, whole.params).unwrap(), rounded);
        }
    }

    /// Results do not depend on the instruction set, the number of threads, or where a shard starts: blocks of codes
    /// start on multiples of 256 elements, and random bits are counted in the tensor.
    #[test]
    fn a_shard_is_updated_as_in_its_tensor(
        blocks in 1usize..12, tail in 0usize..256, from in 0usize..12, rule in rule(), params in params_format(),
        states in state_format(), picks in (0usize..9, 0usize..9), is_bf16 in any::<bool>(), seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let len = blocks * BLOCK_ELEMS + tail;
        let from = from % blocks * BLOCK_ELEMS;
        let start = start(&arena, len);
        let part = start.clone().map(|values| values[from..].to_vec());
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        let (whole, part) =
            (Range::new(&arena, &start, (params, states), 3), Range::new(&arena, &part, (params, states), from + 3));
        for t in 1..=3 {
            let grad = arena.normals(len, dtype);
            whole.update(rule, &queue(picks.0), grad, t);
            part.update(rule, &queue(picks.1), grad.slice(from, len - from), t);
        }
        for (whole, part) in whole.bits(&arena).iter().zip(&part.bits(&arena)) {
            prop_assert_eq!(&part[..], &whole[from..]);
        }
    }

    /// One step of AdamW, by a plain loop over elements: moments rounded with the counted bits, or to codes.
    #[test]
    fn stored_states_are_the_rounded_results_of_the_f32_path(
        len in 1usize..3000, params in params_format(), states in state_format(), pick in 0usize..9,
        seed in any::<u64>(),
    ) {
        let arena = TestArena::new(seed);
        let start = start(&arena, len);
        let range = Range::new(&arena, &start, (params, states), 1000);
        // The f32 path starts from what the formats have stored.
        let [p, m, v] = range.bits(&arena).map(|bits| values_of(&bits));
        let exact = Range::new(
            &arena, &[p, m, v], (ParamFormat::Master { working: DType::F32 }, StateFormat::F32), 0,
        );
        let grad = arena.normals(len, DType::F32);
        range.update(Rule::AdamW, &queue(pick), grad, 3);
        exact.update(Rule::AdamW, &Queue::cpu(1), grad, 3);
        let [p, m, v] = exact.bits(&arena).map(|bits| values_of(&bits));
        let random = rounding(3, 1000).unwrap().bits;
        let rounded = |values: &[f32], slot: usize| -> Vec<u16> {
            let of = |(i, value): (usize, &f32)| bf16_stochastic(*value, random.key(slot).bits(1000 + i as u32));
            values.iter().enumerate().map(of).collect()
        };
        match range.params {
            Params::Stochastic { weight } => prop_assert_eq!(raw::<u16>(&arena, weight), rounded(&p, 0)),
            _ => prop_assert_eq!(&range.bits(&arena)[0], &exact.bits(&arena)[0]),
        }
        for (slot, (got, want)) in [(1, (range.m, m)), (2, (range.v, v))] {
            match got {
                State::Float(view) if view.dtype() == DType::BF16 =>
                    prop_assert_eq!(raw::<u16>(&arena, view), rounded(&want, slot)),
                State::Float(view) => prop_assert_eq!(super::operands::floats(&arena, view), want),
                State::Blockwise { codes, absmax } => {
                    let map = if slot == 1 { &SIGNED } else { &UNSIGNED };
                    let mut want_codes = vec![0; len];
                    let blocks = want.chunks(BLOCK_ELEMS).zip(want_codes.chunks_mut(BLOCK_ELEMS));
                    let scales: Vec<f32> = blocks.map(|(values, codes)| map.encode(values, codes)).collect();
                    prop_assert_eq!(raw::<u8>(&arena, codes), want_codes);
                    prop_assert_eq!(super::operands::floats(&arena, absmax), scales);
                }
            }
        }
    }
}

/// Instruction sets and threads give the same bits in all formats.
#[test]
fn all_queues_give_the_same_bits() {
    let formats = [
        (ParamFormat::Split, StateFormat::F32, DType::F32),
        (ParamFormat::Stochastic, StateFormat::Bf16, DType::BF16),
        (ParamFormat::Split, StateFormat::Blockwise, DType::BF16),
    ];
    let arena = TestArena::new(3);
    let len = 70_000;
    let start = start(&arena, len);
    for (rule, (params, states, grads)) in RULES.into_iter().flat_map(|rule| formats.map(|f| (rule, f))) {
        let grad = arena.normals(len, grads);
        let mut first = None;
        for queue in queues() {
            let range = Range::new(&arena, &start, (params, states), 0);
            range.update(rule, &queue, grad, 1);
            let got = range.bits(&arena);
            assert!(
                *first.get_or_insert_with(|| got.clone()) == got,
                "{rule:?}, {params:?}, {states:?} on {queue:?}"
            );
        }
    }
}

/// Updates that are far smaller than a bf16 step still arrive on average: without stochastic rounding nothing would
/// change at all.
#[test]
fn stochastic_rounding_keeps_small_updates_on_average() {
    let (arena, len, steps) = (TestArena::new(5), 4096, 400);
    let ones = [vec![1.0; len], vec![0.0; len], vec![0.0; len]];
    let range = Range::new(&arena, &ones, (ParamFormat::Stochastic, StateFormat::Bf16), 0);
    let grad = arena.input(&vec![1e-3; len], DType::BF16);
    let (mut p, queue) = (1f64, Queue::cpu(1));
    for t in 1..=steps {
        let params = sgd::ParamRange {
            params: range.params,
            grad,
            momentum: None,
            rounding: rounding(t, 0),
            weight_decay: 0.0,
        };
        sgd::update(
            &queue,
            params,
            &sgd::Hyperparams { lr: 0.1, momentum: 0.0, nesterov: false, clip: 1.0 },
            None,
        );
        // The gradient in bf16.
        p -= 0.1 * f64::from(f32::from_bits(u32::from(split(1e-3).0) << 16));
    }
    let got = param_values(&arena, range.params);
    let mean = got.iter().copied().map(f64::from).sum::<f64>() / len as f64;
    // 0.04 below 1; a step of bf16 is 0.004 there, and the error of the mean is a hundredth of the change.
    assert!((mean - p).abs() < 0.01 * (1.0 - p), "{mean} instead of {p}");
    assert!(got.iter().any(|x| *x != got[0]), "elements are rounded independently");
}

/// bf16 moments and weights, and 8-bit moments, follow the f32 path over many steps.
#[test]
fn narrow_states_follow_the_f32_path() {
    let (arena, len, steps) = (TestArena::new(9), 4096, 200);
    let zeros = vec![0.0; len];
    let begin = [start(&arena, len)[0].clone(), zeros.clone(), zeros];
    let make = |params, states| Range::new(&arena, &begin, (params, states), 0);
    let exact = make(ParamFormat::Master { working: DType::F32 }, StateFormat::F32);
    let narrow = [
        (make(ParamFormat::Split, StateFormat::Bf16), 0.01),
        (make(ParamFormat::Split, StateFormat::Blockwise), 0.05),
        (make(ParamFormat::Stochastic, StateFormat::Bf16), 0.02),
    ];
    let (bias, queue) = (arena.normal_values(len), Queue::cpu(2));
    for t in 1..=steps {
        // Noise around a gradient of its own for every element, so that parameters have a direction.
        let noise = arena.normal_values(len);
        let grad: Vec<f32> = bias.iter().zip(noise).map(|(bias, noise)| 0.5 * bias + noise).collect();
        let grad = arena.input(&grad, DType::F32);
        exact.update(Rule::AdamW, &queue, grad, t);
        narrow.iter().for_each(|(range, _)| range.update(Rule::AdamW, &queue, grad, t));
    }
    let want = param_values(&arena, exact.params);
    let moved: f64 = want.iter().zip(&begin[0]).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    for (range, tolerance) in narrow {
        let got = param_values(&arena, range.params);
        let off: f64 = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let error = (off / moved).sqrt();
        assert!(
            error < tolerance,
            "off by {error} of the way, {:?}, {:?}",
            range.params.format(),
            range.m.format()
        );
    }
}
