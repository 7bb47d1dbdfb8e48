//! Intel AMX (matrix tiles), detected at run time.
//!
//! A tile is a register of sixteen rows of 64 bytes. One instruction multiplies two bf16 tiles and adds the result to
//! an f32 tile, at many times the rate of vector instructions. The operating system saves a thread's tiles only after
//! the process has asked for it, and tile instructions fault until the thread has configured the shapes of its tiles.
//! Two types prove that this was done: [`Amx`] (the process may use tiles) and [`Tiles`] (this thread has configured
//! them).
//!
//! Tiles sum in an order of their own, so their results differ in bits from those of every [`Isa`](crate::Isa).

use std::marker::PhantomData;

/// Proof that this machine has bf16 tiles and that this process may use them. Only detection creates one. Such
/// machines also have AVX-512 (F, BW, DQ, VL), and detection checks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx(());

impl Amx {
    /// Detects the tiles of this machine. Asks the system once per process.
    pub fn detect() -> Option<Amx> {
        static FOUND: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        FOUND.get_or_init(system::has_tiles).then_some(Amx(()))
    }

    /// Configures all eight tiles of this thread as [`Tiles::ROWS`] rows of [`Tiles::ROW_BYTES`], until the returned
    /// guard is dropped. Configured tiles make context switches slower, so hold the guard only while they are in use.
    pub fn tiles(self) -> Tiles {
        // SAFETY: an `Amx` only exists where the instructions may run.
        unsafe { system::set_up() };
        Tiles { not_send: PhantomData }
    }
}

/// This thread's configured tiles. Guards must not be nested: dropping the inner one releases the tiles of both.
#[derive(Debug)]
pub struct Tiles {
    not_send: PhantomData<*const ()>,
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
    use crate::{InstructionSet, Isa};

    /// Bits of CPUID leaf 7, EDX: AMX-BF16 and AMX-TILE.
    const INSTRUCTIONS: u32 = 1 << 22 | 1 << 24;
    /// Bits of XCR0: the system saves the tile configuration and the tile data.
    const SAVED: u64 = 1 << 17 | 1 << 18;

    pub(super) fn has_tiles() -> bool {
        // AVX-512 detection requires XGETBV, so the instruction is available here.
        Isa::detect().set() == InstructionSet::Avx512 && instructions() && may_use()
    }

    // Newer compilers declare CPUID as safe.
    #[allow(unused_unsafe)]
    fn instructions() -> bool {
        // SAFETY: every x86-64 CPU has CPUID.
        let (leaves, features) = unsafe { (__cpuid(0).eax, __cpuid_count(7, 0).edx) };
        // SAFETY: `has_tiles` calls this only on machines with AVX-512.
        leaves >= 7 && features & INSTRUCTIONS == INSTRUCTIONS && unsafe { saved() } & SAVED == SAVED
    }

    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }

    /// Asks the system for permission to use tile data in this process.
    fn may_use() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const REQUEST_PERMISSION: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        let result: i64;
        // SAFETY: a system call that neither reads nor writes our memory.
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

    /// The operand of LDTILECFG.
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
        // SAFETY: reads the 64 bytes of the shape; the caller guarantees the rest.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shape, options(nostack, readonly)) }
    }

    /// # Safety
    /// The process may use tiles.
    pub(super) unsafe fn release() {
        // SAFETY: guaranteed by the caller.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// Other platforms have no tiles.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod system {
    pub(super) fn has_tiles() -> bool {
        false
    }

    pub(super) unsafe fn set_up() {}

    pub(super) unsafe fn release() {}
}
