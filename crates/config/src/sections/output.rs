//! The output folder, checkpoints, logging, and resuming.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::reader::{Later, Reader};
use crate::yaml::{Node, Value};

/// The output folder, checkpoints, logging, and resuming.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputConfig {
    /// `outputs/<experiment_name>` if only `experiment_name` is set, and empty if neither is.
    pub output_dir: PathBuf,
    pub experiment_name: Option<String>,
    pub overwrite_output_dir: bool,
    pub logging_steps: u64,
    pub save: SaveStrategy,
    /// `None`: keep all.
    pub save_total_limit: Option<u32>,
    pub resume_from_checkpoint: Resume,
    /// The folder of TensorBoard's event files. `None`: write none.
    pub tensorboard: Option<PathBuf>,
    /// The other trackers that `report_to` names.
    pub trackers: Vec<Tracker>,
    pub project: Option<String>,
    /// Whether to print where the time of a step goes.
    pub wall_clock_breakdown: bool,
    /// The first and the last step to profile.
    pub profile_steps: Option<(u64, u64)>,
    /// Where to serve a web page of the run.
    pub dashboard: Option<DashboardAddress>,
}

/// Where the dashboard listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DashboardAddress {
    pub ip: IpAddr,
    /// `None`: the dashboard's own default.
    pub port: Option<u16>,
}

/// A tracker besides TensorBoard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracker {
    Csv,
    Wandb,
    Mlflow,
    Trackio,
}

/// When to save checkpoints. With `Steps` and `Epoch`, one is also saved after the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStrategy {
    No,
    Steps(u64),
    /// At the end of every epoch.
    Epoch,
    /// After an evaluation that is better than all earlier ones.
    Best,
}

/// Which checkpoint to resume from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    No,
    /// The newest complete checkpoint of the output folder.
    Latest,
    /// Like `Latest`, but start from the beginning if there is no checkpoint.
    Auto,
    Path(PathBuf),
}

impl OutputConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let experiment_name = read_experiment_name(r);
        let output_dir = read_output_dir(r, experiment_name.as_deref());
        let (tensorboard, trackers) = read_trackers(r, &output_dir);
        OutputConfig {
            tensorboard,
            trackers,
            project: r.text("project", "a name"),
            wall_clock_breakdown: r.bool("wall_clock_breakdown").unwrap_or(false),
            profile_steps: read_profile_steps(r),
            dashboard: read_dashboard(r),
            output_dir,
            experiment_name,
            overwrite_output_dir: r.bool("overwrite_output_dir").unwrap_or(false),
            logging_steps: r.count("logging_steps", 1).unwrap_or(1),
            save: read_save(r),
            save_total_limit: r.count("save_total_limit", 1),
            resume_from_checkpoint: read_resume(r),
        }
    }
}

fn read_save(r: &mut Reader<'_>) -> SaveStrategy {
    let steps = SaveStrategy::Steps(r.count("save_steps", 1).unwrap_or(1));
    let strategies = [
        ("steps", steps),
        ("no", SaveStrategy::No),
        ("epoch", SaveStrategy::Epoch),
        ("best", SaveStrategy::Best),
    ];
    r.word("save_strategy", &strategies, Later::NONE).unwrap_or(SaveStrategy::No)
}

const OTHER_TRACKERS: Later = Later(
    &[
        "comet",
        "comet_ml",
        "neptune",
        "clearml",
        "swanlab",
        "dagshub",
        "dvclive",
        "codecarbon",
        "azure_ml",
        "flyte",
    ],
    "use `tensorboard`, `csv`, `wandb`, `mlflow` or `trackio`; metrics.jsonl in the output folder has all metrics as well.",
);

/// What `report_to` names.
#[derive(Clone, Copy, PartialEq)]
enum Choice {
    TensorBoard,
    Other(Tracker),
    None,
}

/// Reads `report_to` (one tracker, a list of them, `all` or `none`) and `logging_dir`.
fn read_trackers(r: &mut Reader<'_>, output_dir: &std::path::Path) -> (Option<PathBuf>, Vec<Tracker>) {
    let choices = [
        ("tensorboard", Choice::TensorBoard),
        ("all", Choice::TensorBoard),
        ("csv", Choice::Other(Tracker::Csv)),
        ("wandb", Choice::Other(Tracker::Wandb)),
        ("mlflow", Choice::Other(Tracker::Mlflow)),
        ("trackio", Choice::Other(Tracker::Trackio)),
        ("none", Choice::None),
    ];
    let node = r.node("report_to");
    let named: Vec<Node> = match node.as_ref().map(|node| &node.value) {
        Some(Value::Seq(items)) => items.clone(),
        _ => node.into_iter().collect(),
    };
    let is_off = |node: &Node| node.bool() == Some(false);
    let wanted: Vec<Choice> = named
        .iter()
        .filter(|node| !is_off(node))
        .filter_map(|node| r.word_of("report_to", &choices, OTHER_TRACKERS, node))
        .collect();
    let mut others = Vec::new();
    for choice in &wanted {
        if let Choice::Other(tracker) = choice
            && !others.contains(tracker)
        {
            others.push(*tracker);
        }
    }
    let given = r.given("logging_dir");
    let dir = r.text("logging_dir", "a folder").map(PathBuf::from);
    if wanted.contains(&Choice::TensorBoard) {
        return (Some(dir.unwrap_or_else(|| output_dir.join("runs"))), others);
    }
    if let Some(given) = given {
        let spelled = given.spelled;
        r.note(format!(
            "`{spelled}` has no effect: it sets TensorBoard's folder, but `report_to` does not name it"
        ));
    }
    (None, others)
}

/// Reads a step or a range of steps, such as `10:12`.
fn read_profile_steps(r: &mut Reader<'_>) -> Option<(u64, u64)> {
    const EXPECTED: &str = "a step, or the first and the last step as in `10:12`";
    let node = r.node("profile_steps")?;
    let text = r.text_of("profile_steps", EXPECTED, &node)?;
    let (first, last) = text.split_once(':').unwrap_or((&text, &text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if first >= 1 && last >= first => Some((first, last)),
        (Ok(_), Ok(_)) => {
            r.out_of_range(
                "profile_steps",
                "a range that begins at 1 or later and does not end before it begins",
                &node,
            );
            None
        }
        _ => {
            r.wrong_type("profile_steps", EXPECTED, &node);
            None
        }
    }
}

/// Reads `true`, a port, an address, or both.
fn read_dashboard(r: &mut Reader<'_>) -> Option<DashboardAddress> {
    const EXPECTED: &str = "true, false, a port, or an address and a port such as `127.0.0.1:8420`";
    let node = r.node("dashboard")?;
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    match node.bool() {
        Some(true) => return Some(DashboardAddress { ip: here, port: None }),
        Some(false) => return None,
        None => {}
    }
    let text = r.text_of("dashboard", EXPECTED, &node)?.replace("localhost", "127.0.0.1");
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let address = match (text.parse::<SocketAddr>(), text.parse::<u16>(), bare.parse::<IpAddr>()) {
        (Ok(address), _, _) => Some(DashboardAddress { ip: address.ip(), port: Some(address.port()) }),
        (_, Ok(port), _) => Some(DashboardAddress { ip: here, port: Some(port) }),
        (_, _, Ok(ip)) => Some(DashboardAddress { ip, port: None }),
        _ => None,
    };
    if address.is_none() {
        r.wrong_type("dashboard", EXPECTED, &node);
    }
    address
}

fn read_experiment_name(r: &mut Reader<'_>) -> Option<String> {
    let node = r.node("experiment_name")?;
    let name = r.text_of("experiment_name", "a name", &node)?;
    if name.contains(['/', '\\']) || name.starts_with('.') {
        r.out_of_range("experiment_name", "a single folder name without separators or a leading dot", &node);
        return None;
    }
    Some(name)
}

fn read_output_dir(r: &mut Reader<'_>, experiment_name: Option<&str>) -> PathBuf {
    let given = r.given("output_dir");
    match (given, experiment_name) {
        (Some(given), _) => {
            r.text_of("output_dir", "the path of a folder", &given.node).unwrap_or_default().into()
        }
        (None, Some(name)) => {
            r.derived("output_dir", "experiment_name");
            PathBuf::from("outputs").join(name)
        }
        // Only training needs one, and `RunConfig` checks that.
        (None, None) => PathBuf::new(),
    }
}

fn read_resume(r: &mut Reader<'_>) -> Resume {
    let Some(node) = r.node("resume_from_checkpoint") else { return Resume::No };
    match node.bool() {
        Some(true) => return Resume::Latest,
        Some(false) => return Resume::No,
        None => {}
    }
    match r.text_of("resume_from_checkpoint", "true, false, auto, latest or a path", &node) {
        Some(text) if text == "auto" => Resume::Auto,
        Some(text) if text == "latest" => Resume::Latest,
        Some(path) => Resume::Path(path.into()),
        None => Resume::No,
    }
}
