//! Loads the NCCL library.

use std::ffi::CStr;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use lockstep_device::cuda::library::open;
use lockstep_device::cuda::{GpuError, LibrarySearch};

use super::sys::{Handle, NcclTable, SUCCESS, Status, UNIQUE_ID_BYTES, UniqueId};

/// The oldest supported version in NCCL's encoding, in which 22403 means 2.24.3.
const OLDEST: u32 = 22400;

/// The loaded NCCL library. It is never unloaded, because it runs threads of its own.
#[derive(Debug)]
pub struct Nccl {
    pub(crate) table: NcclTable,
    /// Major, minor and patch.
    pub version: (u32, u32, u32),
}

impl Nccl {
    /// Opens the library, or returns it if it is already open.
    pub fn open(search: &LibrarySearch) -> Result<&'static Nccl, GpuError> {
        static OPENED: OnceLock<&'static Nccl> = OnceLock::new();
        static OPENING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = OPENING.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(nccl) = OPENED.get() {
            return Ok(nccl);
        }
        let table = NcclTable::load(open("NCCL", &["libnccl.so.2", "libnccl.so"], search)?)?;
        let mut code = 0;
        // SAFETY: NCCL writes the version to `code`.
        let status = unsafe { (table.version)(&mut code) };
        if status != SUCCESS {
            return Err(GpuError::Call { call: "ncclGetVersion", text: format!("error {status}") });
        }
        let version = version_of(code as u32)?;
        let nccl: &'static Nccl = Box::leak(Box::new(Nccl { table, version }));
        Ok(OPENED.get_or_init(|| nccl))
    }

    /// Where the library was found.
    pub fn path(&self) -> &Path {
        &self.table.library.path
    }

    /// The version in the form `2.24.3`.
    pub fn version_text(&self) -> String {
        let (major, minor, patch) = self.version;
        format!("{major}.{minor}.{patch}")
    }

    /// A new identifier that members use to find each other. The process that creates it listens until the
    /// communicator is set up.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: NCCL writes the identifier to `id`.
        match unsafe { (self.table.unique_id)(&mut id) } {
            SUCCESS => Ok(id),
            status => Err(self.text_of(status, std::ptr::null_mut())),
        }
    }

    /// The meaning of a status, together with the library's last error message.
    pub(crate) fn text_of(&self, status: Status, handle: Handle) -> String {
        // SAFETY: the first function accepts any number, the second a live handle or null. Both return null or a C
        // string that stays valid.
        let [meaning, last] = unsafe {
            [(self.table.error_string)(status), (self.table.last_error)(handle)].map(|at| {
                match at.is_null() {
                    true => String::new(),
                    false => CStr::from_ptr(at).to_string_lossy().trim().to_string(),
                }
            })
        };
        if last.is_empty() { meaning } else { format!("{meaning} ({last})") }
    }
}

/// Decodes NCCL's version number: since 2.9 it has two digits each for minor and patch.
fn version_of(code: u32) -> Result<(u32, u32, u32), GpuError> {
    let version = if code < 10_000 {
        (code / 1000, code / 100 % 10, code % 100)
    } else {
        (code / 10_000, code / 100 % 100, code % 100)
    };
    if code < OLDEST {
        let (major, minor, patch) = version;
        let found = format!("{major}.{minor}.{patch}");
        return Err(GpuError::TooOld { what: "NCCL", found, needed: "2.24" });
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded_and_old_ones_refused() {
        assert_eq!(version_of(22403), Ok((2, 24, 3)));
        assert_eq!(version_of(23203), Ok((2, 32, 3)));
        let old = version_of(22105).unwrap_err();
        assert_eq!(old.to_string(), "NCCL 2.21.5 is too old: 2.24 or newer is needed");
        assert!(matches!(version_of(2708), Err(GpuError::TooOld { found, .. }) if found == "2.7.8"));
    }

    #[test]
    fn the_library_opens_or_the_error_says_why_not() {
        match Nccl::open(&LibrarySearch::default()) {
            Ok(nccl) => assert!(nccl.version >= (2, 24, 0) && nccl.path().is_absolute(), "{nccl:?}"),
            Err(GpuError::LibraryMissing { what: "NCCL", names, why }) => {
                assert_eq!(names, "libnccl.so.2, libnccl.so");
                assert!(!why.is_empty());
            }
            Err(other) => assert!(matches!(other, GpuError::TooOld { .. }), "{other}"),
        }
    }
}
