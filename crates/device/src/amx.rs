//! Intel's matrix tiles (AMX), found at run time.
//!
//! A tile is a register of sixteen rows of 64 bytes; one instruction multiplies two tiles of bf16 and adds to a third
//! of f32, at many times the rate of vectors. The system saves tiles for a thread only after the process asked for it,
//! and instructions fail until a thread has said what shape its tiles have. So there are two proofs: [`Amx`], that the
//! process may use tiles, and [`Tiles`], that this thread has them set up now.
//!
//! Products on tiles sum in an order of their own: their results are a class apart from those of [`Isa`](crate::Isa)s.

use std::marker::PhantomData;

/// Tiles that multiply bf16, which this machine has and this process may use. The only way to get one is to have it
/// detected. Such machines have AVX-512 (F, BW, DQ, VL) as well: that is part of the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx(());

impl Amx {
    /// The tiles of this machine, if it has them. Asks the system once for each process.
    pub fn detect() -> Option<Amx> {
        static FOUND: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        FOUND.get_or_init(system::has_tiles).then_some(Amx(()))
    }

    /// Sets up this thread's tiles, all eight of [`Tiles::ROWS`] rows of [`Tiles::ROW_BYTES`], until what is returned
    /// is dropped. Tiles that are set up make switches between threads dearer, so it is for the length of some work.
    pub fn tiles(self) -> Tiles {
        // SAFETY: an `Amx` only exists where the instructions may run.
        unsafe { system::set_up() };
        Tiles { of_this_thread: PhantomData }
    }
}

/// This thread's tiles, set up. Sets are not nested: the inner one's end would be the end of the outer.
#[derive(Debug)]
pub struct Tiles {
    of_this_thread: PhantomData<*const ()>,
}

impl Tiles {
    pub const ROWS: usize = 16;
    pub const ROW_BYTES: usize = 64;
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: they were set up on this thread, so the instruction may run.
        unsafe { system::release() }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod system {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    use super::Tiles;
    use crate::{Isa, Set};

    /// Bits of CPUID's leaf 7, EDX: products of bf16, tiles.
    const INSTRUCTIONS: u32 = 1 << 22 | 1 << 24;
    /// Bits of XCR0: the system saves the shape of tiles, and what is in them.
    const SAVED: u64 = 1 << 17 | 1 << 18;

    pub(super) fn has_tiles() -> bool {
        // With AVX-512 there is XGETBV, for it was asked to find that.
        Isa::detect().set() == Set::Avx512 && instructions() && may_use()
    }

    // Newer compilers know that CPUID is safe.
    #[allow(unused_unsafe)]
    fn instructions() -> bool {
        // SAFETY: every x86-64 has CPUID.
        let (leaves, features) = unsafe { (__cpuid(0).eax, __cpuid_count(7, 0).edx) };
        // SAFETY: `has_tiles` asks machines with AVX-512.
        leaves >= 7 && features & INSTRUCTIONS == INSTRUCTIONS && unsafe { saved() } & SAVED == SAVED
    }

    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: register 0 is there wherever the instruction is.
        unsafe { _xgetbv(0) }
    }

    /// Asks that the system make room for this process's tiles.
    fn may_use() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const REQUEST_PERMISSION: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        let result: i64;
        // SAFETY: a system call that reads and writes no memory of ours.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => result,
                in("rdi") REQUEST_PERMISSION,
                in("rsi") TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }

    /// What LDTILECFG reads.
    #[repr(C, align(64))]
    struct Shape {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    const EIGHT: Shape = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut tile = 0;
        while tile < 8 {
            (row_bytes[tile], rows[tile]) = (Tiles::ROW_BYTES as u16, Tiles::ROWS as u8);
            tile += 1;
        }
        Shape { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };

    /// # Safety
    /// The process may use tiles.
    pub(super) unsafe fn set_up() {
        let shape = &EIGHT;
        // SAFETY: reads the 64 bytes of the shape; the rest is the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shape, options(nostack, readonly)) }
    }

    /// # Safety
    /// The process may use tiles.
    pub(super) unsafe fn release() {
        // SAFETY: the caller's promise.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// Elsewhere there are none, and so nothing to set up.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod system {
    pub(super) fn has_tiles() -> bool {
        false
    }

    pub(super) unsafe fn set_up() {}

    pub(super) unsafe fn release() {}
}
