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
