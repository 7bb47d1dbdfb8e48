//! NVRTC: compiles CUDA C++ to machine code at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use super::error::GpuError;
use super::library::{LibrarySearch, function_table, open};

pub(super) type Program = *mut c_void;

function_table! {
    /// Functions of `libnvrtc`.
    pub(crate) struct NvrtcTable {
        fn version = "nvrtcVersion"(*mut c_int, *mut c_int) -> c_int;
        fn error_string = "nvrtcGetErrorString"(c_int) -> *const c_char;
        fn create = "nvrtcCreateProgram"(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int;
        fn destroy = "nvrtcDestroyProgram"(*mut Program) -> c_int;
        fn compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> c_int;
        fn log_size = "nvrtcGetProgramLogSize"(Program, *mut usize) -> c_int;
        fn log = "nvrtcGetProgramLog"(Program, *mut c_char) -> c_int;
        fn cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize) -> c_int;
        fn cubin = "nvrtcGetCUBIN"(Program, *mut c_char) -> c_int;
    }
}

/// The run-time compiler. It needs no GPU.
#[derive(Debug)]
pub struct Nvrtc {
    table: NvrtcTable,
    /// Major and minor version.
    pub version: (u32, u32),
}

/// A header that sources can include.
pub(crate) struct Header {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

impl Nvrtc {
    pub fn open(search: &LibrarySearch) -> Result<Nvrtc, GpuError> {
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        Nvrtc::over(NvrtcTable::load(open("NVRTC, CUDA's run-time compiler,", &names, search)?)?)
    }

    /// As [`Nvrtc::open`], with a table that is already loaded.
    pub(super) fn over(table: NvrtcTable) -> Result<Nvrtc, GpuError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes to two local variables.
        check(&table, "nvrtcVersion", unsafe { (table.version)(&mut major, &mut minor) })?;
        if major < 12 {
            return Err(GpuError::TooOld {
                what: "NVRTC",
                found: format!("{major}.{minor}"),
                needed: "12.0",
            });
        }
        Ok(Nvrtc { table, version: (major as u32, minor as u32) })
    }

    pub fn path(&self) -> &std::path::Path {
        &self.table.library.path
    }

    /// Compiles `text` to machine code. `options` are nvcc's.
    pub(crate) fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[Header],
        options: &[String],
    ) -> Result<Vec<u8>, GpuError> {
        let c = |text: &str| CString::new(text).expect("sources and options have no zero byte");
        let (text, file) = (c(text), c(&format!("{name}.cu")));
        let texts: Vec<CString> = headers.iter().map(|h| c(h.text)).collect();
        let names: Vec<CString> = headers.iter().map(|h| c(h.name)).collect();
        let options: Vec<CString> = options.iter().map(|o| c(o)).collect();
        let pointers = |all: &[CString]| -> Vec<*const c_char> { all.iter().map(|s| s.as_ptr()).collect() };
        let (texts_at, names_at, options_at) = (pointers(&texts), pointers(&names), pointers(&options));
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: every pointer refers to a C string, or to an array of them, that outlives the call.
        let status = unsafe {
            (self.table.create)(
                &mut program,
                text.as_ptr(),
                file.as_ptr(),
                headers.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        check(&self.table, "nvrtcCreateProgram", status)?;
        // SAFETY: the program was just created; options as above.
        let status = unsafe { (self.table.compile)(program, options.len() as c_int, options_at.as_ptr()) };
        let outcome = if status == 0 {
            self.cubin(program)
        } else {
            Err(GpuError::Compile { source_name: name.to_string(), log: self.log(program) })
        };
        // SAFETY: created above and not used afterwards.
        unsafe { (self.table.destroy)(&mut program) };
        outcome
    }

    fn cubin(&self, program: Program) -> Result<Vec<u8>, GpuError> {
        let mut size = 0;
        // SAFETY: the program is alive, and the buffer has the size that was reported.
        unsafe {
            check(&self.table, "nvrtcGetCUBINSize", (self.table.cubin_size)(program, &mut size))?;
            let mut code = vec![0u8; size];
            check(&self.table, "nvrtcGetCUBIN", (self.table.cubin)(program, code.as_mut_ptr().cast()))?;
            Ok(code)
        }
    }

    /// The compiler's log. A failure to read it is not reported as another error.
    fn log(&self, program: Program) -> String {
        let mut size = 0;
        // SAFETY: as in `cubin`; the log's size includes its terminating zero byte.
        unsafe {
            if (self.table.log_size)(program, &mut size) != 0 {
                return "the compiler gives no reason".into();
            }
            let mut log = vec![0u8; size.max(1)];
            if (self.table.log)(program, log.as_mut_ptr().cast()) != 0 {
                return "the compiler gives no reason".into();
            }
            String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string()
        }
    }
}

fn check(table: &NvrtcTable, call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function returns a static C string for any number.
    let text = unsafe { CStr::from_ptr((table.error_string)(status)) };
    Err(GpuError::Call { call, text: text.to_string_lossy().into_owned() })
}
