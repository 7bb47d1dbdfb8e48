//! `selftest` on a machine that works, and for a device that does not exist.

use crate::support::{Folder, RUN};

#[test]
fn every_operation_of_the_cpu() {
    let folder = Folder::new(RUN);
    let text = folder.succeeds(&["selftest", "--device", "cpu", "--operations", "--small", "--seed", "7"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "the CPU, seed 7");
    let count = lines[1].strip_prefix("all ").and_then(|rest| rest.strip_suffix(" checks passed"));
    assert!(count.is_some_and(|count| count.parse::<u32>().unwrap() > 500), "{text}");
}

/// A line of results, without its speeds.
fn without_speeds(line: &str) -> String {
    let is_speed = |word: &&str| word.parse::<f64>().is_err() && !word.contains("B/s");
    line.split_whitespace().filter(is_speed).collect::<Vec<_>>().join(" ")
}

#[test]
fn collectives_between_ranks() {
    let folder = Folder::new(RUN);
    for (nproc, setting, words) in [("2", "carrier=shm", "shared memory"), ("3", "carrier=tcp", "TCP")] {
        let text = folder.succeeds(&["selftest", "--device", "cpu", "--nproc", nproc, setting]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with(&format!("{nproc} ranks, ")) && lines[0].contains(words), "{text}");
        let ranks: usize = nproc.parse().unwrap();
        for line in &lines[1..=ranks] {
            assert_eq!(without_speeds(line), "rank ok all-reduce all-gather reduce-scatter", "{text}");
        }
        assert_eq!(lines[ranks + 1], format!("all {} checks passed", 3 * ranks), "{text}");
    }
    let error = folder.refused(&["selftest", "--nproc", "1"], 64);
    assert!(error.contains("collectives need at least two ranks"), "{error}");
}
