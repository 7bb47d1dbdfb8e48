//! Loads configurations, prints output and reports errors.

use std::io::{ErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep_config::{MAX_TEXT_BYTES, Purpose, RunConfig, Source};
use lockstep_core::panics::Panic;
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_launch::ErrorNote;

use crate::host;
use crate::reporter::Reporter;

pub(crate) type Failure = Box<dyn Fault>;

/// A configuration file that cannot be read, or output that cannot be written.
#[derive(Debug)]
enum FileError {
    Missing { path: PathBuf },
    Unreadable { path: PathBuf, cause: std::io::Error },
    NotAFile { path: PathBuf, what: &'static str },
    TooLarge { path: PathBuf, cap: Bytes },
    NotText { path: PathBuf },
    TwoFiles { first: String, second: String },
    Stdout { cause: std::io::Error },
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
            FileError::TwoFiles { first, second } => {
                write!(f, "two configuration files were given: {first} and {second}")
            }
            FileError::Stdout { cause } => write!(f, "cannot write to standard output: {cause}"),
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
            FileError::TooLarge { .. } | FileError::NotText { .. } | FileError::TwoFiles { .. } => {
                FaultClass::BadConfig
            }
            FileError::Stdout { .. } => FaultClass::CannotWrite,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            FileError::Stdout { .. } => None,
            FileError::TwoFiles { .. } => Some("Give one file, and override its keys with key=value.".into()),
            _ => Some("Give the path of a YAML or JSON file, or settings as key=value.".into()),
        }
    }
}

/// Loads the configuration from a file name and settings, and returns it with its text, which checkpoints store and
/// ranks compare. Secrets are removed from the text.
pub(crate) fn load(
    purpose: Purpose,
    settings: &[String],
    extra: &[String],
) -> Result<(RunConfig, String), Failure> {
    let (mut overrides, files): (Vec<String>, Vec<String>) =
        settings.iter().cloned().partition(|s| is_setting(s));
    overrides.extend_from_slice(extra);
    if let [first, second, ..] = &files[..] {
        let [first, second] = [first, second].map(|name| lockstep_config::redact(name));
        return Err(Box::new(FileError::TwoFiles { first, second }));
    }
    let text = match files.first() {
        None => None,
        Some(path) => Some(read(Path::new(path)).map_err(|e| -> Failure { Box::new(e) })?),
    };
    let source = files.first().zip(text.as_ref()).map(|(name, text)| Source { name, text });
    let mut config =
        lockstep_config::load_for(purpose, source, &overrides).map_err(|e| -> Failure { Box::new(e) })?;
    config.data.hub = host::hub_folders();
    use_shared_cache(&mut config);
    let mut whole = lockstep_config::redact(&text.unwrap_or_default());
    for line in &overrides {
        whole.push_str(&format!("# {}\n", lockstep_config::redact_setting(line)));
    }
    Ok((config, whole))
}

/// Sets the default of `data_cache_dir`. Without a folder that this user can write to, it stays unset, and prepared
/// data goes to the output folder.
fn use_shared_cache(config: &mut RunConfig) {
    if config.data.data_cache_dir.is_some() {
        return;
    }
    match host::data_cache() {
        Ok(folder) => config.data.data_cache_dir = Some(folder),
        Err(why) => {
            config.notes.push(format!("prepared data goes to the output folder and is not shared: {why}"))
        }
    }
}

/// A key contains no path separators, so `runs/lr=1e-4.yaml` is a file.
fn is_setting(text: &str) -> bool {
    text.split_once('=').is_some_and(|(key, _)| !key.contains(['/', '\\'])) && !Path::new(text).is_file()
}

/// Reads the text of a configuration. Reads no more than the size limit, and opens no file on which reading could
/// block.
fn read(path: &Path) -> Result<String, FileError> {
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

/// Prints the result of a command. A reader that closes the pipe early (`| head`) is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(cause) if cause.kind() != ErrorKind::BrokenPipe => Err(Box::new(FileError::Stdout { cause })),
        _ => Ok(()),
    }
}

/// Prints a line about the work. If it cannot be printed, the work continues.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line to standard error, so that it does not mix with output that other programs read.
pub(crate) fn print_aside(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Reports an error with its hint, and returns its exit code.
pub(crate) fn failure(fault: &dyn Fault) -> ExitCode {
    let note = ErrorNote { error: fault.to_string(), hint: fault.hint(), cause_code: None };
    Reporter::of_this_process().error(&note);
    ExitCode::from(fault.class().exit_code())
}

/// A panic: a bug in this program.
#[derive(Debug)]
pub(crate) struct Bug(pub(crate) Panic);

impl std::fmt::Display for Bug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lockstep {} {}", env!("CARGO_PKG_VERSION"), self.0)
    }
}

impl std::error::Error for Bug {}

impl Fault for Bug {
    fn class(&self) -> FaultClass {
        FaultClass::Internal
    }

    fn hint(&self) -> Option<String> {
        let hint = "This is a bug in Lockstep: please report it with your configuration. Checkpoints are intact: \
                    resume with resume_from_checkpoint: true.";
        Some(hint.into())
    }
}
