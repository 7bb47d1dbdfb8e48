//! Kernels: from sources in the binary to functions on the GPU, compiled once and kept on disk.
//!
//! A source is compiled for one element type (`REAL`) and a few numbers (head width, …) at a time. What was
//! compiled is kept under a hash of everything that went into it, so another version of this program, of the
//! compiler or of the GPU finds nothing and compiles again.

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
    name: &'static str,
    /// Bytes of each parameter, where the driver says.
    params: Option<Box<[usize]>>,
    /// The dynamic shared memory it is allowed.
    shared: AtomicU32,
}

impl Kernel {
    /// Compares a launch's arguments, by their bytes, with the parameters that the kernel declares.
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
        let index = declared.iter().zip(given).position(|(a, b)| a != b).expect("they differ");
        GpuError::ArgumentSize { kernel, index, declared: declared[index], given: given[index] }
    }

    /// A kernel that asks for nothing gets 48 KiB, what it declares itself included: so all ask, once.
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

/// More than any kernel has: parameters have 4096 bytes together.
const MOST_PARAMS: usize = 1024;

type KernelKey = (&'static str, Variant, &'static str);

/// All that was compiled or loaded so far.
pub(crate) struct Modules {
    cache: Option<KernelCache>,
    loaded: Mutex<HashMap<(&'static str, Variant), usize>>,
    kernels: Mutex<HashMap<KernelKey, &'static Kernel>>,
}

impl Modules {
    pub(crate) fn new(cache: Option<KernelCache>) -> Modules {
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
        self.enter()?;
        let module = self.module(source, variant)?;
        let (mut function, c_name) = (std::ptr::null_mut(), CString::new(name).expect("no zero byte"));
        // SAFETY: the module is loaded and stays; the name is a C string.
        let status = unsafe { (self.driver.module_function)(&mut function, module, c_name.as_ptr()) };
        self.check("cuModuleGetFunction", status)?;
        let params = self.declared_params(function)?;
        let kernel: &'static Kernel =
            Box::leak(Box::new(Kernel { function, name, params, shared: AtomicU32::new(0) }));
        kernels.insert(key, kernel);
        Ok(kernel)
    }

    /// Bytes of each parameter. `None` where the driver does not say.
    fn declared_params(&self, function: FunctionHandle) -> Result<Option<Box<[usize]>>, GpuError> {
        let Some(param_info) = self.param_info else { return Ok(None) };
        let mut sizes = Vec::new();
        for index in 0..MOST_PARAMS {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function is loaded; places for two numbers.
            match unsafe { param_info(function, index, &mut offset, &mut size) } {
                driver::SUCCESS => sizes.push(size),
                // Past the last one. All kernels here have parameters: one without is one whose are not known.
                driver::INVALID_VALUE => return Ok((!sizes.is_empty()).then(|| sizes.into())),
                driver::NOT_SUPPORTED => return Ok(None),
                status => return Err(self.check("cuFuncGetParamInfo", status).expect_err("it failed")),
            }
        }
        Ok(None)
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
        self.enter()?;
        let (cache, name) = (self.modules.cache.as_ref(), self.file_name(source, &variant));
        let found = cache.and_then(|cache| cache.find(&name));
        // Code that does not load (of another driver) is as good as none.
        let module = match found.and_then(|code| self.load_module(&code).ok()) {
            Some(module) => module,
            None => {
                let code = compile(&self.nvrtc, source, &variant, self.sm)?;
                let module = self.load_module(&code)?;
                if let Some(cache) = cache {
                    cache.keep(&name, &code);
                }
                module
            }
        };
        Ok(*loaded().entry((source.name, variant)).or_insert(module as usize) as ModuleHandle)
    }

    fn load_module(&self, code: &[u8]) -> Result<ModuleHandle, GpuError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is whole: it came from the compiler, or from a file with its hash.
        let status = unsafe { (self.driver.module_load)(&mut module, code.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        Ok(module)
    }

    /// Tells all that decides the code.
    fn file_name(&self, source: &Source, variant: &Variant) -> String {
        let mut hasher = blake3::Hasher::new();
        let (major, minor) = self.nvrtc.version;
        let options = variant.options(source, self.sm).join(" ");
        for part in [source.text, PRELUDE.text, &options, &format!("{major}.{minor}")] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        format!("{}-sm{}-{}.cubin", source.name, self.sm, &hasher.finalize().to_hex()[..32])
    }
}
