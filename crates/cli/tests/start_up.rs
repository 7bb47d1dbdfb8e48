//! The time from the start of the process to the first step.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{Folder, RUN};

/// The time from the start of the process to the line of its first step.
fn first_step() -> Duration {
    let folder = Folder::new(RUN);
    let start = Instant::now();
    let mut child = folder.command(&["train", "run.yaml"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    lines.find(|line| line.starts_with("step 1/2 | ")).expect("a run takes its first step");
    let elapsed = start.elapsed();
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    elapsed
}

/// One of several does: other tests run beside this one.
#[test]
fn the_first_step_comes_within_half_a_second() {
    let times: Vec<Duration> =
        (0..20).map(|_| first_step()).take_while(|time| time.as_millis() >= 500).collect();
    println!("starts of half a second and longer: {times:.1?}");
    assert!(times.len() < 20, "{times:?}");
}
