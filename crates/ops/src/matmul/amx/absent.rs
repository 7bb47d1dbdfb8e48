//! Platforms without AMX: these functions are never called, because no `Amx` exists there.

use half::bf16;

use super::Block;

const WHY: &str = "this platform has no AMX";

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
