use lockstep_device::{CpuQueue, Real, copy_nontemporal};

use super::FlatRange;
use crate::dispatch::with_real;

const ELEMS_PER_ITEM: usize = 32 * 1024;

/// Parameters are rounded block by block while they are still in the L1 cache, so that all states are read once.
const ELEMS_PER_BLOCK: usize = 1024;

/// A working copy of this many bytes or more is no longer in a cache when it is read, by a copy to the GPU or by the
/// next forward.
const NONTEMPORAL_BYTES: usize = 64 << 20;

/// Runs `formula(parameters, states, gradients)` on parts of the range and rounds the parameters into the working copy.
/// Mark the formula and everything it calls `#[inline(always)]`, as for `Isa::run`.
#[inline(always)]
pub(crate) fn update<const S: usize>(
    cpu: &CpuQueue,
    range: FlatRange<S>,
    formula: impl Fn(&mut [f32], [&mut [f32]; S], &[f32]) + Sync,
) {
    update_with(cpu, range, NONTEMPORAL_BYTES, formula);
}

/// As [`update`]. A working copy of `nontemporal_bytes` or more is written with non-temporal stores.
#[inline(always)]
pub(super) fn update_with<const S: usize>(
    cpu: &CpuQueue,
    range: FlatRange<S>,
    nontemporal_bytes: usize,
    formula: impl Fn(&mut [f32], [&mut [f32]; S], &[f32]) + Sync,
) {
    let len = range.master.len();
    cpu.pool.run(len.div_ceil(ELEMS_PER_ITEM), &|item, _| {
        let start = item * ELEMS_PER_ITEM;
        let part = ELEMS_PER_ITEM.min(len - start);
        // SAFETY: items write disjoint parts of parameters and states; gradients are only read.
        let (p, mut states, g) = unsafe {
            (
                range.master.slice(start, part).as_mut::<f32>(),
                range.states.map(|state| state.slice(start, part).as_mut::<f32>()),
                range.grad.slice(start, part).as_slice::<f32>(),
            )
        };
        match range.working {
            None => cpu.isa.run(
                #[inline(always)]
                || formula(p, states, g),
            ),
            Some(working) => with_real!(working.dtype(), R => {
                let nontemporal = working.bytes() >= nontemporal_bytes;
                // SAFETY: items write disjoint parts of the working copy.
                let working = unsafe { working.slice(start, part).as_mut::<R>() };
                cpu.isa.run(
                    #[inline(always)]
                    || {
                        for (i, working) in working.chunks_mut(ELEMS_PER_BLOCK).enumerate() {
                            let block = i * ELEMS_PER_BLOCK..i * ELEMS_PER_BLOCK + working.len();
                            let p = &mut p[block.clone()];
                            let states = states.each_mut().map(|state| &mut state[block.clone()]);
                            formula(p, states, &g[block]);
                            if nontemporal {
                                let mut rounded = [R::from_f32(0.0); ELEMS_PER_BLOCK];
                                let rounded = &mut rounded[..p.len()];
                                round(rounded, p);
                                let (from, to) = (rounded.as_ptr().cast(), working.as_mut_ptr().cast());
                                // SAFETY: both have this many bytes, and one is on this thread's stack.
                                unsafe { copy_nontemporal(from, to, size_of_val(rounded)) };
                            } else {
                                round(working, p);
                            }
                        }
                    },
                );
            }),
        }
    });
}

#[inline(always)]
fn round<R: Real>(working: &mut [R], p: &[f32]) {
    for (working, p) in working.iter_mut().zip(p) {
        *working = R::from_f32(*p);
    }
}
