//! Matmul through cuBLASLt. An algorithm is chosen once per shape by the library's own ranking, which depends only on
//! the shape and the GPU. So runs are reproducible.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Mutex;

use lockstep_core::{Bytes, DType};

use super::driver::StreamHandle;
use super::error::GpuError;
use super::library::{LibrarySearch, function_table, open};
use super::queue::CudaQueue;
use crate::View;

pub(super) type Handle = *mut c_void;
pub(super) type Desc = *mut c_void;
pub(super) type Layout = *mut c_void;
pub(super) type Preference = *mut c_void;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Candidate {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

function_table! {
    /// Functions of `libcublasLt`.
    pub(super) struct LtTable {
        fn create = "cublasLtCreate"(*mut Handle) -> c_int;
        fn version = "cublasLtGetVersion"() -> usize;
        fn status_string = "cublasLtGetStatusString"(c_int) -> *const c_char;
        fn desc_create = "cublasLtMatmulDescCreate"(*mut Desc, c_int, c_int) -> c_int;
        fn desc_set = "cublasLtMatmulDescSetAttribute"(Desc, c_int, *const c_void, usize) -> c_int;
        fn layout_create = "cublasLtMatrixLayoutCreate"(*mut Layout, c_int, u64, u64, i64) -> c_int;
        fn preference_create = "cublasLtMatmulPreferenceCreate"(*mut Preference) -> c_int;
        fn preference_set = "cublasLtMatmulPreferenceSetAttribute"(Preference, c_int, *const c_void, usize) -> c_int;
        fn preference_destroy = "cublasLtMatmulPreferenceDestroy"(Preference) -> c_int;
        fn heuristic = "cublasLtMatmulAlgoGetHeuristic"(
            Handle, Desc, Layout, Layout, Layout, Layout, Preference, c_int, *mut Candidate, *mut c_int,
        ) -> c_int;
        fn matmul = "cublasLtMatmul"(
            Handle, Desc,
            *const c_void, *const c_void, Layout, *const c_void, Layout,
            *const c_void, *const c_void, Layout, *mut c_void, Layout,
            *const Algorithm, *mut c_void, usize, StreamHandle,
        ) -> c_int;
    }
}

const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_FAST_TF32: c_int = 77;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const PREF_WORKSPACE: c_int = 1;
const PREF_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];

/// A row-major operand: its elements, the distance between rows in elements, and whether it is used transposed.
#[derive(Clone, Copy, Debug)]
pub struct GemmOperand<'m> {
    pub view: View<'m>,
    pub stride: usize,
    pub transposed: bool,
}

/// D\[M, N\] = op(A)\[M, K\] · op(B)\[K, N\] (+ C), all row-major; A and B have the same type.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'m> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: GemmOperand<'m>,
    pub b: GemmOperand<'m>,
    /// May be D itself.
    pub c: Option<(View<'m>, usize)>,
    pub d: (View<'m>, usize),
    pub workspace: View<'m>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    strides: [usize; 4],
    transposed: [bool; 2],
    dtypes: [DType; 2],
    alignments: [u32; 4],
    workspace: usize,
    tf32: bool,
}

struct AlgorithmChoice {
    desc: Desc,
    layouts: [Layout; 4],
    algorithm: Algorithm,
    workspace: usize,
}

// SAFETY: descriptors are not modified after creation, and the library may read them from any thread.
unsafe impl Send for AlgorithmChoice {}

fn load(search: &LibrarySearch) -> Result<LtTable, GpuError> {
    LtTable::load(open("cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"], search)?)
}

/// The library, and the algorithms chosen so far.
pub struct CublasLt {
    table: LtTable,
    handle: Handle,
    chosen: Mutex<HashMap<Key, AlgorithmChoice>>,
}

// SAFETY: the handle may be used from several threads at once; the rest is behind a lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// Workspace that the library may use during a matmul.
    pub const WORKSPACE: Bytes = Bytes(32 << 20);

    /// Version and path of the library. Does not require a GPU.
    pub fn find_library(search: &LibrarySearch) -> Result<(usize, PathBuf), GpuError> {
        let table = load(search)?;
        // SAFETY: takes no arguments.
        let version = unsafe { (table.version)() };
        Ok((version, table.library.path.clone()))
    }

    /// Requires a current context.
    pub(crate) fn open(search: &LibrarySearch) -> Result<CublasLt, GpuError> {
        CublasLt::over(load(search)?)
    }

    /// As [`CublasLt::open`], with a table that is already loaded.
    pub(super) fn over(table: LtTable) -> Result<CublasLt, GpuError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes through a valid pointer.
        check(&table, "cublasLtCreate", unsafe { (table.create)(&mut handle) })?;
        Ok(CublasLt { table, handle, chosen: Mutex::default() })
    }

    pub fn path(&self) -> &std::path::Path {
        &self.table.library.path
    }

    /// The version as the library reports it: 130100 means 13.1.0.
    pub fn version(&self) -> usize {
        // SAFETY: takes no arguments.
        unsafe { (self.table.version)() }
    }

    fn choose(&self, key: &Key) -> Result<AlgorithmChoice, GpuError> {
        let [m, n, k] = key.sizes.map(|n| n as u64);
        let [a, b, c, d] = key.strides.map(|n| n as i64);
        let [trans_a, trans_b] = key.transposed;
        let [input, output] = key.dtypes.map(data_type);
        let compute =
            if key.tf32 && key.dtypes[0] == DType::F32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F };
        let table = &self.table;
        let mut desc = std::ptr::null_mut();
        // The library is column-major, so a row-major matmul is the matmul of the transposes in reverse order: its A is
        // our B.
        let shape =
            |rows: u64, cols: u64, transposed: bool| if transposed { (rows, cols) } else { (cols, rows) };
        let (a_rows, a_cols) = shape(m, k, trans_a);
        let (b_rows, b_cols) = shape(k, n, trans_b);
        let specs =
            [(input, b_rows, b_cols, b), (input, a_rows, a_cols, a), (output, n, m, c), (output, n, m, d)];
        let mut layouts = [std::ptr::null_mut(); 4];
        // SAFETY: every pointer refers to a live value of the attribute's size.
        unsafe {
            check(table, "cublasLtMatmulDescCreate", (table.desc_create)(&mut desc, compute, R_32F))?;
            for (which, transposed) in [(DESC_TRANSA, trans_b), (DESC_TRANSB, trans_a)] {
                let op = c_int::from(transposed);
                let status = (table.desc_set)(desc, which, (&raw const op).cast(), size_of::<c_int>());
                check(table, "cublasLtMatmulDescSetAttribute", status)?;
            }
            for (layout, (dtype, rows, cols, stride)) in layouts.iter_mut().zip(specs) {
                let status = (table.layout_create)(layout, dtype, rows, cols, stride);
                check(table, "cublasLtMatrixLayoutCreate", status)?;
            }
        }
        let (algorithm, workspace) = self.first_candidate(key, desc, &layouts)?;
        Ok(AlgorithmChoice { desc, layouts, algorithm, workspace })
    }

    fn first_candidate(
        &self,
        key: &Key,
        desc: Desc,
        layouts: &[Layout; 4],
    ) -> Result<(Algorithm, usize), GpuError> {
        let table = &self.table;
        let [a, b, c, d] = *layouts;
        let mut preference = std::ptr::null_mut();
        let nothing =
            Candidate { algorithm: Algorithm([0; 8]), workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let (mut found, mut count) = (nothing, 0);
        // SAFETY: as in `choose`; the buffer holds the one candidate that is requested.
        let status = unsafe {
            check(table, "cublasLtMatmulPreferenceCreate", (table.preference_create)(&mut preference))?;
            let set = |which, value: *const c_void, bytes| {
                let status = (table.preference_set)(preference, which, value, bytes);
                check(table, "cublasLtMatmulPreferenceSetAttribute", status)
            };
            let bytes = key.workspace;
            set(PREF_WORKSPACE, (&raw const bytes).cast(), size_of::<usize>())?;
            for (which, alignment) in PREF_ALIGNMENT.into_iter().zip(&key.alignments) {
                set(which, std::ptr::from_ref(alignment).cast(), size_of::<u32>())?;
            }
            let status =
                (table.heuristic)(self.handle, desc, a, b, c, d, preference, 1, &mut found, &mut count);
            // A failure here would leak a few bytes of host memory; the algorithm is valid regardless.
            (table.preference_destroy)(preference);
            status
        };
        if status != 0 || count == 0 || found.state != 0 {
            let text = status_text(table, if status != 0 { status } else { found.state });
            return Err(GpuError::NoAlgorithm { gemm: format!("{key:?}"), text });
        }
        Ok((found.algorithm, found.workspace))
    }
}

impl CudaQueue {
    /// Issues a matmul. Where K is zero, D becomes C or zero.
    pub fn gemm(&self, gemm: &Gemm) {
        let Gemm { m, n, k, a, b, c, d, workspace } = *gemm;
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return self.gemm_with_zero_depth(m, n, c, d);
        }
        assert_eq!(a.view.dtype(), b.view.dtype(), "A and B must have the same type");
        let (c_view, c_stride) = c.unwrap_or(d);
        assert_eq!(c_view.dtype(), d.0.dtype(), "C and D must have the same type");
        // The library's A is our B.
        let pointers = [b.view, a.view, c_view, d.0].map(|view| view.device_ptr());
        let key = Key {
            sizes: [m, n, k],
            strides: [a.stride, b.stride, c_stride, d.1],
            transposed: [a.transposed, b.transposed],
            dtypes: [a.view.dtype(), d.0.dtype()],
            alignments: pointers.map(|at| 1 << at.trailing_zeros().min(8)),
            workspace: workspace.bytes().min(CublasLt::WORKSPACE.0 as usize),
            tf32: self.tf32,
        };
        let issued = self.gpu.cublas_lt.issue(self, &key, pointers, c.is_some(), workspace);
        self.keep_failure(issued);
    }

    /// Sets D\[m, n\] to C or zero. Elements between rows must not change, so only contiguous rows are set in one call.
    fn gemm_with_zero_depth(&self, m: usize, n: usize, c: Option<(View, usize)>, d: (View, usize)) {
        let dense = d.1 == n && c.is_none_or(|(_, stride)| stride == n);
        let (count, elems) = if dense { (1, m * n) } else { (m, n) };
        for i in 0..count {
            let to = d.0.slice(i * d.1, elems);
            match c {
                Some((from, _)) if from.device_ptr() == d.0.device_ptr() => {}
                Some((from, stride)) => self.copy(to, from.slice(i * stride, elems)),
                None => self.zero(to),
            }
        }
    }
}

impl CublasLt {
    fn issue(
        &self,
        queue: &CudaQueue,
        key: &Key,
        [a, b, c, d]: [u64; 4],
        adds: bool,
        workspace: View,
    ) -> Result<(), GpuError> {
        let stream = queue.raw_stream()?;
        let mut all = self.chosen.lock().unwrap_or_else(|e| e.into_inner());
        if !all.contains_key(key) {
            let chosen = self.choose(key)?;
            all.insert(*key, chosen);
        }
        let AlgorithmChoice { desc, layouts, algorithm, workspace: needed } = &all[key];
        let (alpha, beta) = (1f32, if adds { 1f32 } else { 0f32 });
        debug_assert!(*needed <= workspace.bytes());
        // SAFETY: the descriptors match these operands, which lie in GPU memory and which the plan's waits give to this
        // lane; alpha and beta are read before the call returns.
        let status = unsafe {
            (self.table.matmul)(
                self.handle,
                *desc,
                (&raw const alpha).cast(),
                a as *const c_void,
                layouts[0],
                b as *const c_void,
                layouts[1],
                (&raw const beta).cast(),
                c as *const c_void,
                layouts[2],
                d as *mut c_void,
                layouts[3],
                algorithm,
                workspace.as_ptr(),
                *needed,
                stream,
            )
        };
        check(&self.table, "cublasLtMatmul", status)
    }
}

fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => R_32F,
        DType::BF16 => R_16BF,
        DType::F16 => R_16F,
        other => panic!("{other} is not a float storage type"),
    }
}

fn status_text(table: &LtTable, status: c_int) -> String {
    // SAFETY: returns a static C string for any number.
    unsafe { std::ffi::CStr::from_ptr((table.status_string)(status)) }.to_string_lossy().into_owned()
}

fn check(table: &LtTable, call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == 0 { Ok(()) } else { Err(GpuError::Call { call, text: status_text(table, status) }) }
}
