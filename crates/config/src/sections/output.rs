//! Where a run is written, how often, and where it starts from.

use std::path::PathBuf;

use crate::reader::{Later, Reader};

#[derive(Clone, Debug, PartialEq)]
pub struct OutputConfig {
    /// Resolved: `outputs/<experiment_name>` where only that was given.
    pub output_dir: PathBuf,
    pub experiment_name: Option<String>,
    pub overwrite_output_dir: bool,
    pub logging_steps: u64,
    /// `None`: no checkpoints (`save_strategy: no`).
    pub save_steps: Option<u64>,
    /// `None`: keep all.
    pub save_total_limit: Option<u32>,
    pub resume_from_checkpoint: Resume,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    No,
    /// From the newest complete checkpoint of the output folder.
    Latest,
    Path(PathBuf),
}

impl OutputConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        let experiment_name = read_experiment_name(r);
        let strategies = [("steps", true), ("no", false)];
        let later = Later(&["epoch", "best"], "write `save_strategy: steps` and `save_steps`.");
        let save = r.word("save_strategy", &strategies, later).unwrap_or(true);
        let save_steps = r.count("save_steps", 1);
        OutputConfig {
            output_dir: read_output_dir(r, experiment_name.as_deref()),
            experiment_name,
            overwrite_output_dir: r.bool("overwrite_output_dir").unwrap_or(false),
            logging_steps: r.count("logging_steps", 1).unwrap_or(1),
            save_steps: save_steps.filter(|_| save),
            save_total_limit: r.count("save_total_limit", 1),
            resume_from_checkpoint: read_resume(r),
        }
    }
}

fn read_experiment_name(r: &mut Reader<'_>) -> Option<String> {
    let node = r.node("experiment_name")?;
    let name = r.text_of("experiment_name", "a name", &node)?;
    if name.contains(['/', '\\']) || name.starts_with('.') {
        r.out_of_range("experiment_name", "one folder name without separators or a leading dot", &node);
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
        (None, None) => {
            r.missing(
                "output_dir",
                "write `output_dir: outputs/first-run`, or give the run an `experiment_name`",
            );
            PathBuf::new()
        }
    }
}

fn read_resume(r: &mut Reader<'_>) -> Resume {
    let Some(node) = r.node("resume_from_checkpoint") else { return Resume::No };
    match node.bool() {
        Some(true) => return Resume::Latest,
        Some(false) => return Resume::No,
        None => {}
    }
    match r.text_of("resume_from_checkpoint", "true, false, latest or a path", &node) {
        Some(text) if text == "latest" => Resume::Latest,
        Some(path) => Resume::Path(path.into()),
        None => Resume::No,
    }
}
