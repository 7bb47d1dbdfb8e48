use half::bf16;
use lockstep_core::rounding::{RoundingKey, bf16_stochastic, join, split};
use lockstep_device::{CpuQueue, Real, View, copy_nontemporal};

use super::{FlatRange, Params, RangeRounding, State};
use crate::dispatch::with_real;
use crate::quant::dynamic_map::{BLOCK_ELEMS, DynamicMap};

const ELEMS_PER_ITEM: usize = 32 * 1024;

/// A block is loaded, updated and stored while it is in the L1 cache, so that everything is read once. It is a whole
/// number of blocks of 8-bit codes.
const ELEMS_PER_BLOCK: usize = 1024;
const _: () =
    assert!(ELEMS_PER_BLOCK.is_multiple_of(BLOCK_ELEMS) && ELEMS_PER_ITEM.is_multiple_of(ELEMS_PER_BLOCK));

/// A working copy of this many bytes or more is no longer in a cache when it is read, by a copy to the GPU or by the
/// next forward.
const NONTEMPORAL_BYTES: usize = 64 << 20;

/// Values of a block in f32, where they are not stored as f32.
type Scratch = [f32; ELEMS_PER_BLOCK];

/// Runs `formula(parameters, states, gradients)` on blocks of the range and stores the results in their formats. Mark the
/// formula and everything it calls `#[inline(always)]`, as for `Isa::run`.
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
    let len = range.len();
    let nontemporal = matches!(range.params, Params::Master { working: Some(copy), .. } if copy.bytes() >= nontemporal_bytes);
    cpu.pool.run(len.div_ceil(ELEMS_PER_ITEM), &|item, _| {
        let item = item * ELEMS_PER_ITEM..len.min((item + 1) * ELEMS_PER_ITEM);
        cpu.isa.run(
            #[inline(always)]
            || {
                let (mut of_params, mut of_states, mut of_grads) =
                    (scratch(), [(); S].map(|()| scratch()), scratch());
                for start in item.step_by(ELEMS_PER_BLOCK) {
                    let block = Block { start, len: ELEMS_PER_BLOCK.min(len - start) };
                    // SAFETY: blocks are disjoint, this thread alone has this one, and no view overlaps another.
                    unsafe {
                        let p = block.load_params(range.params, &mut of_params);
                        let mut states: [&mut [f32]; S] = [(); S].map(|()| Default::default());
                        for (s, (state, scratch)) in states.iter_mut().zip(&mut of_states).enumerate() {
                            *state = block.load_state(range.states[s], range.maps[s], scratch);
                        }
                        let g = block.load_grads(range.grad, &mut of_grads);
                        formula(p, states.each_mut().map(|state| &mut **state), g);
                        block.store_params(range.params, range.rounding, nontemporal, p);
                        for (s, values) in states.iter().enumerate() {
                            block.store_state(range.states[s], s, range.maps[s], range.rounding, values);
                        }
                    }
                }
            },
        );
    });
}

#[inline(always)]
fn scratch() -> Scratch {
    [0.0; ELEMS_PER_BLOCK]
}

/// Elements of a range that are updated together. The loads return the values in place if they are stored as f32;
/// otherwise they convert them into scratch memory, from where the stores convert them back.
///
/// Safety, for all of its methods: nobody else uses the block's elements of the views, and what an earlier load returned
/// in place is of other views.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
}

impl Block {
    fn of<'m>(&self, view: View<'m>) -> View<'m> {
        view.slice(self.start, self.len)
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn load_params<'s>(&self, params: Params<'s>, scratch: &'s mut Scratch) -> &'s mut [f32] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match params {
                Params::Master { master, .. } => self.of(master).as_mut::<f32>(),
                Params::Split { weight, remainder } => {
                    let parts =
                        self.of(weight).as_slice::<u16>().iter().zip(self.of(remainder).as_slice::<i16>());
                    let p = &mut scratch[..self.len];
                    for (p, (weight, remainder)) in p.iter_mut().zip(parts) {
                        *p = join(*weight, *remainder);
                    }
                    p
                }
                Params::Stochastic { weight } => self.widen(weight, scratch),
            }
        }
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn store_params(
        &self,
        params: Params,
        rounding: Option<RangeRounding>,
        nontemporal: bool,
        p: &[f32],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match params {
                Params::Master { working: None, .. } => {}
                Params::Master { working: Some(working), .. } => with_real!(working.dtype(), R => {
                    let working = self.of(working).as_mut::<R>();
                    if nontemporal {
                        let mut rounded = [R::from_f32(0.0); ELEMS_PER_BLOCK];
                        let rounded = &mut rounded[..p.len()];
                        round(rounded, p);
                        let (from, to) = (rounded.as_ptr().cast(), working.as_mut_ptr().cast());
                        // Both have this many bytes, and one is on this thread's stack.
                        copy_nontemporal(from, to, size_of_val(rounded));
                    } else {
                        round(working, p);
                    }
                }),
                Params::Split { weight, remainder } => {
                    let parts =
                        self.of(weight).as_mut::<u16>().iter_mut().zip(self.of(remainder).as_mut::<i16>());
                    for ((weight, remainder), p) in parts.zip(p) {
                        (*weight, *remainder) = split(*p);
                    }
                }
                Params::Stochastic { weight } => self.round_stochastic(weight, 0, rounding, p),
            }
        }
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn load_state<'s>(
        &self,
        state: State<'s>,
        map: &DynamicMap,
        scratch: &'s mut Scratch,
    ) -> &'s mut [f32] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match state {
                State::Float(view) if view.dtype() == lockstep_core::DType::BF16 => self.widen(view, scratch),
                State::Float(view) => self.of(view).as_mut::<f32>(),
                State::Blockwise { codes, absmax } => {
                    let (codes, absmax) =
                        (self.of(codes).as_slice::<u8>(), self.scales(absmax).as_slice::<f32>());
                    let values = &mut scratch[..self.len];
                    let blocks = values.chunks_mut(BLOCK_ELEMS).zip(codes.chunks(BLOCK_ELEMS));
                    for ((values, codes), absmax) in blocks.zip(absmax) {
                        map.decode(codes, *absmax, values);
                    }
                    values
                }
            }
        }
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn store_state(
        &self,
        state: State,
        index: usize,
        map: &DynamicMap,
        rounding: Option<RangeRounding>,
        values: &[f32],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match state {
                State::Float(view) if view.dtype() == lockstep_core::DType::BF16 => {
                    self.round_stochastic(view, index + 1, rounding, values)
                }
                State::Float(_) => {}
                State::Blockwise { codes, absmax } => {
                    let (codes, absmax) =
                        (self.of(codes).as_mut::<u8>(), self.scales(absmax).as_mut::<f32>());
                    let blocks = values.chunks(BLOCK_ELEMS).zip(codes.chunks_mut(BLOCK_ELEMS));
                    for ((values, codes), absmax) in blocks.zip(absmax) {
                        *absmax = map.encode(values, codes);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn load_grads<'s>(&self, grad: View<'s>, scratch: &'s mut Scratch) -> &'s [f32] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match grad.dtype() {
                lockstep_core::DType::BF16 => self.widen(grad, scratch),
                _ => self.of(grad).as_slice::<f32>(),
            }
        }
    }

    /// The scales of this block's codes.
    fn scales<'m>(&self, absmax: View<'m>) -> View<'m> {
        absmax.slice(self.start / BLOCK_ELEMS, self.len.div_ceil(BLOCK_ELEMS))
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn widen<'s>(&self, view: View, scratch: &'s mut Scratch) -> &'s mut [f32] {
        // SAFETY: guaranteed by the caller.
        let from = unsafe { self.of(view).as_slice::<bf16>() };
        let out = &mut scratch[..self.len];
        for (out, from) in out.iter_mut().zip(from) {
            *out = Real::to_f32(*from);
        }
        out
    }

    /// # Safety
    /// As for [`Block`].
    #[inline(always)]
    unsafe fn round_stochastic(
        &self,
        view: View,
        slot: usize,
        rounding: Option<RangeRounding>,
        values: &[f32],
    ) {
        let rounding = rounding.expect("checked before the update");
        let first = (rounding.first_elem + self.start) as u32;
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.of(view).as_mut::<u16>() };
        stochastic(out, values, rounding.bits.key(slot), first);
    }
}

#[inline(always)]
fn round<R: Real>(working: &mut [R], p: &[f32]) {
    for (working, p) in working.iter_mut().zip(p) {
        *working = R::weight_from_f32(*p);
    }
}

/// Rounds values to bf16; the first has index `first` in its tensor.
#[inline(always)]
fn stochastic(out: &mut [u16], values: &[f32], key: RoundingKey, first: u32) {
    let indices = (0..out.len() as u32).map(|i| first.wrapping_add(i));
    for ((out, value), index) in out.iter_mut().zip(values).zip(indices) {
        *out = bf16_stochastic(*value, key.bits(index));
    }
}
