//! Kernels: from sources in the binary to functions on the GPU, compiled once and kept on disk.
//!
//! A source is compiled for one element type (`REAL`) and a few numbers (head width, …) at a time. What was
//! compiled is kept under a hash of everything that went into it, so another version of this program, of the
//! compiler or of the GPU finds nothing and compiles again.

use std::collections::HashMap;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use lockstep_core::DType;
use lockstep_core::rng::Purpose;

use super::driver::{self, FunctionHandle, ModuleHandle};
use super::error::GpuError;
use super::gpu::Gpu;
use super::nvrtc::{Header, Nvrtc};

/// What every source includes: types, conversions, reductions.
const PRELUDE: Header = Header { name: "lockstep.cuh", text: include_str!("lockstep.cuh") };

/// Bytes that kernels read and write as one, where addresses are multiples of it: `PACK_BYTES` of every source.
pub const PACK_BYTES: usize = 16;

/// What every source is compiled with besides.
const COMMON: [(&str, u32); 2] =
    [("PACK_BYTES", PACK_BYTES as u32), ("DROPOUT_PURPOSE", Purpose::Dropout as u32)];

/// The kernels of one operation, in CUDA C++.
#[derive(Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
    /// Sizes that kernels share with who launches them, by name. They are defined here alone.
    pub numbers: &'static [(&'static str, u32)],
}

/// What a source is compiled with: the element type as `REAL`, and numbers by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    pub real: DType,
    pub numbers: [(&'static str, u32); Variant::NUMBERS],
}

impl Variant {
    /// The most that a variant has.
    const NUMBERS: usize = 6;

    pub const fn of(real: DType) -> Variant {
        Variant { real, numbers: [("", 0); Variant::NUMBERS] }
    }

    /// With one more number defined.
    pub fn with(mut self, name: &'static str, value: u32) -> Variant {
        let free = self.numbers.iter_mut().find(|(name, _)| name.is_empty());
        *free.expect("a variant has no room for another number") = (name, value);
        self
    }

    fn options(&self, source: &Source, sm: u32) -> Vec<String> {
        let real = match self.real {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            other => panic!("{other} is not a float storage type"),
        };
        // The `a` names instructions of exactly this architecture.
        let arch = if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") };
        let mut options =
            vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), format!("-DREAL={real}")];
        let numbers =
            COMMON.iter().chain(source.numbers).chain(&self.numbers).filter(|(name, _)| !name.is_empty());
        options.extend(numbers.map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// Compiles a source without a GPU: for tests, and for filling the cache.
pub fn compile(nvrtc: &Nvrtc, source: &Source, variant: &Variant, sm: u32) -> Result<Vec<u8>, GpuError> {
    nvrtc.compile(source.name, source.text, &[PRELUDE], &variant.options(source, sm))
}

/// A function on the GPU.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) function: FunctionHandle,
    /// The dynamic shared memory it is allowed.
    shared: AtomicU32,
}

impl Kernel {
    /// A kernel that asks for nothing gets 48 KiB, what it declares itself included: so all ask, once.
    pub(crate) fn allow_shared(&self, gpu: &Gpu, bytes: u32) -> Result<(), GpuError> {
        if bytes <= self.shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        // SAFETY: the function is loaded; the attribute takes a number.
        let status =
            unsafe { (gpu.driver.function_set)(self.function, driver::MAX_DYNAMIC_SHARED, bytes as i32) };
        gpu.check("cuFuncSetAttribute", status)?;
        self.shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

type KernelKey = (&'static str, Variant, &'static str);

/// All that was compiled or loaded so far.
pub(crate) struct Modules {
    cache: Option<PathBuf>,
    loaded: Mutex<HashMap<(&'static str, Variant), usize>>,
    kernels: Mutex<HashMap<KernelKey, &'static Kernel>>,
}

impl Modules {
    pub(crate) fn new(cache: Option<PathBuf>) -> Modules {
        Modules { cache, loaded: Mutex::default(), kernels: Mutex::default() }
    }
}

impl Gpu {
    /// The kernel `name` of a source's variant; compiled and loaded when first asked for, then looked up.
    pub fn kernel(
        &self,
        source: &'static Source,
        variant: Variant,
        name: &'static str,
    ) -> Result<&'static Kernel, GpuError> {
        let key = (source.name, variant, name);
        let mut kernels = self.modules.kernels.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel);
        }
        let module = self.module(source, variant)?;
        let (mut function, c_name) = (std::ptr::null_mut(), CString::new(name).expect("no zero byte"));
        // SAFETY: the module is loaded and stays; the name is a C string.
        let status = unsafe { (self.driver.module_function)(&mut function, module, c_name.as_ptr()) };
        self.check("cuModuleGetFunction", status)?;
        let kernel: &'static Kernel = Box::leak(Box::new(Kernel { function, shared: AtomicU32::new(0) }));
        kernels.insert(key, kernel);
        Ok(kernel)
    }

    /// Compiles and loads what will be needed, on as many threads as the host has, so that no step waits for it.
    pub fn compile_ahead(&self, needed: &[(&'static Source, Variant)]) -> Result<(), GpuError> {
        let num_threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(needed.len());
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((source, variant)) = needed.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.module(source, *variant)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("compiling does not panic"))
        })
    }

    /// Two threads that ask for the same at once both compile it, and one of them in vain.
    fn module(&self, source: &'static Source, variant: Variant) -> Result<ModuleHandle, GpuError> {
        let loaded = || self.modules.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(module) = loaded().get(&(source.name, variant)) {
            return Ok(*module as ModuleHandle);
        }
        self.enter();
        let kept = self.modules.cache.as_ref().map(|folder| folder.join(self.file_name(source, &variant)));
        let found = kept.as_ref().and_then(|path| std::fs::read(path).ok());
        // A file that does not load (torn, or of another driver) is as good as none.
        let module = match found.and_then(|code| self.load_module(&code).ok()) {
            Some(module) => module,
            None => {
                let code = compile(&self.nvrtc, source, &variant, self.sm)?;
                let module = self.load_module(&code)?;
                if let Some(path) = &kept {
                    keep(path, &code);
                }
                module
            }
        };
        Ok(*loaded().entry((source.name, variant)).or_insert(module as usize) as ModuleHandle)
    }

    fn load_module(&self, code: &[u8]) -> Result<ModuleHandle, GpuError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is whole: it came from the compiler or from a file that was renamed when complete.
        let status = unsafe { (self.driver.module_load)(&mut module, code.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        Ok(module)
    }

    fn file_name(&self, source: &Source, variant: &Variant) -> String {
        let mut hasher = DefaultHasher::new();
        (source.text, PRELUDE.text, variant.options(source, self.sm), self.nvrtc.version).hash(&mut hasher);
        format!("{}-sm{}-{:016x}.cubin", source.name, self.sm, hasher.finish())
    }
}

/// Best effort: without the file the next run compiles again.
fn keep(path: &Path, code: &[u8]) {
    let Some(folder) = path.parent() else { return };
    // Another thread or process may be writing the same.
    let writer = (std::process::id(), std::thread::current().id());
    let partial = path.with_extension(format!("{writer:?}.partial"));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&partial, code));
    if written.and_then(|()| std::fs::rename(&partial, path)).is_err() {
        let _ = std::fs::remove_file(&partial);
    }
}
