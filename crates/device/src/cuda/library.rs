//! Shared libraries loaded at run time, and tables of their functions.
//!
//! A library is searched for in the folders of a [`LibrarySearch`], and then by its bare name, which leaves the search
//! to the system (its cache and `LD_LIBRARY_PATH`). A table is created only if all its functions exist, so nothing
//! fails at the first call.

use std::error::Error as _;
use std::path::{Path, PathBuf};

use libloading::Library;

use super::error::GpuError;

/// Folders to search for libraries before the system's own. `cli`, which may read the environment, fills it in.
#[derive(Clone, Debug, Default)]
pub struct LibrarySearch {
    pub folders: Vec<PathBuf>,
    /// Whether the system's own folders are left out.
    pub only_folders: bool,
}

impl LibrarySearch {
    /// This folder and no other.
    pub fn only(folder: PathBuf) -> LibrarySearch {
        LibrarySearch { folders: vec![folder], only_folders: true }
    }

    /// The folders in which CUDA toolkits and Python packages keep libraries. `toolkits` and `pythons` are the roots
    /// that the environment names for each kind.
    pub fn around(toolkits: &[PathBuf], pythons: &[PathBuf]) -> LibrarySearch {
        let mut folders = Vec::new();
        let standard = Path::new("/usr/local/cuda").to_path_buf();
        for root in toolkits.iter().chain([&standard]) {
            folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|sub| root.join(sub)));
        }
        for root in pythons {
            // <root>/lib/pythonX.Y/site-packages/nvidia/<package>/lib
            for python in subfolders(&root.join("lib")) {
                for package in subfolders(&python.join("site-packages").join("nvidia")) {
                    folders.push(package.join("lib"));
                }
            }
        }
        folders.retain(|folder| folder.is_dir());
        LibrarySearch { folders, only_folders: false }
    }
}

fn subfolders(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    all.sort();
    all
}

/// A loaded library and the path it was found at.
#[derive(Debug)]
pub struct LoadedLibrary {
    library: Library,
    pub path: PathBuf,
}

/// Loads the first of `names` that can be loaded.
pub fn open(what: &'static str, names: &[&str], search: &LibrarySearch) -> Result<LoadedLibrary, GpuError> {
    let in_folders = search.folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let by_system = names.iter().filter(|_| !search.only_folders).map(PathBuf::from);
    let candidates: Vec<PathBuf> = in_folders.filter(|path| path.exists()).chain(by_system).collect();
    let folders: Vec<String> = search.folders.iter().map(|folder| folder.display().to_string()).collect();
    let mut why = format!("there is none in {}", folders.join(", "));
    for path in &candidates {
        // SAFETY: loading runs the library's initializers. These are NVIDIA's or an MPI's own libraries, identified
        // by file name; anyone who can replace those files could replace this program as well.
        match unsafe { Library::new(path) } {
            Ok(library) => return Ok(LoadedLibrary { library, path: mapped_path(path) }),
            // The system's own message is the source of libloading's.
            Err(cause) => why = cause.source().map_or_else(|| cause.to_string(), ToString::to_string),
        }
    }
    Err(GpuError::LibraryMissing { what, names: names.join(", "), why })
}

/// Where the system found a library that was loaded by name.
fn mapped_path(opened: &Path) -> PathBuf {
    if opened.is_absolute() {
        return opened.into();
    }
    let name = opened.to_string_lossy();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = name.split(".so").next().unwrap_or(&name);
    let is_it = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        path.starts_with('/') && file.split(".so").next() == Some(stem)
    };
    maps.lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(is_it)
        .map_or(opened.into(), PathBuf::from)
}

impl LoadedLibrary {
    /// This program itself, for tables whose entries are set by hand.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn this_program() -> LoadedLibrary {
        LoadedLibrary { library: libloading::os::unix::Library::this().into(), path: "this program".into() }
    }

    /// The function with this name.
    ///
    /// # Safety
    /// `F` is a function pointer with the signature that the library gives this symbol.
    pub unsafe fn symbol<F: Copy>(&self, symbol: &'static str) -> Result<F, GpuError> {
        // SAFETY: guaranteed by the caller.
        let found = unsafe { self.library.get::<F>(symbol.as_bytes()) };
        let missing = |_| GpuError::SymbolMissing { library: self.path.display().to_string(), symbol };
        found.map(|f| *f).map_err(missing)
    }
}

/// A table of C functions: a struct with one pointer per function, filled from a loaded library.
#[macro_export]
macro_rules! function_table {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $(fn $field:ident = $symbol:literal ($($arg:ty),* $(,)?) -> $ret:ty;)* }) => {
        $(#[$meta])*
        $vis struct $name {
            $($vis $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Keeps the library mapped.
            $vis library: $crate::cuda::library::LoadedLibrary,
        }

        impl $name {
            $vis fn load(library: $crate::cuda::library::LoadedLibrary) -> Result<$name, $crate::cuda::GpuError> {
                Ok($name {
                    $($field: {
                        type Function = unsafe extern "C" fn($($arg),*) -> $ret;
                        const SYMBOL: &str = $symbol;
                        // SAFETY: the signature is the one in the library's header.
                        unsafe { library.symbol::<Function>(SYMBOL)? }
                    },)*
                    library,
                })
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.library.path.display())
            }
        }
    };
}
pub use crate::function_table;
