//! Machines that have no tiles: there is no proof to call these with.

use half::bf16;

use super::Block;

const WHY: &str = "no machine of this kind has tiles";

pub(super) unsafe fn multiply(_: &Block, _: *mut f32, _: usize) {
    unreachable!("{WHY}")
}

pub(super) unsafe fn prefetch(_: &Block) {
    unreachable!("{WHY}")
}

pub(super) unsafe fn add(_: &Block, _: *const f32) {
    unreachable!("{WHY}")
}

pub(super) unsafe fn transpose(_: *const bf16, _: usize, _: *mut bf16, _: usize) {
    unreachable!("{WHY}")
}
