//! Durable file operations, which are on disk when a call returns, and checks that names stay inside a folder.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Component, Path, PathBuf};

use lockstep_core::Bytes;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::CkptError;

pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> CkptError {
    move |source| CkptError::Write { path: path.into(), source }
}

pub(crate) fn read_error(path: &Path) -> impl Fn(io::Error) -> CkptError {
    move |source| match source.kind() {
        io::ErrorKind::NotFound => CkptError::Missing { path: path.into() },
        _ => CkptError::Read { path: path.into(), source },
    }
}

/// Opens a regular file for reading and returns its length. Checks the kind first, because opening a pipe would
/// block.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), CkptError> {
    let found = path.metadata().map_err(read_error(path))?;
    if !found.is_file() {
        return Err(CkptError::WrongKind { path: path.into(), expected: "regular file" });
    }
    let file = File::open(path).map_err(read_error(path))?;
    let len = file.metadata().map_err(read_error(path))?.len();
    Ok((file, len))
}

/// Reads a whole file of at most `cap` bytes.
pub(crate) fn read_bytes(path: &Path, cap: Bytes) -> Result<Vec<u8>, CkptError> {
    let (file, len) = open_file(path)?;
    let too_large = |size| CkptError::TooLarge { path: path.into(), size: Bytes(size), cap };
    if len > cap.0 {
        return Err(too_large(len));
    }
    // The file may grow in the meantime, so limit the read as well.
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(cap.0.saturating_add(1)).read_to_end(&mut bytes).map_err(read_error(path))?;
    if bytes.len() as u64 > cap.0 { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Writes a small file and syncs it.
pub(crate) fn write_synced(path: &Path, content: &[u8]) -> Result<(), CkptError> {
    let mut file = File::create(path).map_err(write_error(path))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(write_error(path))
}

/// Syncs the entries of a folder to disk.
pub(crate) fn sync_dir(path: &Path) -> Result<(), CkptError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(write_error(path))
}

/// Creates an empty folder at `path`, replacing what was there. Parent folders that it creates are synced.
pub(crate) fn fresh_dir(path: &Path) -> Result<(), CkptError> {
    remove_dir(path)?;
    let above: Vec<&Path> = path.ancestors().skip(1).take_while(|dir| !dir.exists()).collect();
    fs::create_dir_all(path).map_err(write_error(path))?;
    above.into_iter().filter(|dir| !dir.as_os_str().is_empty()).try_for_each(|dir| sync_dir(parent(dir)))
}

/// Removes a folder or file if it exists.
pub(crate) fn remove_dir(path: &Path) -> Result<(), CkptError> {
    let removed = match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(write_error(path)(e)),
        _ => Ok(()),
    }
}

pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), CkptError> {
    fs::rename(from, to).map_err(write_error(to))
}

/// Swaps two paths atomically. Returns `false` if the file system does not support it.
pub(crate) fn exchange(a: &Path, b: &Path) -> Result<bool, CkptError> {
    use rustix::io::Errno;
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(false),
        Err(e) => Err(write_error(b)(e.into())),
    }
}

/// The folder that contains `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `path` with `suffix` added to its last component.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(suffix);
    path.with_file_name(name)
}

/// The only subfolder allowed in a model folder: transformers stores additional chat templates in it.
pub(crate) const TEMPLATE_FOLDER: &str = "additional_chat_templates";

/// Whether `name` is allowed for a file next to a model's weights: a plain name, or one in [`TEMPLATE_FOLDER`].
pub(crate) fn is_model_file_name(name: &str) -> bool {
    match name.split_once('/') {
        Some((folder, file)) => folder == TEMPLATE_FOLDER && is_plain_name(file),
        None => is_plain_name(name) && name != TEMPLATE_FOLDER,
    }
}

/// Writes a file of a model folder and syncs it, together with its folder if that is not `dir` itself.
pub(crate) fn write_model_file(dir: &Path, name: &str, content: &[u8]) -> Result<(), CkptError> {
    let path = dir.join(name);
    let folder = parent(&path);
    if folder != dir {
        fs::create_dir_all(folder).map_err(write_error(folder))?;
    }
    write_synced(&path, content)?;
    if folder != dir { sync_dir(folder) } else { Ok(()) }
}

/// Whether `name` is one plain component: no separator, no `..`, not absolute, no control characters.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(part)) if part == name);
    plain && components.next().is_none() && !name.contains(['\\', ':']) && !name.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_their_folder() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", "..a"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "/a", "a/b", "a/", "./a", "../a", "a\\b", "C:a", "a\0", "a\n"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn only_the_template_subfolder_is_allowed() {
        for name in ["config.json", "additional_chat_templates/rag.jinja"] {
            assert!(is_model_file_name(name), "{name}");
        }
        for name in [
            "additional_chat_templates",
            "additional_chat_templates/",
            "additional_chat_templates/..",
            "additional_chat_templates/a/b",
            "additional_chat_templates//a",
            "additional_chat_templates/a:b.jinja",
            "templates/a.jinja",
            "../config.json",
            "/config.json",
        ] {
            assert!(!is_model_file_name(name), "{name}");
        }
    }

    #[test]
    fn exchanged_folders_keep_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fresh_dir(&a).unwrap();
        fresh_dir(&b).unwrap();
        write_synced(&a.join("x"), b"1").unwrap();
        if exchange(&a, &b).unwrap() {
            assert!(b.join("x").exists() && !a.join("x").exists());
        }
    }
}
