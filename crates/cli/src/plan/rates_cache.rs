//! Keeps measured rates in a file of the user's cache folder.
//!
//! A file holds the rates of one number of ranks and threads and one stored type, and a key: program version, CPU and
//! instruction set. A file that is damaged or has another key is measured again and replaced.

use std::path::{Path, PathBuf};

use lockstep_core::DType;
use lockstep_device::Isa;
use lockstep_plan::cost::{Rates, rates_from_json, rates_json};
use serde_json::{Value, json};

use super::cpu_rates;
use crate::{host, report};

/// `0` turns measuring and the cache off.
const MEASURE: &str = "LOCKSTEP_MEASURE";

/// The measured rates of one of `num_ranks` ranks with `num_threads` threads each, in a run that stores `storage`.
/// `None`: the user does not want them, or they cannot be measured.
pub(super) fn of_cpu(num_threads: usize, num_ranks: usize, storage: DType) -> Option<Rates> {
    if std::env::var_os(MEASURE).is_some_and(|value| value == "0") {
        return None;
    }
    let key = key();
    let path = host::cache()
        .filter(|cache| cache.is_absolute())
        .map(|cache| cache.join(format!("lockstep/rates/cpu-{num_ranks}x{num_threads}-{storage}.json")));
    if let Some(rates) = path.as_deref().and_then(|path| read(path, &key)) {
        return Some(rates);
    }
    report::print_aside(
        "measuring the speed of this CPU, once, for about three seconds (LOCKSTEP_MEASURE=0: never)",
    );
    let rates = cpu_rates::measure(num_threads, num_ranks, storage).ok()?;
    if let Some(path) = path {
        // Without a cache the next plan measures again.
        let _ = write(&path, &json!({ "key": key, "rates": rates_json(&rates) }));
    }
    Some(rates)
}

fn key() -> Value {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    json!({
        "format": 2,
        "version": env!("CARGO_PKG_VERSION"),
        "cpu": name.map_or("", |(_, name)| name.trim()),
        "instruction_set": Isa::detect().to_string(),
    })
}

fn read(path: &Path, key: &Value) -> Option<Rates> {
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
    if stored["key"] == *key { rates_from_json(&stored["rates"]) } else { None }
}

/// Replaces the file as a whole, so that no reader sees a part of it.
fn write(path: &Path, content: &Value) -> std::io::Result<()> {
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let partial: PathBuf = path.with_extension(format!("{}.partial", std::process::id()));
    std::fs::write(&partial, format!("{content:#}\n"))?;
    std::fs::rename(&partial, path).inspect_err(|_| drop(std::fs::remove_file(&partial)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_intact_files_of_this_machine_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates/cpu.json");
        let (key, rates) = (json!({ "cpu": "a" }), Rates::generic_cpu(2));
        assert_eq!(read(&path, &key), None);
        write(&path, &json!({ "key": key, "rates": rates_json(&rates) })).unwrap();
        assert_eq!(read(&path, &key), Some(rates));
        assert_eq!(read(&path, &json!({ "cpu": "b" })), None);
        std::fs::write(&path, "{\"key\":").unwrap();
        assert_eq!(read(&path, &key), None);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
