use half::bf16;
use lockstep_core::ALIGN_ELEMS;
use lockstep_device::{CpuQueue, Real, View};

use crate::dispatch::with_real;

const ELEMS_PER_ITEM: usize = 128 * ALIGN_ELEMS;

pub(super) fn squared_sum_leaves(cpu: &CpuQueue, leaves: View, x: View) {
    each_part(cpu, x.len(), &|start, len| {
        with_real!(x.dtype(), R => {
            // SAFETY: items write disjoint leaves; x is only read.
            let (leaves, x) = unsafe {
                (
                    leaves.slice(start / ALIGN_ELEMS, len / ALIGN_ELEMS).as_mut::<f64>(),
                    x.slice(start, len).as_slice::<R>(),
                )
            };
            cpu.isa.run(
                #[inline(always)]
                || leaves_of(leaves, x),
            );
        });
    });
}

/// Each of eight lanes sums every eighth element in order; then the lanes are added pairwise.
#[inline(always)]
fn leaves_of<R: Real>(leaves: &mut [f64], x: &[R]) {
    for (leaf, block) in leaves.iter_mut().zip(x.as_chunks::<ALIGN_ELEMS>().0) {
        let mut lanes = [0f64; 8];
        for chunk in block.as_chunks::<8>().0 {
            let wide = chunk.map(|value| f64::from(value.to_f32()));
            for (sum, value) in lanes.iter_mut().zip(wide) {
                *sum = value.mul_add(value, *sum);
            }
        }
        // Force the lanes into memory: otherwise the compiler sums in pairs to suit the order of the additions below.
        let lanes = std::hint::black_box(lanes);
        *leaf =
            ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    }
}

pub(super) fn sum_leaves(out: View, leaves: View) {
    // SAFETY: leaves are only read, and nothing else runs.
    let sum: f64 = unsafe { leaves.as_slice::<f64>() }.iter().sum();
    out.first(1).write_host(&[sum]);
}

pub(super) fn decide_step(decision: View, max_norm: Option<f64>, loss_scale: f64) {
    let mut sum = [0f64];
    decision.read_host(&mut sum);
    let norm = sum[0].sqrt() / loss_scale;
    let clip = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0) as f32);
    let factor = (f64::from(clip) / loss_scale) as f32;
    decision.write_host(&[sum[0], norm, f64::from(factor), f64::from(u8::from(!norm.is_finite()))]);
}

pub(super) fn add(cpu: &CpuQueue, sum: View, x: View) {
    each_part(cpu, x.len(), &|start, len| {
        // SAFETY: items write disjoint parts of the sum; x is only read and does not overlap.
        let (sum, x) =
            unsafe { (sum.slice(start, len).as_mut::<f32>(), x.slice(start, len).as_slice::<f32>()) };
        cpu.isa.run(
            #[inline(always)]
            || add_part(sum, x),
        );
    });
}

#[inline(always)]
fn add_part(sum: &mut [f32], x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}

pub(super) fn copy(cpu: &CpuQueue, to: View, x: View) {
    each_part(cpu, x.len(), &|start, len| to.slice(start, len).copy_from_host(&x.slice(start, len)));
}

pub(super) fn round(cpu: &CpuQueue, to: View, x: View) {
    each_part(cpu, x.len(), &|start, len| {
        // SAFETY: items write disjoint parts of `to`; x is only read and does not overlap.
        let (to, x) =
            unsafe { (to.slice(start, len).as_mut::<bf16>(), x.slice(start, len).as_slice::<f32>()) };
        cpu.isa.run(
            #[inline(always)]
            || to.iter_mut().zip(x).for_each(|(to, x)| *to = Real::from_f32(*x)),
        );
    });
}

pub(super) fn zero(cpu: &CpuQueue, x: View) {
    each_part(cpu, x.len(), &|start, len| x.slice(start, len).zero_host());
}

fn each_part(cpu: &CpuQueue, len: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    cpu.pool.run(len.div_ceil(ELEMS_PER_ITEM), &|item, _| {
        let start = item * ELEMS_PER_ITEM;
        f(start, ELEMS_PER_ITEM.min(len - start));
    });
}
