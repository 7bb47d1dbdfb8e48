//! Screens of runs in various states, as snapshots on a test terminal of two sizes.

use std::fs;
use std::io::Write;
use std::time::Duration;

use lockstep_observe::{History, MetricsLine, RankStatus, RunFiles, RunInfo, RunState, RunningOperation};
use proptest::prelude::*;
use ratatui_core::backend::TestBackend;
use ratatui_core::terminal::Terminal;

use super::*;

/// A run of `total` steps that has completed `steps`.
fn run(steps: u64, total: u64, ranks: usize) -> Snapshot {
    let mut history = History::default();
    for step in 1..=steps {
        history.push(step_line(step, ranks));
        if step % 50 == 0 {
            let numbers = vec![("eval_loss".to_owned(), 0.2 + loss(step)), ("eval_seconds".to_owned(), 1.5)];
            history.push(MetricsLine { step, evaluation: true, numbers, lists: vec![] });
        }
    }
    let kinds = [
        ("parameters", 12),
        ("gradients", 12),
        ("optimizer", 24),
        ("activations", 40),
        ("buffers", 6),
        ("foreign", 34),
    ];
    let lines = (steps.saturating_sub(20)..steps).map(|step| {
        format!(
            "2026-03-01T09:05:{:02}.250Z step {} | loss: {:.6} | grad_norm 1.23",
            step % 60,
            step + 1,
            loss(step + 1)
        )
    });
    Snapshot {
        path: "outputs/first".into(),
        info: RunInfo {
            name: "first".into(),
            ranks: ranks as u64,
            total_steps: total,
            planned_memory_bytes: kinds.iter().map(|(kind, mib)| (kind.to_string(), mib << 20)).collect(),
            ..RunInfo::default()
        },
        history,
        state: RunState::Running,
        stop: None,
        silent: Some(Duration::from_secs(1)),
        is_silent: false,
        log: lines.collect(),
        ranks: Vec::new(),
        gpus: Vec::new(),
        problem: None,
    }
}

fn loss(step: u64) -> f64 {
    // Without functions of the C library, whose last digits differ.
    0.05 + 4.0 / (1.0 + step as f64 / 20.0) + (step * 7 % 13) as f64 / 40.0
}

fn step_line(step: u64, ranks: usize) -> MetricsLine {
    let numbers = [
        ("epoch", step as f64 / 280.0),
        ("loss", loss(step)),
        ("grad_norm", 1.25),
        ("learning_rate", 2e-3 / step as f64),
        ("tokens_per_second", 9000.0 + (step * 37 % 500) as f64),
        ("step_seconds", 0.1),
        ("mfu", 0.123),
        ("data_wait_seconds", 0.0001),
        ("forward_seconds", 0.025),
        ("backward_seconds", 0.05),
        ("head_seconds", 0.015),
        ("update_seconds", 0.008),
        ("reduce_wait_seconds", 0.002),
        ("memory_peak_bytes", f64::from(125 << 20)),
    ];
    let busy = (0..ranks).map(|rank| if rank == 5 { 0.13 } else { 0.09 + rank as f64 / 1000.0 });
    MetricsLine {
        step,
        evaluation: false,
        numbers: numbers.map(|(key, value)| (key.to_owned(), value)).to_vec(),
        lists: if ranks > 1 { vec![("rank_busy_seconds".into(), busy.collect())] } else { vec![] },
    }
}

fn status(rank: u32, lane: &str, operation: &str, seconds: f64) -> RankStatus {
    RankStatus {
        rank,
        host: "alpha".into(),
        pid: 4000 + rank,
        step: 120,
        operations: vec![RunningOperation {
            lane: lane.into(),
            operation: operation.into(),
            collective: matches!(lane, "comm" | "between steps"),
            seconds,
        }],
        age: Duration::from_millis(400),
    }
}

fn eight_ranks() -> Snapshot {
    let reduce = "#31 all-reduce block 3 + block 2 over 8 ranks";
    let mut ranks: Vec<RankStatus> =
        (0..8).map(|rank| status(rank, "comm", reduce, 4.1 + f64::from(rank) / 8.0)).collect();
    ranks[5] = status(5, "compute", "#28 backward block 2", 4.9);
    ranks[7].age = Duration::from_secs(35);
    Snapshot { ranks, ..run(120, 560, 8) }
}

fn with_gpus() -> Snapshot {
    let gpu = |index: u32| GpuStatus {
        name: "NVIDIA H200".into(),
        temperature_celsius: Some(41.0 + f64::from(index)),
        power_watts: Some(652.5),
        power_limit_watts: Some(700.0),
        utilization: Some(0.98),
        used_bytes: 77 << 30,
        total_bytes: 139 << 30,
        processes: vec![(4000 + index, Some(76 << 30)), (9, None)],
    };
    let unknown = GpuStatus { name: "other".into(), total_bytes: 1 << 30, ..GpuStatus::default() };
    let ranks =
        vec![status(0, "between steps", "losses", 0.001), status(1, "between steps", "losses", 0.002)];
    Snapshot { gpus: vec![gpu(0), gpu(1), unknown], ranks, ..run(120, 560, 2) }
}

const HOSTILE: &str = "\u{1b}[2J\u{1b}]0;title\u{7}<b>\u{202e}\u{200b}漢字\u{9b}31m\r\n\u{0}";

fn hostile() -> Snapshot {
    let mut snapshot = run(60, 560, 2);
    let info = &mut snapshot.info;
    info.name = HOSTILE.repeat(40);
    info.planned_memory_bytes.insert(HOSTILE.into(), u64::MAX / 4);
    let numbers = vec![(HOSTILE.to_owned() + "_seconds", 0.09), ("loss".to_owned(), f64::NAN)];
    snapshot.history.push(MetricsLine { numbers, ..step_line(61, 2) });
    snapshot.log = vec![HOSTILE.repeat(1000), format!("2026-03-01T09:05:07.250Z {HOSTILE}")];
    snapshot.ranks = vec![status(0, "comm", HOSTILE, f64::MAX), status(1, HOSTILE, HOSTILE, f64::NAN)];
    snapshot.gpus = vec![GpuStatus { name: HOSTILE.into(), used_bytes: 7, ..GpuStatus::default() }];
    snapshot.stop = Some(format!("stopped by {HOSTILE}"));
    snapshot.state = RunState::Stopped;
    snapshot
}

fn empty() -> Snapshot {
    let info = RunInfo::default();
    let (log, path) = (Vec::new(), "outputs/empty".into());
    let (state, silent) = (RunState::Unknown, None);
    Snapshot { info, log, path, state, silent, ..run(0, 0, 1) }
}

fn assert_screens(name: &str, snapshot: &Snapshot, view: &View) {
    for (width, height) in [(80, 24), (160, 50)] {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(snapshot, view, frame.area(), frame.buffer_mut())).unwrap();
        insta::assert_snapshot!(format!("{name}-{width}x{height}"), terminal.backend());
    }
}

#[test]
fn live() {
    assert_screens("live", &run(320, 560, 1), &View::default());
}

#[test]
fn live_with_other_choices() {
    let snapshot = run(320, 560, 1);
    let mut view = View::default();
    for key in [Key::Char('l'), Key::Char('+'), Key::Char('+'), Key::Char('?')] {
        view.press(key, &snapshot.history);
    }
    assert_screens("choices", &snapshot, &view);
}

#[test]
fn finished() {
    assert_screens("finished", &Snapshot { state: RunState::Finished, ..run(560, 560, 1) }, &View::default());
}

#[test]
fn stopped_by_a_signal() {
    let stop =
        Some("stopped by SIGTERM after step 320; checkpoint in outputs/first/checkpoints/step-320".into());
    assert_screens(
        "stopped",
        &Snapshot { state: RunState::Stopped, stop, ..run(320, 560, 1) },
        &View::default(),
    );
}

#[test]
fn stale() {
    let silent = Some(Duration::from_secs(725));
    assert_screens(
        "stale",
        &Snapshot { state: RunState::Stopped, silent, ..run(320, 560, 1) },
        &View::default(),
    );
}

#[test]
fn a_run_that_hangs() {
    let silent = Some(Duration::from_secs(725));
    let text =
        frame_text(&Snapshot { silent, is_silent: true, ..eight_ranks() }, &View::default(), (100, 30));
    assert!(text.contains("running, nothing written for 12m 05s"), "{text}");
}

#[test]
fn a_run_without_anything() {
    assert_screens("empty", &empty(), &View::default());
}

#[test]
fn ranks_with_a_straggler() {
    assert_screens("ranks", &eight_ranks(), &View::default());
}

#[test]
fn gpus() {
    assert_screens("gpus", &with_gpus(), &View::default());
}

#[test]
fn hostile_text() {
    let snapshot = hostile();
    assert_screens("hostile", &snapshot, &View::default());
    let text = frame_text(&snapshot, &View::default(), (160, 50));
    assert!(!text.chars().any(|c| c != '\n' && c.is_control()) && !text.contains('\u{202e}'), "{text:?}");
}

#[test]
fn unreadable_metrics() {
    let problem = Some("cannot read the metrics: Permission denied (os error 13)".into());
    let text = frame_text(&Snapshot { problem, ..run(3, 10, 1) }, &View::default(), (100, 30));
    assert!(text.contains("cannot read the metrics: Permission denied"), "{text}");
}

#[test]
fn a_reader_follows_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    RunInfo { name: "first".into(), ranks: 2, total_steps: 3, ..RunInfo::default() }.write(path).unwrap();
    let mut reader = RunReader::new(RunFiles::open(path).unwrap());
    let snapshot = reader.read(Vec::new());
    assert_eq!((snapshot.history.steps(), snapshot.info.total_steps), (0, 3));
    let mut metrics = fs::File::create(path.join("metrics.jsonl")).unwrap();
    metrics.write_all(b"{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"lo").unwrap();
    let snapshot = reader.read(Vec::new());
    assert_eq!((snapshot.history.steps(), snapshot.state), (1, RunState::Running));
    RankStatus { rank: 1, ..RankStatus::default() }.write(path).unwrap();
    // Nothing else has been written for an hour.
    let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    metrics.set_modified(hour_ago).unwrap();
    let snapshot = RunReader::new(RunFiles::open(path).unwrap()).read(Vec::new()).clone();
    assert_eq!((snapshot.state, snapshot.is_silent), (RunState::Running, true));
    metrics.write_all(b"ss\":1.5}\n{\"step\":3,\"loss\":1.0}\n").unwrap();
    fs::create_dir(path.join("logs")).unwrap();
    fs::write(path.join("logs/training.log"), "2026-03-01T09:05:07.250Z step 3 | loss: 1.0\n").unwrap();
    let snapshot = reader.read(vec![GpuStatus::default()]);
    assert_eq!((snapshot.history.steps(), snapshot.state), (3, RunState::Finished));
    assert_eq!((snapshot.ranks.len(), snapshot.gpus.len(), snapshot.log.len()), (1, 1, 1));
    // A resumed run repeats step 2.
    fs::write(path.join("metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n").unwrap();
    let snapshot = reader.read(Vec::new());
    assert_eq!((snapshot.history.steps(), snapshot.state), (1, RunState::Running));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_size(width in 0u16..200, height in 0u16..70, which in 0usize..5, help in any::<bool>()) {
        let snapshot = match which {
            0 => hostile(),
            1 => eight_ranks(),
            2 => with_gpus(),
            3 => empty(),
            _ => run(30, 560, 1),
        };
        let mut view = View::default();
        if help {
            view.press(Key::Char('?'), &snapshot.history);
        }
        let text = frame_text(&snapshot, &view, (width, height));
        prop_assert_eq!(text.lines().count(), usize::from(height));
    }
}
