use std::fs;

use super::*;
use crate::record::tests::RECORD;
use crate::record::{EvalRecord, StepCost, StepRecord};
use crate::run_log::RunLog;

const HOSTILE: &str = "<script>alert('x')</script>\u{1b}[2J\u{202e}\"&";

/// A folder with a run of 40 steps.
fn run(name: &str) -> (tempfile::TempDir, RunFiles) {
    let dir = tempfile::tempdir().unwrap();
    let info = RunInfo {
        name: name.into(),
        config: format!("train_files: {name}\nlearning_rate: 1e-3\n"),
        settings: [("learning_rate".to_string(), "1e-3".to_string()), (name.to_string(), name.to_string())]
            .into(),
        ranks: 2,
        device: name.into(),
        total_steps: 40,
        parameters: 3_150_000,
        command: format!("lockstep train '{name}'"),
        planned_memory_bytes: [("gradients".to_string(), 3 << 20), (name.to_string(), 1 << 20)].into(),
        ..RunInfo::default()
    };
    info.write(dir.path()).unwrap();
    let mut log = RunLog::open(dir.path(), None).unwrap();
    for step in 1..=40 {
        let cost = StepCost {
            numbers: vec![("forward_seconds", 0.25), ("memory_peak_bytes", f64::from(2 << 20))],
            rank_busy_seconds: vec![0.5, 0.25],
        };
        log.step(&StepRecord { step, loss: 4.0 / step as f64, cost, ..RECORD }).unwrap();
    }
    let evaluation =
        EvalRecord { step: 40, loss: Some(0.5), tokens: Some(3), seconds: 1.0, ..EvalRecord::default() };
    log.evaluation(&evaluation).unwrap();
    let completion = serde_json::json!({"step": 40, "prompt": name, "completion": name, "reward": 0.5});
    fs::write(dir.path().join("completions.jsonl"), format!("{completion}\n")).unwrap();
    let files = RunFiles::open(dir.path()).unwrap();
    (dir, files)
}

#[test]
fn the_page_has_every_section() {
    let (_dir, files) = run("first");
    let page = RunReport::read(&files).unwrap().page();
    for title in [
        "Summary",
        "Charts",
        "Costs of a step",
        "Memory",
        "Ranks",
        "Evaluations",
        "Completions",
        "Configuration",
        "Reproduce this run",
    ] {
        assert!(page.contains(&format!(">{title}</h2>")), "{title}");
    }
    for text in [
        "<th scope=\"row\">state</th><td>finished</td>",
        "<th scope=\"row\">steps</th><td>40 of 40</td>",
        "first 4, newest 0.1000, lowest 0.1000, highest 4",
        "<td class=\"n\">250.00 ms</td><td class=\"n\">28.6 %</td>",
        "Measured peak: 2.00 MiB, 50.0 % of the plan.",
        "<td class=\"n\">0.5000</td>",
        "eval_loss",
        "lockstep train &#39;first&#39;",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("<figcaption>").count());
    assert_eq!(page.matches("<svg").count(), page.matches("role=\"img\"").count());
}

#[test]
fn the_page_asks_for_nothing_and_escapes_all_text() {
    let (_dir, files) = run(HOSTILE);
    let page = RunReport::read(&files).unwrap().page();
    assert!(!page.contains("<script") && !page.contains('\u{1b}') && !page.contains('\u{202e}'), "{page}");
    assert!(
        page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;\\u{1b}[2J\\u{202e}&quot;&amp;"),
        "{page}"
    );
    assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("url("), "{page}");
    // The name of the SVG namespace is not requested.
    assert!(!page.replace("http://www.w3.org/2000/svg", "").contains("http:"), "{page}");
}

#[test]
fn an_empty_run_has_a_page() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("metrics.jsonl"), "").unwrap();
    let page = RunReport::read(&RunFiles::open(dir.path()).unwrap()).unwrap().page();
    assert!(page.contains(">Summary</h2>") && !page.contains(">Charts</h2>"), "{page}");
}

#[test]
fn a_page_replaces_the_old_one_and_leaves_nothing_behind() {
    let (dir, files) = run("first");
    let path = dir.path().join("report.html");
    fs::write(&path, "old").unwrap();
    report_file(&files, &path).unwrap();
    assert!(fs::read_to_string(&path).unwrap().ends_with("</html>\n"));
    let error = report_file(&files, &dir.path().join("none/report.html")).unwrap_err().to_string();
    assert!(error.contains("report.html"), "{error}");
    let names =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.into_iter().any(|name| name.contains("partial")));
}
