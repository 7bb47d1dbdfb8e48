//! One block of memory, taken once, and views into it.

use std::marker::PhantomData;
use std::ops::Range;
#[cfg(unix)]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use lockstep_core::{Bytes, DType};
use memmap2::MmapMut;

use crate::cuda::{Gpu, GpuError};
use crate::{Pool, Real};

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    #[error("the system did not grant {wanted} of memory: {cause}")]
    Refused { wanted: Bytes, cause: std::io::Error },
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// A block of memory, zeroed. On the host it is resident: every page is touched when it is taken, so that running
/// out happens here and not in the middle of a step.
#[derive(Debug)]
pub struct Memory {
    map: Option<MmapMut>,
    /// Whose memory it is; the host's where `None`.
    gpu: Option<&'static Gpu>,
    /// Where parts of this host memory start that are pinned for a GPU.
    pinned: Vec<(&'static Gpu, usize)>,
    base: NonNull<u8>,
    bytes: Bytes,
    /// The file behind a part of the mapping, which other processes of this host may read, and that part.
    #[cfg(unix)]
    shared: Option<(OwnedFd, Range<usize>)>,
}

// SAFETY: `Memory` only owns the mapping. All access goes through `View`, whose contract (see there)
// is what keeps threads from racing.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` gives out views and nothing else.
unsafe impl Sync for Memory {}

impl Memory {
    /// Takes `bytes`, in huge pages where the system has them, and touches every page from `pool`.
    pub fn take(bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        if bytes == Bytes::ZERO {
            return Ok(Memory::empty());
        }
        let refused = |cause| MemoryError::Refused { wanted: bytes, cause };
        let map = MmapMut::map_anon(length(bytes)?).map_err(refused)?;
        let memory = Memory::over(map, bytes);
        memory.touch(pool);
        Ok(memory)
    }

    /// As [`Memory::take`], all of it readable by others: [`Memory::take_lending`].
    #[cfg(target_os = "linux")]
    pub fn take_shared(bytes: Bytes, pool: &Pool) -> Result<Memory, MemoryError> {
        Memory::take_lending(bytes, Bytes::ZERO..bytes, pool)
    }

    /// As [`Memory::take`], with a part in a file without a name ([`Memory::shared_fd`]) that other processes of this
    /// host can read where they may open it. It never shrinks, so that nobody who reads it can fault. The rest is
    /// this process's own, and alone in huge pages: few systems have them for files.
    #[cfg(target_os = "linux")]
    pub fn take_lending(bytes: Bytes, lent: Range<Bytes>, pool: &Pool) -> Result<Memory, MemoryError> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        assert!(lent.start.0.is_multiple_of(PAGE as u64), "a mapping starts on a page");
        assert!(lent.start <= lent.end && lent.end <= bytes, "a part of the memory is lent");
        if lent.is_empty() {
            return Memory::take(bytes, pool);
        }
        let refused = |cause: rustix::io::Errno| MemoryError::Refused { wanted: bytes, cause: cause.into() };
        let (whole, start, end) = (length(bytes)?, length(lent.start)?, length(lent.end)?);
        let file = memfd_create("lockstep-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(refused)?;
        ftruncate(&file, (end - start) as u64).map_err(refused)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(refused)?;
        let map = MmapMut::map_anon(whole).map_err(|cause| MemoryError::Refused { wanted: bytes, cause })?;
        let mut memory = Memory::over(map, bytes);
        // SAFETY: replaces pages of a mapping that is this function's alone, and stays inside it. The file is new,
        // sealed at its size, and only read by others; they read what this process has agreed with them not to
        // change meanwhile.
        unsafe {
            let (at, flags) = (memory.base.add(start).as_ptr().cast(), MapFlags::SHARED | MapFlags::FIXED);
            mmap(at, end - start, ProtFlags::READ | ProtFlags::WRITE, flags, &file, 0).map_err(refused)?;
        }
        memory.shared = Some((file, start..end));
        memory.touch(pool);
        Ok(memory)
    }

    /// Takes `bytes` of a GPU's memory.
    pub fn take_on(gpu: &'static Gpu, bytes: Bytes) -> Result<Memory, MemoryError> {
        if bytes == Bytes::ZERO {
            return Ok(Memory::empty());
        }
        let at = gpu.take_memory(bytes)?;
        let base = NonNull::new(at as *mut u8).expect("the driver grants no memory at address zero");
        let mut memory = Memory::empty();
        (memory.gpu, memory.base, memory.bytes) = (Some(gpu), base, bytes);
        memory.view(0, bytes.0 as usize / 4, DType::U32).zero()?;
        Ok(memory)
    }

    /// Pins the bytes from `start` to `end` of this host memory, so that a GPU copies from and to them beside
    /// other work. Both are on pages, or the end is the memory's own; parts do not overlap.
    pub fn pin(&mut self, gpu: &'static Gpu, start: usize, end: usize) -> Result<(), MemoryError> {
        let at_end = end as u64 == self.bytes.0;
        assert!(start.is_multiple_of(PAGE) && (end.is_multiple_of(PAGE) || at_end), "pages are pinned");
        assert!(self.map.is_some() && end as u64 <= self.bytes.0, "the host's own memory is pinned");
        if start < end {
            // SAFETY: the start lies inside the mapping.
            gpu.pin(unsafe { self.base.add(start) }.as_ptr(), end - start)?;
            self.pinned.push((gpu, start));
        }
        Ok(())
    }

    /// The file behind what others may read.
    #[cfg(unix)]
    pub fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(|(file, _)| file.as_fd())
    }

    /// The byte of that file at which `view` starts, if all of it lies there.
    #[cfg(unix)]
    pub fn shared_offset(&self, view: &View<'_>) -> Option<usize> {
        let (start, (_, part)) = (self.contains(view)?, self.shared.as_ref()?);
        (start >= part.start && start + view.bytes() <= part.end).then(|| start - part.start)
    }

    /// The byte at which `view` starts, if it lies in this memory.
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
        let _ = map.advise(memmap2::Advice::HugePage); // A wish; plain pages work too.
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
                // A volatile write: an ordinary store of zero over zero could be removed.
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

/// What is pinned starts on a page.
const PAGE: usize = 4096;

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu {
            gpu.give_memory(self.base.as_ptr() as u64);
        }
        for (gpu, start) in self.pinned.drain(..) {
            // SAFETY: as where it was pinned.
            gpu.unpin(unsafe { self.base.add(start) }.as_ptr());
        }
    }
}

fn length(bytes: Bytes) -> Result<usize, MemoryError> {
    let too_large = |_| MemoryError::Refused { wanted: bytes, cause: std::io::ErrorKind::OutOfMemory.into() };
    usize::try_from(bytes.0).map_err(too_large)
}

/// A typed range of a [`Memory`]: an address, not a borrow, as on a GPU.
///
/// Whoever runs operations follows a plan in which buffers that are alive together do not overlap, and
/// in which an operation on another lane that touches the same buffer is waited for; the plan's tests
/// hold it to that. Operations check that their own outputs do not overlap their inputs
/// ([`View::assert_apart`]) before they turn views into slices.
#[derive(Clone, Copy, Debug)]
pub struct View<'m> {
    ptr: NonNull<u8>,
    len: usize,
    dtype: DType,
    /// The GPU that the address is of; the host's where `None`.
    gpu: Option<&'static Gpu>,
    memory: PhantomData<&'m Memory>,
}

// SAFETY: a view is an address and a length; using it is governed by the contract above.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

impl<'m> View<'m> {
    /// No elements of no memory.
    pub fn empty() -> View<'m> {
        View {
            ptr: NonNull::<u64>::dangling().cast(),
            len: 0,
            dtype: DType::F32,
            gpu: None,
            memory: PhantomData,
        }
    }

    /// Copies all of `from`, which has as many elements of the same type and shares no byte with this.
    pub fn copy_from(&self, from: &View<'_>) -> Result<(), GpuError> {
        assert_eq!((self.len, self.dtype), (from.len, from.dtype), "a copy between views that differ");
        self.assert_apart(from);
        // SAFETY: both lie in live memory, do not overlap, and are quiet by the plan's waits.
        unsafe { copy(self, from) }
    }

    /// As [`View::copy_from`], between views of the host's memory, where nothing can fail.
    pub fn copy_from_host(&self, from: &View<'_>) {
        self.assert_on_host();
        from.assert_on_host();
        never_fails(self.copy_from(from));
    }

    /// Whether the address is a GPU's.
    pub fn on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The address, of a view on a GPU.
    pub fn device_ptr(&self) -> u64 {
        debug_assert!(self.on_gpu() || self.len == 0, "an address of the host's memory");
        self.ptr.as_ptr() as u64
    }

    /// The same bytes as elements of another type.
    pub fn cast(&self, dtype: DType) -> View<'m> {
        assert!((self.ptr.as_ptr() as usize).is_multiple_of(dtype.size()), "{dtype} at an odd address");
        let bytes = self.bytes();
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are no whole number of {dtype}");
        View { len: bytes / dtype.size(), dtype, ..*self }
    }

    /// Elements.
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

    /// Panics if the two views share a byte. Operations call it on each output against each input that
    /// may not alias it.
    #[track_caller]
    pub fn assert_apart(&self, other: &View<'_>) {
        let (a, b) = (self.ptr.as_ptr() as usize, other.ptr.as_ptr() as usize);
        // Differences, not ends: a difference cannot overflow.
        let apart = self.len == 0
            || other.len == 0
            || if a <= b { self.bytes() <= b - a } else { other.bytes() <= a - b };
        assert!(apart, "operands overlap: {self:?} and {other:?}");
    }

    /// Slices are of the host's memory.
    fn assert_on_host(&self) {
        assert!(self.gpu.is_none(), "the host reads a GPU's memory by copies");
    }

    /// Bytes that the view spans.
    pub fn bytes(&self) -> usize {
        // Cannot overflow: `Memory::view` checked it, and no view is longer than the one it was cut from.
        self.len * self.dtype.size()
    }

    /// The view's bytes.
    ///
    /// # Safety
    /// As [`View::as_slice`].
    pub unsafe fn as_bytes(&self) -> &'m [u8] {
        self.assert_on_host();
        // SAFETY: in bounds by construction; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes()) }
    }

    /// The view's bytes, to be written. What is written must be a valid value of the dtype; any bits are.
    ///
    /// # Safety
    /// As [`View::as_mut`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_bytes_mut(&self) -> &'m mut [u8] {
        self.assert_on_host();
        // SAFETY: in bounds by construction; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes()) }
    }

    /// Reads the view as a slice.
    ///
    /// # Safety
    /// `T` has the view's dtype's representation, and nobody writes these bytes while the slice lives.
    pub unsafe fn as_slice<T>(&self) -> &'m [T] {
        self.assert_on_host();
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds and aligned by construction; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len) }
    }

    /// Writes through the view as a slice.
    ///
    /// # Safety
    /// As [`View::as_slice`], and nobody else reads or writes these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut<T>(&self) -> &'m mut [T] {
        self.assert_on_host();
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds and aligned by construction; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len) }
    }

    /// Copies host values in. For inputs, between steps or at their start.
    pub fn write<T: Copy>(&self, values: &[T]) -> Result<(), GpuError> {
        assert!(values.len() <= self.len, "{} values into a view of {}", values.len(), self.len);
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds; lanes are quiet on this buffer while the host writes it, by the plan's waits.
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

    /// As [`View::write`], to the host's memory, where nothing can fail.
    pub fn write_host<T: Copy>(&self, values: &[T]) {
        self.assert_on_host();
        never_fails(self.write(values));
    }

    /// Copies values out to the host. After an error `out` holds anything.
    pub fn read<T: Copy>(&self, out: &mut [T]) -> Result<(), GpuError> {
        assert!(out.len() <= self.len, "{} values from a view of {}", out.len(), self.len);
        assert_eq!(size_of::<T>(), self.dtype.size(), "wrong element type for {}", self.dtype);
        // SAFETY: in bounds; lanes are quiet on this buffer while the host reads it, by the plan's waits.
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

    /// As [`View::read`], of the host's memory, where nothing can fail.
    pub fn read_host<T: Copy>(&self, out: &mut [T]) {
        self.assert_on_host();
        never_fails(self.read(out));
    }

    /// Copies values out as f32, whatever they are stored as. After an error `out` holds anything.
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
            other => panic!("{other} is not a float storage type"),
        }
    }

    /// Copies f32 values in, rounding to the storage type.
    pub fn write_f32(&self, values: &[f32]) -> Result<(), GpuError> {
        fn convert<R: Real>(view: &View<'_>, values: &[f32]) -> Result<(), GpuError> {
            if view.on_gpu() {
                let values: Vec<R> = values.iter().map(|v| R::from_f32(*v)).collect();
                return view.write(&values);
            }
            // SAFETY: as in `write`.
            let out = unsafe { view.first(values.len()).as_mut::<R>() };
            for (o, v) in out.iter_mut().zip(values) {
                *o = R::from_f32(*v);
            }
            Ok(())
        }
        match self.dtype {
            DType::F32 => convert::<f32>(self, values),
            DType::BF16 => convert::<half::bf16>(self, values),
            DType::F16 => convert::<half::f16>(self, values),
            other => panic!("{other} is not a float storage type"),
        }
    }

    /// Sets every byte to zero.
    pub fn zero(&self) -> Result<(), GpuError> {
        // SAFETY: in bounds; quiet by the plan's waits. Zero bytes are a valid value of every dtype.
        unsafe {
            match self.gpu {
                None => std::ptr::write_bytes(self.ptr.as_ptr(), 0, self.bytes()),
                Some(gpu) => gpu.zero_bytes(self.device_ptr(), self.bytes())?,
            }
        }
        Ok(())
    }

    /// As [`View::zero`], of the host's memory, where nothing can fail.
    pub fn zero_host(&self) {
        self.assert_on_host();
        never_fails(self.zero());
    }
}

/// The outcome of a copy that no GPU takes part in.
#[track_caller]
fn never_fails(outcome: Result<(), GpuError>) {
    outcome.expect("a copy in the host's memory does not fail");
}

/// # Safety
/// Views of one length that do not overlap, at rest.
unsafe fn copy(to: &View<'_>, from: &View<'_>) -> Result<(), GpuError> {
    let bytes = to.bytes();
    // SAFETY: the caller's promise.
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
    fn memory_is_zeroed_and_views_see_each_other_s_writes() {
        let pool = Pool::new(2);
        let memory = Memory::take(Bytes(1 << 20), &pool).unwrap();
        let whole = memory.view(0, 1 << 18, DType::F32);
        whole.slice(64, 2).write_host(&[1.5f32, -2.0]);
        let mut out = [9.0f32; 4];
        whole.slice(63, 4).read_host(&mut out);
        assert_eq!(out, [0.0, 1.5, -2.0, 0.0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shared_memory_is_read_through_its_file() {
        let memory = Memory::take_shared(Bytes(10_000), &Pool::new(1)).unwrap();
        let view = memory.view(64, 100, DType::F32);
        view.slice(3, 1).write_host(&[1.5f32]);
        let fd = memory.shared_fd().unwrap();
        let mut bytes = [0; 4];
        assert_eq!(rustix::io::pread(fd, &mut bytes, 64 + 12).unwrap(), 4);
        assert_eq!(f32::from_le_bytes(bytes), 1.5);
        assert!(rustix::fs::ftruncate(fd, 1).is_err(), "it must not shrink");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_part_is_lent_and_the_rest_is_not() {
        const LENT: usize = 64 << 10;
        let lent = Bytes(LENT as u64)..Bytes(2 * LENT as u64);
        let memory = Memory::take_lending(Bytes(3 * LENT as u64), lent, &Pool::new(1)).unwrap();
        let all = memory.view(0, 3 * LENT / 4, DType::F32);
        let values: Vec<f32> = (0..all.len()).map(|i| i as f32).collect();
        all.write_host(&values);
        let (mut bytes, mut back) = ([0; 8], vec![0f32; all.len()]);
        let fd = memory.shared_fd().unwrap();
        assert_eq!(
            rustix::io::pread(fd, &mut bytes, LENT as u64 - 4).unwrap(),
            4,
            "the file is the part alone"
        );
        assert_eq!(f32::from_le_bytes(bytes[..4].try_into().unwrap()), (2 * LENT / 4 - 1) as f32);
        all.read_host(&mut back);
        assert_eq!(back, values);
        let offset = |start: usize, len: usize| memory.shared_offset(&all.slice(start / 4, len / 4));
        assert_eq!((offset(LENT, LENT), offset(LENT + 64, 8)), (Some(0), Some(64)));
        assert_eq!(
            [offset(0, 8), offset(LENT - 4, 8), offset(2 * LENT - 4, 8), offset(2 * LENT, 8)],
            [None; 4]
        );
    }

    #[test]
    fn a_memory_knows_its_own_views() {
        let (a, b) = (Memory::take(Bytes(8192), &Pool::new(1)), Memory::take(Bytes(8192), &Pool::new(1)));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!(a.contains(&a.view(4096, 1024, DType::F32)), Some(4096));
        assert_eq!(a.contains(&b.view(4096, 1024, DType::F32)), None);
        assert_eq!(a.contains(&View::empty()), None);
    }

    #[test]
    #[should_panic(expected = "operands overlap")]
    fn overlap_is_found() {
        let memory = Memory::take(Bytes(4096), &Pool::new(1)).unwrap();
        let view = memory.view(0, 100, DType::F32);
        view.first(10).assert_apart(&view.slice(9, 5));
    }

    /// What a call says when it panics.
    fn refusal(call: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let cause = std::panic::catch_unwind(call).expect_err("the call must be refused");
        *cause.downcast::<String>().expect("a message with numbers in it")
    }

    /// Sums that overflow are no way around a bound.
    #[test]
    fn huge_starts_and_lengths_are_refused_by_name() {
        let memory = Memory::take(Bytes(4096), &Pool::new(1)).unwrap();
        let view = memory.view(64, 100, DType::F32);
        for (start, len) in [(usize::MAX, 2), (usize::MAX - 1, 2), (2, usize::MAX), (101, 0), (100, 1)] {
            let message = refusal(|| _ = view.slice(start, len));
            assert!(message.starts_with(&format!("slice [{start}, +{len}]")), "{message}");
        }
        assert_eq!((view.slice(100, 0).len(), view.slice(0, 100).len()), (0, 100));
        for (offset, len) in [(64, usize::MAX), (64, usize::MAX / 4), (usize::MAX - 63, 1), (4096, 1)] {
            let message = refusal(|| _ = memory.view(offset, len, DType::F32));
            assert!(message.contains("outside"), "{message}");
        }
    }

    #[test]
    #[should_panic(expected = "6 bytes are no whole number of f32")]
    fn a_cast_loses_nothing() {
        let memory = Memory::take(Bytes(4096), &Pool::new(1)).unwrap();
        memory.view(0, 3, DType::BF16).cast(DType::F32);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn a_view_stays_inside() {
        let memory = Memory::take(Bytes(4096), &Pool::new(1)).unwrap();
        memory.view(0, 1025, DType::F32);
    }
}
