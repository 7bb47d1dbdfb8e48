//! Kernels: from source text in the binary to functions on the GPU, compiled once and cached on disk.
//!
//! A source is compiled for one element type (`REAL`) and a few constants (head width, …) at a time. Compiled code is
//! cached under a hash of everything that went into it, so another version of this program, of the compiler or of the
//! GPU does not find it and compiles again.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use lockstep_core::DType;
use lockstep_core::rng::Purpose;

use super::cache::KernelCache;
use super::driver::{self, FunctionHandle, ModuleHandle};
use super::error::GpuError;
use super::gpu::Gpu;
use super::nvrtc::{Header, Nvrtc};

/// The header that every source includes: types, conversions, reductions.
const PRELUDE: Header = Header { name: "lockstep.cuh", text: include_str!("lockstep.cuh") };

/// Bytes of a vectorized load or store; the address must be a multiple of it. `VECTOR_BYTES` in every source.
pub const VECTOR_BYTES: usize = 16;

/// Constants that every source is compiled with.
const COMMON: [(&str, u32); 2] =
    [("VECTOR_BYTES", VECTOR_BYTES as u32), ("DROPOUT_PURPOSE", Purpose::Dropout as u32)];

/// The kernels of one operation, in CUDA C++.
#[derive(Debug)]
pub struct KernelSource {
    pub name: &'static str,
    pub text: &'static str,
    /// Constants that the kernels share with their launch code, by name. Kernels must not define them again.
    pub defines: &'static [(&'static str, u32)],
}

/// What a source is compiled for: the element type (`REAL`) and constants by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    pub real: DType,
    pub defines: [(&'static str, u32); KernelVariant::MAX_DEFINES],
}

impl KernelVariant {
    /// The maximum number of constants of a variant.
    const MAX_DEFINES: usize = 6;

    pub const fn of(real: DType) -> KernelVariant {
        KernelVariant { real, defines: [("", 0); KernelVariant::MAX_DEFINES] }
    }

    /// Defines one more constant.
    pub fn with(mut self, name: &'static str, value: u32) -> KernelVariant {
        let free = self.defines.iter_mut().find(|(name, _)| name.is_empty());
        *free.expect("a variant has at most MAX_DEFINES constants") = (name, value);
        self
    }

    fn options(&self, source: &KernelSource, sm: u32) -> Vec<String> {
        let real = match self.real {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            other => panic!("{other} is not a float storage type"),
        };
        // The suffix `a` enables instructions that only this exact architecture has.
        let arch = if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") };
        let mut options =
            vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), format!("-DREAL={real}")];
        let defines =
            COMMON.iter().chain(source.defines).chain(&self.defines).filter(|(name, _)| !name.is_empty());
        options.extend(defines.map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// Compiles a source without a GPU: for tests, and to fill the cache.
pub fn compile(
    nvrtc: &Nvrtc,
    source: &KernelSource,
    variant: &KernelVariant,
    sm: u32,
) -> Result<Vec<u8>, GpuError> {
    nvrtc.compile(source.name, source.text, &[PRELUDE], &variant.options(source, sm))
}

/// A function on the GPU.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) function: FunctionHandle,
    name: &'static str,
    /// Bytes of each parameter, if the driver reports them.
    params: Option<Box<[usize]>>,
    /// The dynamic shared memory that it may currently use.
    shared: AtomicU32,
}

impl Kernel {
    /// Compares the sizes of a launch's arguments with those of the kernel's parameters.
    #[inline]
    pub(crate) fn check_args<const N: usize>(&self, given: [usize; N]) -> Result<(), GpuError> {
        match &self.params {
            Some(declared) if **declared != given => Err(self.wrong_args(declared, &given)),
            _ => Ok(()),
        }
    }

    #[cold]
    fn wrong_args(&self, declared: &[usize], given: &[usize]) -> GpuError {
        let kernel = self.name;
        if declared.len() != given.len() {
            return GpuError::ArgumentCount { kernel, declared: declared.len(), given: given.len() };
        }
        let index = declared.iter().zip(given).position(|(a, b)| a != b).expect("some size differs");
        GpuError::ArgumentSize { kernel, index, declared: declared[index], given: given[index] }
    }

    /// Raises the kernel's limit of dynamic shared memory, once. The default is 48 KiB, including static shared memory.
    pub(crate) fn allow_shared(&self, gpu: &Gpu, bytes: u32) -> Result<(), GpuError> {
        if bytes <= self.shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        gpu.enter()?;
        // SAFETY: the function is loaded; the attribute takes a number.
        let status =
            unsafe { (gpu.driver.function_set)(self.function, driver::MAX_DYNAMIC_SHARED, bytes as i32) };
        gpu.check("cuFuncSetAttribute", status)?;
        self.shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// More than any kernel can have: parameters are limited to 4096 bytes in total.
const MAX_PARAMS: usize = 1024;

type KernelKey = (&'static str, KernelVariant, &'static str);

/// Everything that was compiled or loaded so far.
pub(crate) struct Modules {
    cache: Option<KernelCache>,
    loaded: Mutex<HashMap<(&'static str, KernelVariant), usize>>,
    kernels: Mutex<HashMap<KernelKey, &'static Kernel>>,
}

impl Modules {
    pub(crate) fn new(cache: Option<KernelCache>) -> Modules {
        Modules { cache, loaded: Mutex::default(), kernels: Mutex::default() }
    }
}

impl Gpu {
    /// The kernel `name` of a source's variant. Compiled and loaded on first use, then looked up.
    pub fn kernel(
        &self,
        source: &'static KernelSource,
        variant: KernelVariant,
        name: &'static str,
    ) -> Result<&'static Kernel, GpuError> {
        let key = (source.name, variant, name);
        let mut kernels = self.modules.kernels.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel);
        }
        self.enter()?;
        let module = self.module(source, variant)?;
        let (mut function, c_name) =
            (std::ptr::null_mut(), CString::new(name).expect("a name has no zero byte"));
        // SAFETY: the module is loaded and never unloaded; the name is a C string.
        let status = unsafe { (self.driver.module_function)(&mut function, module, c_name.as_ptr()) };
        self.check("cuModuleGetFunction", status)?;
        let params = self.declared_params(function)?;
        let kernel: &'static Kernel =
            Box::leak(Box::new(Kernel { function, name, params, shared: AtomicU32::new(0) }));
        kernels.insert(key, kernel);
        Ok(kernel)
    }

    /// Bytes of each parameter. `None` if the driver does not report them.
    fn declared_params(&self, function: FunctionHandle) -> Result<Option<Box<[usize]>>, GpuError> {
        let Some(param_info) = self.param_info else { return Ok(None) };
        let mut sizes = Vec::new();
        for index in 0..MAX_PARAMS {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function is loaded; writes to two local variables.
            match unsafe { param_info(function, index, &mut offset, &mut size) } {
                driver::SUCCESS => sizes.push(size),
                // Past the last parameter. All our kernels have parameters, so none at all means that they are unknown.
                driver::INVALID_VALUE => return Ok((!sizes.is_empty()).then(|| sizes.into())),
                driver::NOT_SUPPORTED => return Ok(None),
                status => {
                    return Err(self
                        .check("cuFuncGetParamInfo", status)
                        .expect_err("the status is an error"));
                }
            }
        }
        Ok(None)
    }

    /// Compiles and loads everything in `needed` on all host threads, so that no step waits for it.
    pub fn compile_ahead(&self, needed: &[(&'static KernelSource, KernelVariant)]) -> Result<(), GpuError> {
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

    /// If two threads ask for the same module at once, both compile it and one result is dropped.
    fn module(
        &self,
        source: &'static KernelSource,
        variant: KernelVariant,
    ) -> Result<ModuleHandle, GpuError> {
        let loaded = || self.modules.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(module) = loaded().get(&(source.name, variant)) {
            return Ok(*module as ModuleHandle);
        }
        self.enter()?;
        let (cache, name) = (self.modules.cache.as_ref(), self.file_name(source, &variant));
        let found = cache.and_then(|cache| cache.load(&name));
        // Code that does not load, for example after a change of driver, counts as missing.
        let module = match found.and_then(|code| self.load_module(&code).ok()) {
            Some(module) => module,
            None => {
                let code = compile(&self.nvrtc, source, &variant, self.sm)?;
                let module = self.load_module(&code)?;
                if let Some(cache) = cache {
                    cache.store(&name, &code);
                }
                module
            }
        };
        Ok(*loaded().entry((source.name, variant)).or_insert(module as usize) as ModuleHandle)
    }

    fn load_module(&self, code: &[u8]) -> Result<ModuleHandle, GpuError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is complete: it came from the compiler, or from a file whose hash was verified.
        let status = unsafe { (self.driver.module_load)(&mut module, code.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        Ok(module)
    }

    /// A cache file name: a hash of everything that determines the code.
    fn file_name(&self, source: &KernelSource, variant: &KernelVariant) -> String {
        let mut hasher = blake3::Hasher::new();
        let (major, minor) = self.nvrtc.version;
        let options = variant.options(source, self.sm).join(" ");
        for part in [source.text, PRELUDE.text, &options, &format!("{major}.{minor}")] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        format!("{}-sm{}-{}.cubin", source.name, self.sm, &hasher.finalize().to_hex()[..32])
    }
}
