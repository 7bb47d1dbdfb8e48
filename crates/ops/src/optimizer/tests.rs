use lockstep_core::DType;
use lockstep_device::Queue;

use super::*;
use crate::testing::{Operands, TestArena, bits};

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
            let range = FlatRange { master, working: Some(arena.output(len, dtype)), grad, states: [state] };
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
            [range.working.unwrap(), master, state].map(bits)
        });
        assert_eq!(both[0], both[1]);
        assert_eq!(both[0][0], bits(arena.input(&values_of(&both[0][1]), dtype)), "the rounded parameters");
    }
}

fn values_of(bits: &[u32]) -> Vec<f32> {
    bits.iter().copied().map(f32::from_bits).collect()
}
