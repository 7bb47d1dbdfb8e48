//! Loads the MPI library.

use std::ffi::c_int;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use lockstep_device::cuda::LibrarySearch;
use lockstep_device::cuda::library::open;

use super::sys::{ERROR_STRING_BYTES, MpiTable, SUCCESS, Status, TRUNCATED, VERSION_STRING_BYTES};
use crate::error::CommError;

/// The names of the standard ABI's library: `.1` is that of MPI 5, `.0` that of libraries from before its release.
const NAMES: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so.0"];

/// The longest name of a library that is shown.
const MAX_NAME: usize = 60;

/// The loaded MPI library. It is never unloaded. Loading it does not initialise MPI.
#[derive(Debug)]
pub struct Mpi {
    pub(crate) table: MpiTable,
    /// The name and version that the library gives itself, such as `MPICH 5.0.2`.
    pub version: String,
}

impl Mpi {
    /// Opens the library, or returns it if it is already open.
    pub fn open(search: &LibrarySearch) -> Result<&'static Mpi, CommError> {
        static OPENED: OnceLock<&'static Mpi> = OnceLock::new();
        static OPENING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = OPENING.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(mpi) = OPENED.get() {
            return Ok(mpi);
        }
        let mpi: &'static Mpi = Box::leak(Box::new(load(search)?));
        Ok(OPENED.get_or_init(|| mpi))
    }

    /// Where the library was found.
    pub fn path(&self) -> &Path {
        &self.table.library.path
    }

    /// The meaning of a status, and whether it says that ranks disagree on the size of a message.
    pub(crate) fn meaning_of(&self, status: Status) -> (String, bool) {
        let (mut text, mut len, mut class) = ([0u8; ERROR_STRING_BYTES], 0, 0);
        // SAFETY: the buffer has the size that the standard asks for; both functions accept any status.
        let known = unsafe {
            [
                (self.table.error_string)(status, text.as_mut_ptr().cast(), &mut len),
                (self.table.error_class)(status, &mut class),
            ]
        };
        match known {
            [SUCCESS, SUCCESS] => (printable(&text, len), class == TRUNCATED),
            _ => (format!("error {status}"), false),
        }
    }
}

fn load(search: &LibrarySearch) -> Result<Mpi, CommError> {
    let setup = |why: String| CommError::Setup { what: "MPI", why };
    let library =
        open("a library with MPI's standard ABI", &NAMES, search).map_err(|e| setup(e.to_string()))?;
    let table = MpiTable::load(library).map_err(|e| setup(e.to_string()))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the standard allows this call before MPI is initialised; it writes two numbers.
    let status = unsafe { (table.abi_version)(&mut major, &mut minor) };
    let path = table.library.path.display();
    // Libraries from before the release of the standard answer 0.
    if status != SUCCESS || !(0..=1).contains(&major) {
        return Err(setup(format!("{path} has version {major}.{minor} of MPI's ABI, but 1 is needed")));
    }
    let (mut text, mut len) = (vec![0u8; VERSION_STRING_BYTES], 0);
    // SAFETY: as above; the buffer has the size that the standard asks for.
    match unsafe { (table.library_version)(text.as_mut_ptr().cast(), &mut len) } {
        SUCCESS => Ok(Mpi { version: short_name(&printable(&text, len)), table }),
        status => Err(setup(format!("{path} does not know its version (error {status})"))),
    }
}

/// The text that a library has written, of which control characters are left out, except the ends of lines.
fn printable(text: &[u8], len: c_int) -> String {
    let len = usize::try_from(len).unwrap_or_default().min(text.len());
    let text = String::from_utf8_lossy(&text[..len]);
    text.trim_matches('\0').trim().chars().filter(|c| !c.is_control() || *c == '\n').collect()
}

/// The first line of a version text, without the words between name and number: `MPICH Version:  5.0.2` and more lines
/// become `MPICH 5.0.2`.
fn short_name(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let line = line.split(',').next().unwrap_or_default();
    let words: Vec<&str> =
        line.split_whitespace().filter(|word| !matches!(*word, "Version:" | "version:")).collect();
    match words.join(" ").chars().take(MAX_NAME).collect::<String>() {
        name if name.is_empty() => "MPI of an unknown version".into(),
        name => name,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn refused(folder: &Path) -> String {
        match load(&LibrarySearch::only(folder.to_path_buf())) {
            Err(CommError::Setup { what: "MPI", why }) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn missing_and_wrong_libraries_are_errors_that_name_them() {
        let folder = tempfile::tempdir().unwrap();
        let nothing = refused(folder.path());
        assert!(nothing.contains("looked for libmpi_abi.so.1, libmpi_abi.so.0"), "{nothing}");
        assert!(nothing.contains(&folder.path().display().to_string()), "{nothing}");

        let file = folder.path().join("libmpi_abi.so.1");
        std::fs::write(&file, "not a library").unwrap();
        let text = refused(folder.path());
        assert!(text.contains(&file.display().to_string()), "{text}");

        // A library of another kind: the C library.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let c_library = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| {
            let name = path.rsplit('/').next().unwrap_or_default();
            name.starts_with("libc.so") || name.starts_with("libc-") || name.starts_with("ld-musl")
        });
        let Some(c_library) = c_library.map(PathBuf::from) else {
            println!("skipped: this program has no C library to stand in for another library");
            return;
        };
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(c_library, &file).unwrap();
        let other = refused(folder.path());
        assert!(other.contains("has no function MPI_Abi_get_version"), "{other}");
    }

    #[test]
    fn names_are_short_and_harmless() {
        assert_eq!(short_name("MPICH Version:      5.0.2\nMPICH Release date: today"), "MPICH 5.0.2");
        assert_eq!(short_name("Open MPI v6.0.0, package: Open MPI builder@host"), "Open MPI v6.0.0");
        assert_eq!(short_name(""), "MPI of an unknown version");
        assert_eq!(short_name(&"x".repeat(500)).len(), MAX_NAME);
        assert_eq!(printable(b"a\x1b[31mb\0\0\0", 9), "a[31mb");
        assert_eq!(printable(b"abc", -1), "");
        assert_eq!(printable(b"abc", 99), "abc");
    }
}
