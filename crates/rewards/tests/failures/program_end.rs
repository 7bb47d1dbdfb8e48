//! Programs that do not start, do not end, or end too early.

use std::fs;
use std::time::{Duration, Instant};

use lockstep_core::Fault as _;
use lockstep_rewards::{
    OnRewardError, Program, RewardContext, RewardEntry, RewardError, RewardSet, RewardSpec, Sample, open,
};

use crate::support::{
    PATIENT_S, SHORT_S, columns, failure, has_python, is_gone, python, score, script, shell, start,
};

/// Answers every line with reward 1, in the shell.
const ANSWER: &str = r#"id=${line#*\"id\":}; echo "{\"id\": ${id%%,*}, \"reward\": 1}""#;

fn shell_loop(body: &str) -> Program {
    Program { timeout_s: PATIENT_S, ..shell(&format!("while read -r line; do {body}; done")) }
}

#[test]
fn a_program_that_hangs_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let body = format!("echo $$ > {}; echo waiting >&2; sleep 600; true", pid.display());
    let mut function = start(Program { timeout_s: SHORT_S, ..shell(&body) });
    let begin = Instant::now();
    let report = score(&mut *function, 3);
    assert!(begin.elapsed() < Duration::from_secs(10));
    let (text, samples) = failure(&report);
    let expected = "reward function `checked`, worker 0: the program gave 0 of 3 answers in 1 s; the last lines of \
                    its stderr:\n  | waiting";
    assert_eq!((text.as_str(), samples), (expected, vec![0, 1, 2]));
    assert!(is_gone(fs::read_to_string(pid).unwrap().trim()));
}

#[test]
fn a_program_that_ignores_sigterm_is_killed_with_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let (own, child) = (folder.path().join("own"), folder.path().join("child"));
    let (own_path, child_path) = (own.display(), child.display());
    let body = format!(
        "trap '' TERM; sleep 600 & echo $! > {child_path}; echo $$ > {own_path}; while :; do sleep 1; done"
    );
    let mut function = start(Program { timeout_s: SHORT_S, ..shell(&body) });
    let begin = Instant::now();
    failure(&score(&mut *function, 1));
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(is_gone(fs::read_to_string(own).unwrap().trim()));
    assert!(is_gone(fs::read_to_string(child).unwrap().trim()));
}

#[test]
fn a_crash_shows_the_code_and_the_last_lines_of_stderr() {
    let body = format!("{ANSWER}; for i in $(seq 30); do echo \"line $i\" >&2; done; exit 3");
    let mut function = start(shell_loop(&body));
    let report = score(&mut *function, 2);
    let (text, samples) = failure(&report);
    assert!(text.contains("worker 0: the program exited with code 3 after 1 of 2 answers"), "{text}");
    assert!(text.contains("stderr:\n  | line 11\n") && text.ends_with("  | line 30"), "{text}");
    assert_eq!((samples, report.rewards), (vec![1], vec![Some(1.0), None]));
    let RewardError::Program { stderr, .. } = &report.failures[0].error else { panic!() };
    assert_eq!(stderr.len(), 20);
}

#[test]
fn a_program_that_ends_at_once() {
    let mut function = start(Program { timeout_s: PATIENT_S, ..shell("echo no such module >&2; exit 1") });
    std::thread::sleep(Duration::from_millis(300));
    let report = score(&mut *function, 2);
    // It was started a second time for the batch, and ended again.
    let texts: Vec<String> = report.failures.iter().map(|failure| failure.error.to_string()).collect();
    assert!(texts[0].contains("exited with code 1 before it got a batch; "), "{texts:?}");
    assert!(texts[1].contains("exited with code 1 after 0 of 2 answers; "), "{texts:?}");
    assert!(texts.iter().all(|text| text.ends_with("stderr:\n  | no such module")), "{texts:?}");
    assert_eq!((texts.len(), report.rewards), (2, vec![None, None]));
}

#[test]
fn a_signal_is_named() {
    let mut function = start(shell_loop("kill -9 $$"));
    let (text, _) = failure(&score(&mut *function, 1));
    assert!(text.ends_with("the program was ended by signal 9 after 0 of 1 answers"), "{text}");
}

#[test]
fn a_program_that_ends_early_but_leaves_its_stdout_open() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let body = format!("read -r line; sleep 600 & echo $! > {}; exit 5", pid.display());
    let mut function = start(Program { timeout_s: PATIENT_S, ..shell(&body) });
    let begin = Instant::now();
    let (text, _) = failure(&score(&mut *function, 1));
    assert!(text.ends_with("the program exited with code 5 after 0 of 1 answers"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(10), "the deadline is not waited for");
    assert!(is_gone(fs::read_to_string(pid).unwrap().trim()));
}

#[test]
fn a_program_that_closes_its_stdout() {
    let mut function = start(Program { timeout_s: PATIENT_S, ..shell("read -r line; exec >&-; sleep 600") });
    let (text, _) = failure(&score(&mut *function, 1));
    assert!(text.ends_with("the program closed its stdout after 0 of 1 answers"), "{text}");
}

#[test]
fn a_program_that_closes_its_stdin() {
    let mut function = start(Program { timeout_s: SHORT_S, ..shell("exec <&-; sleep 600") });
    let (text, _) = failure(&score(&mut *function, 100));
    assert!(text.ends_with("the program gave 0 of 100 answers in 1 s"), "{text}");
}

#[test]
fn a_flooded_stderr_does_no_harm() {
    if !has_python() {
        return;
    }
    let body = "
for s in samples:
    for i in range(2000): print('x' * 1000, file=sys.stderr)
    answer(s, 1)
os._exit(1)
";
    let mut function = start(Program { timeout_s: PATIENT_S, ..python(body) });
    assert_eq!(score(&mut *function, 3).rewards, [Some(1.0); 3]);
}

#[test]
fn a_program_is_restarted_for_the_next_batch() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark").display().to_string();
    // Crashes the first time.
    let mut function = start(shell_loop(&format!("test -e {mark} || {{ touch {mark}; exit 1; }}; {ANSWER}")));
    assert_eq!(failure(&score(&mut *function, 2)).1, [0, 1]);
    let report = score(&mut *function, 2);
    assert_eq!(report.rewards, [Some(1.0), Some(1.0)], "{report:?}");
}

#[test]
fn a_program_that_ended_between_batches_loses_nothing() {
    let mut function = start(shell_loop(&format!("{ANSWER}; exit 0")));
    assert!(score(&mut *function, 1).failures.is_empty());
    std::thread::sleep(Duration::from_millis(300));
    let report = score(&mut *function, 1);
    let (text, samples) = failure(&report);
    assert!(text.contains("exited with code 0") && samples.is_empty(), "{text}");
    assert_eq!(report.rewards, [Some(1.0)]);
}

#[test]
fn after_too_many_failures_in_a_row_any_policy_stops() {
    let function = start(Program { max_restarts: 1, ..shell_loop("echo nonsense") });
    let mut set =
        RewardSet::new(vec![RewardEntry { function, weight: 1.0, on_error: OnRewardError::Zero }]).unwrap();
    let columns = columns(0);
    let sample =
        Sample { prompt: "", completion: "", completion_ids: &[], columns: &columns, truncated: false };
    let scores = set.score(&[sample]).unwrap();
    assert_eq!((scores.rewards, scores.warnings.len()), (vec![vec![Some(0.0)]], 1));
    let error = set.score(&[sample]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("worker 0 failed 2 times in a row; the last time: reward function"), "{text}");
    assert!(error.hint().unwrap().contains("everything else to stderr"));
}

#[test]
fn one_worker_fails_and_the_others_do_not() {
    let body = format!("case $line in *c1*) exit 1;; esac; {ANSWER}");
    let mut function = start(Program { workers: 3, ..shell_loop(&body) });
    let report = score(&mut *function, 6);
    let (text, samples) = failure(&report);
    assert!(text.contains("worker 1: the program exited with code 1 after 0 of 2 answers"), "{text}");
    assert_eq!(samples, [1, 4]);
    assert_eq!(report.rewards.iter().flatten().count(), 4);
}

fn refused(program: Program) -> RewardError {
    let Err(error) = open("checked", &RewardSpec::Program(program), &RewardContext::default()) else {
        panic!("it has started");
    };
    error
}

#[test]
fn programs_that_cannot_start() {
    let error = refused(Program::new(vec!["./no/such/program".into()]));
    assert!(
        error.to_string().contains("cannot start the program `./no/such/program`: No such file"),
        "{error}"
    );
    assert_eq!(error.class().exit_code(), 66);
    assert!(error.hint().unwrap().contains("check the path"));

    let folder = tempfile::tempdir().unwrap();
    let path = script(folder.path(), "#!/bin/sh\n", 0o644);
    let error = refused(Program::new(vec![path.clone()]));
    assert!(error.to_string().contains("Permission denied"), "{error}");
    assert!(error.hint().unwrap().contains(&format!("chmod +x {path}")));
}

#[test]
fn options_are_checked() {
    let sh = || Program::new(vec!["sh".into()]);
    for (program, option) in [
        (Program::new(vec![]), "command"),
        (Program { timeout_s: 0.0, ..sh() }, "timeout_s"),
        (Program { timeout_s: f64::NAN, ..sh() }, "timeout_s"),
        (Program { workers: 0, ..sh() }, "workers"),
        (Program { workers: 1000, ..sh() }, "workers"),
    ] {
        let text = refused(program).to_string();
        assert!(text.contains(&format!("`{option}` is")), "{text}");
    }
}

#[test]
fn programs_end_with_the_function() {
    let folder = tempfile::tempdir().unwrap();
    let ended = folder.path().join("ended");
    let body = format!("while read -r line; do {ANSWER}; done; echo done > {}", ended.display());
    let mut function = start(Program { timeout_s: PATIENT_S, ..shell(&body) });
    assert_eq!(score(&mut *function, 1).rewards, [Some(1.0)]);
    drop(function);
    assert_eq!(fs::read_to_string(ended).unwrap(), "done\n", "it saw the end of its stdin");
}
