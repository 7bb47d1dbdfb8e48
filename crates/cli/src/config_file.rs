//! Reads configuration files.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use lockstep_config::MAX_TEXT_BYTES;
use lockstep_core::{Bytes, Fault, FaultClass};

/// A configuration file that cannot be read.
#[derive(Debug)]
pub(crate) enum FileError {
    Missing { path: PathBuf },
    Unreadable { path: PathBuf, cause: std::io::Error },
    NotAFile { path: PathBuf, what: &'static str },
    TooLarge { path: PathBuf, cap: Bytes },
    NotText { path: PathBuf },
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FileError::Missing { path } => {
                // The path may be a mistyped setting with a secret in it.
                let name = lockstep_config::redact(&path.display().to_string());
                write!(f, "configuration file {name} does not exist")
            }
            FileError::Unreadable { path, cause } => {
                write!(f, "cannot read configuration file {}: {cause}", path.display())
            }
            FileError::NotAFile { path, what } => {
                write!(f, "configuration file {} is {what}, not a regular file", path.display())
            }
            FileError::TooLarge { path, cap } => {
                write!(f, "configuration file {} is larger than {cap}", path.display())
            }
            FileError::NotText { path } => {
                write!(f, "configuration file {} is not UTF-8 text", path.display())
            }
        }
    }
}

impl std::error::Error for FileError {}

impl Fault for FileError {
    fn class(&self) -> FaultClass {
        match self {
            FileError::Missing { .. } | FileError::Unreadable { .. } | FileError::NotAFile { .. } => {
                FaultClass::InputMissing
            }
            FileError::TooLarge { .. } | FileError::NotText { .. } => FaultClass::BadConfig,
        }
    }

    fn hint(&self) -> Option<String> {
        Some("Give the path of a YAML or JSON file, or settings as key=value.".into())
    }
}

/// Reads the text of a configuration. Reads no more than the size limit, and opens no file on which reading could
/// block.
pub(crate) fn read(path: &Path) -> Result<String, FileError> {
    let failed = |cause: std::io::Error| match cause.kind() {
        ErrorKind::NotFound => FileError::Missing { path: path.into() },
        _ => FileError::Unreadable { path: path.into(), cause },
    };
    let kind = path.metadata().map_err(failed)?.file_type();
    if !kind.is_file() && !is_inherited_pipe(path) {
        let what = if kind.is_dir() { "a folder" } else { "a device, a pipe or a socket" };
        return Err(FileError::NotAFile { path: path.into(), what });
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_TEXT_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > MAX_TEXT_BYTES {
        return Err(FileError::TooLarge { path: path.into(), cap: Bytes(MAX_TEXT_BYTES as u64) });
    }
    String::from_utf8(bytes).map_err(|_| FileError::NotText { path: path.into() })
}

/// Whether `path` is a pipe that this process inherited, such as the shell's `<(command)`. Opening it does not wait for
/// a writer.
fn is_inherited_pipe(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    let inherited = path == Path::new("/dev/stdin")
        || ["/dev/fd", "/proc/self/fd"].iter().any(|folder| path.starts_with(folder));
    inherited && path.metadata().is_ok_and(|found| found.file_type().is_fifo())
}
