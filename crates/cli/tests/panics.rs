//! A panic on any lane of any rank ends the run at once, with its message and location printed last.

use std::time::{Duration, Instant};

use crate::launch::{nameless, ran};
use crate::support::{Folder, RUN};

/// Runs until the failpoint, whose error message is returned: the last line but the hint.
fn fails(failpoint: &str, args: &[&str]) -> String {
    let folder = Folder::new(RUN);
    let args =
        [&["train", "run.yaml", "max_steps=100000000", "save_strategy=no", "threads=1"], args].concat();
    let start = Instant::now();
    let ran = ran(folder.command(&args).env("LOCKSTEP_FAILPOINT", failpoint).output().unwrap());
    // Starting and the first steps included.
    assert!(start.elapsed() < Duration::from_secs(20), "{failpoint}: {:?}", start.elapsed());
    assert_eq!(ran.code, Some(70), "{failpoint}: {ran:#?}");
    let mut lines = ran.stderr.lines().rev();
    assert!(lines.next().is_some_and(|line| line.starts_with("hint: ")), "{failpoint}: {ran:#?}");
    nameless(lines.next().unwrap())
}

#[test]
fn a_panic_on_a_lane_of_one_rank() {
    for (lane, args) in [("compute", &["offload_optimizer=cpu"][..]), ("host", &["offload_optimizer=cpu"])] {
        let error = fails(&format!("0/lane.{lane}:60"), args);
        let start = format!("error: the {lane} lane panicked at crates/engine/src/execute.rs:");
        assert!(error.starts_with(&start) && error.ends_with(&format!(": failpoint lane.{lane}")), "{error}");
    }
}

#[test]
fn a_panic_on_a_lane_of_one_of_three_ranks() {
    for (rank, lane, strategy) in [(0, "compute", "ddp"), (1, "comm", "zero3"), (2, "compute", "zero2")] {
        let strategy = format!("strategy={strategy}");
        let error = fails(&format!("{rank}/lane.{lane}:60"), &["--nproc", "3", &strategy]);
        let start = format!(
            "error: rank {rank} (pid [pid] on [host]) failed with exit code 70: the {lane} lane panicked at \
             crates/engine/src/execute.rs:"
        );
        assert!(error.starts_with(&start) && error.ends_with(&format!(": failpoint lane.{lane}")), "{error}");
    }
}
