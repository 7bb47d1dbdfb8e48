//! A block of memory, allocated once, and views into it.

use std::marker::PhantomData;
use std::ops::Range;
#[cfg(unix)]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use lockstep_core::{Bytes, DType};
use memmap2::MmapMut;

use crate::cuda::{Gpu, GpuError};
use crate::{Pool, Real};

/// Why memory could not be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    #[error("cannot allocate {wanted} of host memory: {cause}")]
    Refused { wanted: Bytes, cause: std::io::Error },
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// A zeroed block of memory. Host memory is resident: every page is touched when it is allocated, so that running out
/// of memory fails here and not in the middle of a step.
#[derive(Debug)]
pub struct Memory {
    map: Option<MmapMut>,
    /// The GPU that owns the memory; `None` for host memory.
    gpu: Option<&'static Gpu>,
    /// Where the parts of this host memory start that are pinned for a GPU.
    pinned: Vec<(&'static Gpu, usize)>,
    base: NonNull<u8>,
    bytes: Bytes,
    /// The file behind the exported part of the mapping, and the range of that part. Other processes on this host may
    /// read it.
    #[cfg(unix)]
    shared: Option<(OwnedFd, Range<usize>)>,
}

// SAFETY: `Memory` only owns the mapping. All access goes through `View`, whose contract (see there) prevents data
// races.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` only hands out views.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates `bytes`, in huge pages where the system has them, and touches every page from the threads of `pool`.
    pub fn allocate(bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        if bytes == Bytes::ZERO {
            return Ok(Memory::empty());
        }
        let refused = |cause| MemoryError::Refused { wanted: bytes, cause };
        let map = MmapMut::map_anon(length(bytes)?).map_err(refused)?;
        let memory = Memory::over(map, bytes);
        memory.touch(pool);
        Ok(memory)
    }

    /// As [`Memory::allocate`], with all of it exported ([`Memory::allocate_exporting`]).
    #[cfg(target_os = "linux")]
    pub fn allocate_shared(bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        Memory::allocate_exporting(bytes, Bytes::ZERO..bytes, pool)
    }

    /// As [`Memory::allocate`], with one part in an unnamed file ([`Memory::shared_fd`]) that other processes on this
    /// host can read if they may open it. The file never shrinks, so readers cannot fault. The rest is private to this
    /// process, and only the rest uses huge pages: few systems support them for files.
    #[cfg(target_os = "linux")]
    pub fn allocate_exporting(
        bytes: Bytes,
        exported: Range<Bytes>,
        pool: &Pool,
    ) -> Result<Memory, MemoryError> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        assert!(exported.start.0.is_multiple_of(PAGE as u64), "the exported range must start on a page");
        assert!(
            exported.start <= exported.end && exported.end <= bytes,
            "the exported range must lie in the memory"
        );
        if exported.is_empty() {
            return Memory::allocate(bytes, pool);
        }
        let refused = |cause: rustix::io::Errno| MemoryError::Refused { wanted: bytes, cause: cause.into() };
        let (whole, start, end) = (length(bytes)?, length(exported.start)?, length(exported.end)?);
        let file = memfd_create("lockstep-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(refused)?;
        ftruncate(&file, (end - start) as u64).map_err(refused)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(refused)?;
        let map = MmapMut::map_anon(whole).map_err(|cause| MemoryError::Refused { wanted: bytes, cause })?;
        let mut memory = Memory::over(map, bytes);
        // SAFETY: replaces pages inside a mapping that only this function knows. The file is new and sealed at its
        // size. Other processes only read it, and this process has agreed not to change what they are reading.
        unsafe {
            let (at, flags) = (memory.base.add(start).as_ptr().cast(), MapFlags::SHARED | MapFlags::FIXED);
            mmap(at, end - start, ProtFlags::READ | ProtFlags::WRITE, flags, &file, 0).map_err(refused)?;
        }
        memory.shared = Some((file, start..end));
        memory.touch(pool);
        Ok(memory)
    }

    /// Allocates `bytes` of a GPU's memory.
    pub fn allocate_on(gpu: &'static Gpu, bytes: Bytes) -> Result<Memory, MemoryError> {
        if bytes == Bytes::ZERO {
            return Ok(Memory::empty());
        }
        let at = gpu.allocate(bytes)?;
        let base = NonNull::new(at as *mut u8).expect("the driver never returns address zero");
        let mut memory = Memory::empty();
        (memory.gpu, memory.base, memory.bytes) = (Some(gpu), base, bytes);
        memory.view(0, bytes.0 as usize / 4, DType::U32).zero()?;
        Ok(memory)
    }

    /// Pins bytes `start..end` of this host memory, so that a GPU can copy from and to them asynchronously. Both bounds
    /// are on page boundaries, or `end` is the end of the memory; pinned parts must not overlap.
    pub fn pin(&mut self, gpu: &'static Gpu, start: usize, end: usize) -> Result<(), MemoryError> {
        let at_end = end as u64 == self.bytes.0;
        assert!(start.is_multiple_of(PAGE) && (end.is_multiple_of(PAGE) || at_end), "pins whole pages");
        assert!(self.map.is_some() && end as u64 <= self.bytes.0, "only host memory can be pinned");
        if start < end {
            // SAFETY: the start lies inside the mapping.
            gpu.pin(unsafe { self.base.add(start) }.as_ptr(), end - start)?;
            self.pinned.push((gpu, start));
        }
        Ok(())
    }

    /// The file behind the exported part.
    #[cfg(unix)]
    pub fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(|(file, _)| file.as_fd())
    }

    /// The offset of `view` in that file, if all of the view lies in the exported part.
    #[cfg(unix)]
    pub fn shared_offset(&self, view: &View<'_>) -> Option<usize> {
        let (start, (_, part)) = (self.contains(view)?, self.shared.as_ref()?);
        (start >= part.start && start + view.bytes() <= part.end).then(|| start - part.start)
    }

    /// The offset of `view` in bytes, if it lies in this memory.
    pub fn contains(&self, view: &View<'_>) -> Option<usize> {
        let offset = (view.ptr.as_ptr() as usize).checked_sub(self.base.as_ptr() as usize)?;
        let end = offset.checked_add(view.bytes())?;
        let is_ours = self.map.is_some() || self.gpu.is_some();
        (is_ours && end as u64 <= self.bytes.0).then_some(offset)
    }

    fn empty() -> Memory {
        Memory {
            map: None,
            gpu: None,
            pinned: Vec::new(),
            base: NonNull::dangling(),
            bytes: Bytes::ZERO,
            #[cfg(unix)]
            shared: None,
        }
    }

    fn over(mut map: MmapMut, bytes: Bytes) -> Memory {
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // Best effort: ordinary pages work too.
        let base = NonNull::new(map.as_mut_ptr()).expect("a mapping is never at address zero");
        let mut memory = Memory::empty();
        (memory.map, memory.base, memory.bytes) = (Some(map), base, bytes);
        memory
    }

    /// Touches every page, from all threads of the pool.
    fn touch(&self, pool: &Pool) {
        const STRIPE: usize = 8 << 20;
        let view = self.view(0, self.bytes.0 as usize / 4, DType::U32);
        pool.run(view.len().div_ceil(STRIPE / 4), &|stripe, _| {
            let start = stripe * (STRIPE / 4);
            let part = view.slice(start, (STRIPE / 4).min(view.len() - start));
            // SAFETY: stripes are disjoint and nothing else holds a view of this new mapping.
            for page in unsafe { part.as_mut::<u32>() }.chunks_mut(1024) {
                // Volatile, because the compiler could remove an ordinary store of zero over zero.
                // SAFETY: the pointer comes from a live, exclusive reference.
                unsafe { std::ptr::write_volatile(&mut page[0], 0) };
            }
        });
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The `len` elements of `dtype` that start at byte `offset`, which must be 64-byte aligned.
    pub fn view(&self, offset: usize, len: usize, dtype: DType) -> View<'_> {
        assert!(offset.is_multiple_of(64), "view at unaligned offset {offset}");
        let end = len.checked_mul(dtype.size()).and_then(|n| n.checked_add(offset));
        assert!(
            end.is_some_and(|end| end as u64 <= self.bytes.0),
            "view [{offset}, +{len} {dtype}] outside {}",
            self.bytes
        );
        debug_assert!(self.map.is_some() || self.gpu.is_some() || len == 0);
        // SAFETY: the offset was just checked to lie inside the mapping (or is 0 on an empty one).
        let ptr = unsafe { self.base.add(offset) };
        View { ptr, len, dtype, gpu: self.gpu, memory: PhantomData }
    }
}

/// Pinned and exported ranges start at a multiple of this.
const PAGE: usize = 4096;

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu {
            gpu.free(self.base.as_ptr() as u64);
        }
        for (gpu, start) in self.pinned.drain(..) {
            // SAFETY: the same offset as when it was pinned.
            gpu.unpin(unsafe { self.base.add(start) }.as_ptr());
        }
    }
}

fn length(bytes: Bytes) -> Result<usize, MemoryError> {
    let too_large = |_| MemoryError::Refused { wanted: bytes, cause: std::io::ErrorKind::OutOfMemory.into() };
    usize::try_from(bytes.0).map_err(too_large)
}

/// A typed range of a [`Memory`]. It is an address, not a borrow, as on a GPU.
///
/// Soundness rests on the plan: buffers that are alive at the same time do not overlap, and an operation waits for
/// operations of other lanes that touch the same buffer. The plan's tests check both. Operations check that their own
/// outputs do not overlap their inputs ([`View::assert_disjoint`]) before they turn views into slices.
#[derive(Clone, Copy, Debug)]
pub struct View<'m> {
    ptr: NonNull<u8>,
    len: usize,
    dtype: DType,
    /// The GPU that the address belongs to; `None` for host memory.
    gpu: Option<&'static Gpu>,
    memory: PhantomData<&'m Memory>,
}

// SAFETY: a view is an address and a length; the contract above governs its use.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

impl<'m> View<'m> {
    /// A view of no elements.
    pub fn empty() -> View<'m> {
        View {
            ptr: NonNull::<u64>::dangling().cast(),
            len: 0,
            dtype: DType::F32,
            gpu: None,
            memory: PhantomData,
        }
    }

    /// Copies all elements of `from`, which has the same length and type and does not overlap this view.
    pub fn copy_from(&self, from: &View<'_>) -> Result<(), GpuError> {
        assert_eq!(
            (self.len, self.dtype),
            (from.len, from.dtype),
            "copy between views that differ in length or type"
        );
        self.assert_disjoint(from);
        // SAFETY: both lie in live memory and do not overlap; the plan's waits keep other lanes off them.
        unsafe { copy(self, from) }
    }

    /// As [`View::copy_from`], between views of host memory, which cannot fail.
    pub fn copy_from_host(&self, from: &View<'_>) {
        self.assert_on_host();
        from.assert_on_host();
        never_fails(self.copy_from(from));
    }

    /// Whether this is a view of GPU memory.
    pub fn on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The device address of a view on a GPU.
    pub fn device_ptr(&self) -> u64 {
        debug_assert!(self.on_gpu() || self.len == 0, "device address of host memory");
        self.ptr.as_ptr() as u64
    }

    /// The same bytes as elements of another type.
    pub fn cast(&self, dtype: DType) -> View<'m> {
        assert!((self.ptr.as_ptr() as usize).is_multiple_of(dtype.size()), "{dtype} at a misaligned address");
        let bytes = self.bytes();
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are not a whole number of {dtype}");
        View { len: bytes / dtype.size(), dtype, ..*self }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements `[start, start + len)` of this view.
    #[inline]
    pub fn slice(&self, start: usize, len: usize) -> View<'m> {
        let fits = start <= self.len && len <= self.len - start;
        assert!(fits, "slice [{start}, +{len}] of a view of {} elements", self.len);
        // SAFETY: the start lies inside this view, which lies inside its memory.
        let ptr = unsafe { self.ptr.add(start * self.dtype.size()) };
        View { ptr, len, ..*self }
    }

    /// The first `len` elements.
    pub fn first(&self, len: usize) -> View<'m> {
        self.slice(0, len)
    }

    pub fn as_ptr<T>(&self) -> *mut T {
        self.ptr.as_ptr().cast()
    }

    /// Panics if the two views share a byte. Operations call it for each pair of an output and an operand that must not
    /// alias it.
    #[track_caller]
    pub fn assert_disjoint(&self, other: &View<'_>) {
        let (a, b) = (self.ptr.as_ptr() as usize, other.ptr.as_ptr() as usize);
        // Compare differences rather than ends: a difference cannot overflow.
        let disjoint = self.len == 0
            || other.len == 0
            || if a <= b { self.bytes() <= b - a } else { other.bytes() <= a - b };
        assert!(disjoint, "operands overlap: {self:?} and {other:?}");
    }

    /// Panics if the view is on a GPU: only host memory can be a slice.
    fn assert_on_host(&self) {
        assert!(self.gpu.is_none(), "the host cannot access GPU memory directly; copy it first");
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        // Cannot overflow: `Memory::view` checked it, and a view is never longer than the one it was sliced from.
        self.len * self.dtype.size()
    }

    /// The view's bytes.
    ///
    /// # Safety
    /// As [`View::as_slice`].
    pub unsafe fn as_bytes(&self) -> &'m [u8] {
        self.assert_on_host();
        // SAFETY: in bounds by construction; the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes()) }
    }

    /// The view's bytes, to be written. Every bit pattern is a valid value of every dtype.
    ///
    /// # Safety
    /// As [`View::as_mut`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_bytes_mut(&self) -> &'m mut [u8] {
        self.assert_on_host();
        // SAFETY: in bounds by construction; the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes()) }
    }

    /// The elements as a slice.
    ///
    /// # Safety
    /// `T` has the representation of the view's dtype, and nobody writes these bytes while the slice lives.
    pub unsafe fn as_slice<T>(&self) -> &'m [T] {
        self.assert_on_host();
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds and aligned by construction; the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len) }
    }

    /// The elements as a mutable slice.
    ///
    /// # Safety
    /// As [`View::as_slice`], and nobody else reads or writes these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut<T>(&self) -> &'m mut [T] {
        self.assert_on_host();
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds and aligned by construction; the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len) }
    }

    /// Copies values from the host into the view. For inputs, between steps or at their start.
    pub fn write<T: Copy>(&self, values: &[T]) -> Result<(), GpuError> {
        assert!(values.len() <= self.len, "{} values into a view of {}", values.len(), self.len);
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds; the plan's waits keep lanes off this buffer while the host writes it.
        unsafe {
            match self.gpu {
                None => std::ptr::copy_nonoverlapping(values.as_ptr(), self.as_ptr(), values.len()),
                Some(gpu) => {
                    gpu.write_bytes(self.device_ptr(), values.as_ptr().cast(), size_of_val(values))?;
                }
            }
        }
        Ok(())
    }

    /// As [`View::write`], to host memory, which cannot fail.
    pub fn write_host<T: Copy>(&self, values: &[T]) {
        self.assert_on_host();
        never_fails(self.write(values));
    }

    /// Copies values to the host. After an error the contents of `out` are unspecified.
    pub fn read<T: Copy>(&self, out: &mut [T]) -> Result<(), GpuError> {
        assert!(out.len() <= self.len, "{} values from a view of {}", out.len(), self.len);
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds; the plan's waits keep lanes off this buffer while the host reads it.
        unsafe {
            match self.gpu {
                None => std::ptr::copy_nonoverlapping(self.as_ptr(), out.as_mut_ptr(), out.len()),
                Some(gpu) => {
                    gpu.read_bytes(out.as_mut_ptr().cast(), self.device_ptr(), size_of_val(out))?;
                }
            }
        }
        Ok(())
    }

    /// As [`View::read`], from host memory, which cannot fail.
    pub fn read_host<T: Copy>(&self, out: &mut [T]) {
        self.assert_on_host();
        never_fails(self.read(out));
    }

    /// Copies values to the host as f32, whatever their storage type; codes are numbers from 0 to 255. After an error the contents of `out` are
    /// unspecified.
    pub fn read_f32(&self, out: &mut [f32]) -> Result<(), GpuError> {
        fn convert<R: Real>(view: &View<'_>, out: &mut [f32]) -> Result<(), GpuError> {
            if view.on_gpu() {
                let mut values = vec![R::from_f32(0.0); out.len()];
                view.read(&mut values)?;
                out.iter_mut().zip(&values).for_each(|(o, v)| *o = v.to_f32());
                return Ok(());
            }
            // SAFETY: as in `read`.
            let values = unsafe { view.first(out.len()).as_slice::<R>() };
            for (o, v) in out.iter_mut().zip(values) {
                *o = v.to_f32();
            }
            Ok(())
        }
        match self.dtype {
            DType::F32 => convert::<f32>(self, out),
            DType::BF16 => convert::<half::bf16>(self, out),
            DType::F16 => convert::<half::f16>(self, out),
            DType::U8 => {
                let mut codes = vec![0u8; out.len()];
                self.read(&mut codes)?;
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code.into());
                Ok(())
            }
            other => panic!("{other} is not a storage type of numbers"),
        }
    }

    /// Copies f32 values from the host, rounded to the storage type with ties to even.
    pub fn write_f32(&self, values: &[f32]) -> Result<(), GpuError> {
        match self.dtype {
            DType::F32 => self.write_rounded(values, f32::from_f32),
            DType::BF16 => self.write_rounded(values, <half::bf16 as Real>::from_f32),
            DType::F16 => self.write_rounded(values, <half::f16 as Real>::from_f32),
            DType::U8 => self.write(&values.iter().map(|value| *value as u8).collect::<Vec<u8>>()),
            other => panic!("{other} is not a float storage type"),
        }
    }

    /// Copies master parameters from the host, rounded to weights ([`Real::weight_from_f32`]).
    pub fn write_weights(&self, masters: &[f32]) -> Result<(), GpuError> {
        match self.dtype {
            DType::F32 => self.write_rounded(masters, f32::weight_from_f32),
            DType::BF16 => self.write_rounded(masters, half::bf16::weight_from_f32),
            DType::F16 => self.write_rounded(masters, half::f16::weight_from_f32),
            other => panic!("{other} is not a float storage type"),
        }
    }

    fn write_rounded<R: Real>(&self, values: &[f32], round: impl Fn(f32) -> R) -> Result<(), GpuError> {
        if self.on_gpu() {
            let values: Vec<R> = values.iter().map(|v| round(*v)).collect();
            return self.write(&values);
        }
        // SAFETY: as in `write`.
        let out = unsafe { self.first(values.len()).as_mut::<R>() };
        for (o, v) in out.iter_mut().zip(values) {
            *o = round(*v);
        }
        Ok(())
    }

    /// Sets every byte to zero.
    pub fn zero(&self) -> Result<(), GpuError> {
        // SAFETY: in bounds; the plan's waits keep lanes off this buffer. Zero bytes are a valid value of every dtype.
        unsafe {
            match self.gpu {
                None => std::ptr::write_bytes(self.ptr.as_ptr(), 0, self.bytes()),
                Some(gpu) => gpu.zero_bytes(self.device_ptr(), self.bytes())?,
            }
        }
        Ok(())
    }

    /// As [`View::zero`], of host memory, which cannot fail.
    pub fn zero_host(&self) {
        self.assert_on_host();
        never_fails(self.zero());
    }
}

/// Unwraps the result of a copy in which no GPU takes part.
#[track_caller]
fn never_fails(outcome: Result<(), GpuError>) {
    outcome.expect("a copy within host memory cannot fail");
}

/// # Safety
/// The views have the same length and do not overlap, and nobody else uses them during the call.
unsafe fn copy(to: &View<'_>, from: &View<'_>) -> Result<(), GpuError> {
    let bytes = to.bytes();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (to.gpu, from.gpu) {
            (None, None) => std::ptr::copy_nonoverlapping(from.ptr.as_ptr(), to.ptr.as_ptr(), bytes),
            (Some(gpu), None) => gpu.write_bytes(to.device_ptr(), from.as_ptr(), bytes)?,
            (None, Some(gpu)) => gpu.read_bytes(to.as_ptr(), from.device_ptr(), bytes)?,
            (Some(gpu), Some(_)) => gpu.copy_bytes(to.device_ptr(), from.device_ptr(), bytes)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_views_of_it_alias() {
        let pool = Pool::new(2);
        let memory = Memory::allocate(Bytes(1 << 20), &pool).unwrap();
        let whole = memory.view(0, 1 << 18, DType::F32);
        whole.slice(64, 2).write_host(&[1.5f32, -2.0]);
        let mut out = [9.0f32; 4];
        whole.slice(63, 4).read_host(&mut out);
        assert_eq!(out, [0.0, 1.5, -2.0, 0.0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shared_memory_is_read_through_its_file() {
        let memory = Memory::allocate_shared(Bytes(10_000), &Pool::new(1)).unwrap();
        let view = memory.view(64, 100, DType::F32);
        view.slice(3, 1).write_host(&[1.5f32]);
        let fd = memory.shared_fd().unwrap();
        let mut bytes = [0; 4];
        assert_eq!(rustix::io::pread(fd, &mut bytes, 64 + 12).unwrap(), 4);
        assert_eq!(f32::from_le_bytes(bytes), 1.5);
        assert!(rustix::fs::ftruncate(fd, 1).is_err(), "the file must not shrink");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn only_the_exported_part_is_in_the_file() {
        const PART: usize = 64 << 10;
        let exported = Bytes(PART as u64)..Bytes(2 * PART as u64);
        let memory = Memory::allocate_exporting(Bytes(3 * PART as u64), exported, &Pool::new(1)).unwrap();
        let all = memory.view(0, 3 * PART / 4, DType::F32);
        let values: Vec<f32> = (0..all.len()).map(|i| i as f32).collect();
        all.write_host(&values);
        let (mut bytes, mut back) = ([0; 8], vec![0f32; all.len()]);
        let fd = memory.shared_fd().unwrap();
        assert_eq!(
            rustix::io::pread(fd, &mut bytes, PART as u64 - 4).unwrap(),
            4,
            "the file holds only the exported part"
        );
        assert_eq!(f32::from_le_bytes(bytes[..4].try_into().unwrap()), (2 * PART / 4 - 1) as f32);
        all.read_host(&mut back);
        assert_eq!(back, values);
        let offset = |start: usize, len: usize| memory.shared_offset(&all.slice(start / 4, len / 4));
        assert_eq!((offset(PART, PART), offset(PART + 64, 8)), (Some(0), Some(64)));
        assert_eq!(
            [offset(0, 8), offset(PART - 4, 8), offset(2 * PART - 4, 8), offset(2 * PART, 8)],
            [None; 4]
        );
    }

    #[test]
    fn contains_finds_only_views_of_the_same_memory() {
        let (a, b) =
            (Memory::allocate(Bytes(8192), &Pool::new(1)), Memory::allocate(Bytes(8192), &Pool::new(1)));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!(a.contains(&a.view(4096, 1024, DType::F32)), Some(4096));
        assert_eq!(a.contains(&b.view(4096, 1024, DType::F32)), None);
        assert_eq!(a.contains(&View::empty()), None);
    }

    #[test]
    #[should_panic(expected = "operands overlap")]
    fn overlapping_views_are_refused() {
        let memory = Memory::allocate(Bytes(4096), &Pool::new(1)).unwrap();
        let view = memory.view(0, 100, DType::F32);
        view.first(10).assert_disjoint(&view.slice(9, 5));
    }

    /// The message of a call that must panic.
    fn panic_message(call: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let cause = std::panic::catch_unwind(call).expect_err("the call must panic");
        *cause.downcast::<String>().expect("a formatted message")
    }

    /// Arithmetic that overflows must not bypass the bounds check.
    #[test]
    fn huge_offsets_and_lengths_are_refused() {
        let memory = Memory::allocate(Bytes(4096), &Pool::new(1)).unwrap();
        let view = memory.view(64, 100, DType::F32);
        for (start, len) in [(usize::MAX, 2), (usize::MAX - 1, 2), (2, usize::MAX), (101, 0), (100, 1)] {
            let message = panic_message(|| _ = view.slice(start, len));
            assert!(message.starts_with(&format!("slice [{start}, +{len}]")), "{message}");
        }
        assert_eq!((view.slice(100, 0).len(), view.slice(0, 100).len()), (0, 100));
        for (offset, len) in [(64, usize::MAX), (64, usize::MAX / 4), (usize::MAX - 63, 1), (4096, 1)] {
            let message = panic_message(|| _ = memory.view(offset, len, DType::F32));
            assert!(message.contains("outside"), "{message}");
        }
    }

    #[test]
    #[should_panic(expected = "6 bytes are not a whole number of f32")]
    fn a_cast_must_use_all_bytes() {
        let memory = Memory::allocate(Bytes(4096), &Pool::new(1)).unwrap();
        memory.view(0, 3, DType::BF16).cast(DType::F32);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn a_view_outside_the_memory_is_refused() {
        let memory = Memory::allocate(Bytes(4096), &Pool::new(1)).unwrap();
        memory.view(0, 1025, DType::F32);
    }
}
