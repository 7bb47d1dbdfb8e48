//! Answers of a program, right and wrong.

use lockstep_core::Fault as _;
use lockstep_rewards::Program;

use crate::support::{PATIENT_S, SHORT_S, failure, has_python, python, score, score_texts, shell, start};

fn patient(program: Program) -> Program {
    Program { timeout_s: PATIENT_S, ..program }
}

#[test]
fn answers_in_any_order_from_several_workers() {
    if !has_python() {
        return;
    }
    // Each worker answers its three samples from the last to the first.
    let body = "
batch = []
for s in samples:
    batch.append(s)
    if not s['last']: continue
    assert len(batch) == 3
    while batch:
        s = batch.pop()
        assert s['columns']['id'] == 'a column named id' and s['prompt'] == 'p'
        assert s['completion_ids'] == [1, 2] and s['truncated'] is False
        answer(s, None if s['completion'] == 'c4' else s['columns']['answer'] / 2)
";
    let mut function = start(Program { workers: 3, ..patient(python(body)) });
    for _ in 0..2 {
        let report = score(&mut *function, 9);
        assert!(report.failures.is_empty(), "{report:?}");
        let expected: Vec<Option<f64>> = (0..9).map(|i| (i != 4).then_some(i as f64 / 2.0)).collect();
        assert_eq!(report.rewards, expected);
    }
    assert!(score(&mut *function, 0).rewards.is_empty());
}

#[test]
fn more_workers_than_samples() {
    let answer = r#"n=$1; while read -r line; do id=${line#*\"id\":}; echo "{\"id\": ${id%%,*}, \"reward\": 1}"; done"#;
    let mut function = start(Program { workers: 4, ..patient(shell(answer)) });
    let report = score(&mut *function, 2);
    assert_eq!(report.rewards, [Some(1.0), Some(1.0)], "{report:?}");
}

#[test]
fn large_samples_do_not_deadlock() {
    if !has_python() {
        return;
    }
    // The program answers each sample with much output before it reads the next: both pipes are full at times.
    let body = "
for s in samples:
    print(json.dumps({'id': s['id'], 'reward': len(s['completion']), 'why': 'x' * 300000}), flush=True)
    print('y' * 300000, file=sys.stderr)
";
    let mut function = start(patient(python(body)));
    let completions: Vec<String> = (0..8).map(|i| "z".repeat(300_000 + i)).collect();
    let report = score_texts(&mut *function, &completions);
    assert!(report.failures.is_empty(), "{report:?}");
    assert_eq!(report.rewards[7], Some(300_007.0));
}

/// Runs a Python program on four samples, and returns its failure with the samples that failed.
fn wrong(body: &str) -> Option<(String, Vec<usize>, String)> {
    if !has_python() {
        return None;
    }
    let mut function = start(patient(python(body)));
    let report = score(&mut *function, 4);
    let (text, samples) = failure(&report);
    for (index, reward) in report.rewards.iter().enumerate() {
        assert_eq!(reward.is_none(), samples.contains(&index), "{report:?}");
    }
    Some((text, samples, report.failures[0].error.hint().unwrap_or_default()))
}

#[test]
fn garbage_is_quoted() {
    let body = "
for s in samples:
    if s['id'] == 2: print('Loading checkpoint shards: 100%\\x1b[0m', flush=True)
    answer(s, 1)
";
    let Some((text, samples, hint)) = wrong(body) else { return };
    assert!(text.starts_with(
        "reward function `checked`, worker 0: the program wrote a line that is not an answer ("
    ));
    assert!(text.contains("Loading checkpoint shards: 100%[0m"), "{text}");
    assert!(hint.contains("everything else to stderr"), "{hint}");
    // What was answered before is kept. Sample 2's own answer may be lost.
    assert_eq!(samples, [2, 3]);
}

#[test]
fn nan_and_infinity_concern_their_samples_only() {
    let body = "
for s in samples: answer(s, [1, float('nan'), float('-inf'), 2][s['id']])
";
    let Some((text, samples, _)) = wrong(body) else { return };
    assert!(text.ends_with("gave sample 1 the reward NaN, which is not a finite number"), "{text}");
    assert_eq!(samples, [1, 2]);
}

#[test]
fn other_types_concern_their_samples_only() {
    let body = "
for s in samples: answer(s, [1, '1.0', True, [1]][s['id']])
";
    let Some((text, samples, hint)) = wrong(body) else { return };
    assert!(
        text.ends_with("gave sample 1 the text \"1.0\" as its reward, expected a number or null"),
        "{text}"
    );
    assert_eq!(samples, [1, 2, 3]);
    assert!(hint.contains("null for a sample without an opinion"));
}

#[test]
fn an_answer_without_reward_or_id() {
    let Some((text, samples, _)) = wrong("for s in samples: print(json.dumps({'id': s['id']}), flush=True)")
    else {
        return;
    };
    assert!(text.contains("gave sample 0 nothing as its reward"), "{text}");
    assert_eq!(samples, [0, 1, 2, 3]);
    let Some((text, _, _)) = wrong("for s in samples: print('[1]', flush=True)") else { return };
    assert!(text.ends_with("(it has no `id`): [1]"), "{text}");
}

#[test]
fn an_unknown_id() {
    let body = "
for s in samples:
    s['id'] += 4 if s['id'] == 3 else 0
    answer(s, 1)
";
    let Some((text, samples, hint)) = wrong(body) else { return };
    assert!(text.ends_with("answered sample 7, which is not in this batch"), "{text}");
    assert_eq!(samples, [3]);
    assert!(hint.contains("the `id` of its line"));
}

#[test]
fn the_same_id_twice() {
    let body = "
for s in samples:
    answer(s, 1)
    if s['id'] == 1: answer(s, 2)
";
    let Some((text, samples, _)) = wrong(body) else { return };
    assert!(text.ends_with("answered sample 1 twice"), "{text}");
    assert!(samples.contains(&1) && !samples.contains(&0), "{samples:?}");
}

#[test]
fn a_line_that_is_too_long() {
    let body = "
for s in samples:
    if s['id'] < 2: answer(s, 1)
    else: print('x' * 2000000, flush=True)
";
    let Some((text, samples, _)) = wrong(body) else { return };
    assert!(text.ends_with("wrote a line of more than 1048576 bytes"), "{text}");
    assert_eq!(samples, [2, 3]);
}

#[test]
fn output_that_never_ends() {
    let mut function = start(patient(shell("read -r x; tr '\\0' x < /dev/zero")));
    let (text, samples) = failure(&score(&mut *function, 2));
    assert!(text.ends_with("wrote a line of more than 1048576 bytes"), "{text}");
    assert_eq!(samples, [0, 1]);
    let mut function = start(patient(shell("read -r x; exec yes '{\"id\": 99, \"reward\": 1}'")));
    let (text, _) = failure(&score(&mut *function, 2));
    assert!(text.ends_with("answered sample 99, which is not in this batch"), "{text}");
    // Blank lines are ignored, but not for ever.
    let mut function = start(Program { timeout_s: SHORT_S, ..shell("exec yes ''") });
    let (text, _) = failure(&score(&mut *function, 2));
    assert!(text.ends_with("the program gave 0 of 2 answers in 1 s"), "{text}");
}

#[test]
fn too_few_answers() {
    let answer = r#"id=${line#*\"id\":}; echo "{\"id\": ${id%%,*}, \"reward\": 1}""#;
    let body = format!("while read -r line; do case $line in *c1*) ;; *) {answer};; esac; done");
    let mut function = start(Program { timeout_s: 2.0, ..shell(&body) });
    let report = score(&mut *function, 3);
    let (text, samples) = failure(&report);
    assert!(text.contains("the program gave 2 of 3 answers in 2 s") && samples == [1], "{text} {samples:?}");
    assert_eq!(report.rewards, [Some(1.0), None, Some(1.0)]);
    assert!(report.failures[0].error.hint().unwrap().contains("flush its stdout"));
}

#[test]
fn too_many_answers_between_batches() {
    if !has_python() {
        return;
    }
    let body = "
for s in samples:
    answer(s, 1)
    if s['id'] == 1:
        time.sleep(0.2)
        answer(s, 1)
";
    let mut function = start(patient(python(body)));
    assert!(score(&mut *function, 2).failures.is_empty());
    std::thread::sleep(std::time::Duration::from_secs(1));
    // A new process answers the next batch, so nothing is lost.
    let report = score(&mut *function, 2);
    let (text, samples) = failure(&report);
    assert!(text.contains("wrote more than one answer per sample: {\"id\": 1, \"reward\": 1}"), "{text}");
    assert!(samples.is_empty());
    assert_eq!(report.rewards, [Some(1.0), Some(1.0)]);
    assert!(score(&mut *function, 2).failures.is_empty());
}
