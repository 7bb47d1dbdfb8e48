//! `lockstep quickstart`: makes data, trains on it, tries what it trained, and says how good it is.

mod corpus;

use std::path::Path;
use std::process::ExitCode;

use lockstep_core::{Fault, FaultClass};
use lockstep_device::Machine;
use lockstep_train::generate::{Generator, GeneratorSpec, SamplingParams};

use crate::args::Quickstart;
use crate::report::{self, Failure};
use crate::stop::{GRACE, Stopper};
use crate::train::boxed;

/// The run's configuration, also written beside its data.
const CONFIG: &str = include_str!("quickstart.yaml");
/// Problems drawn for the corpus, and held-out ones that are scored.
const PROBLEMS: u32 = 60_000;
const SCORED: usize = 200;
const SHOWN: usize = 6;

#[derive(Debug)]
struct CannotWrite(std::path::PathBuf, std::io::Error);

impl std::fmt::Display for CannotWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write {}: {}", self.0.display(), self.1)
    }
}

impl std::error::Error for CannotWrite {}

impl Fault for CannotWrite {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Give a folder that can be written with --output-dir.".into())
    }
}

pub(crate) fn run(args: &Quickstart) -> Result<ExitCode, Failure> {
    // As a setting it is the same wish, and the data and the configuration belong there too.
    let set = args.settings.iter().rev().find_map(|setting| setting.strip_prefix("output_dir="));
    let dir = set.map_or(args.output_dir.as_path(), Path::new);
    let (data, config) = (dir.join("problems.jsonl"), dir.join("quickstart.yaml"));
    // The file is a configuration like any other: `lockstep train` runs it again.
    let text = format!("{CONFIG}train_files: {}\noutput_dir: {}\n", quoted(&data), quoted(dir));
    write(&config, &text)?;
    let held_out = make_data(&data)?;
    let settings: Vec<String> =
        [config.display().to_string()].into_iter().chain(args.settings.iter().cloned()).collect();
    let (run_config, run_text) = report::load(&settings, &[])?;
    let code = crate::train::alone(&run_config, &run_text, &Stopper::listen(GRACE, None)?)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let score = score(dir, &held_out)?;
    report::say("");
    report::say(&score);
    let shown = dir.display();
    report::say(&format!(
        "Try it:   lockstep generate {shown} -p \"27+45=\"\n\
         In Python: AutoModelForCausalLM.from_pretrained(\"{shown}/model\")\n\
         The run's configuration, to change and run with `lockstep train`: {}",
        config.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Writes the problems to train on, shows some, and returns the ones to score.
fn make_data(path: &Path) -> Result<Vec<corpus::Problem>, Failure> {
    let (train, mut held_out) = corpus::problems(PROBLEMS, 1);
    write(path, &corpus::to_jsonl(&train))?;
    report::say(&format!("{} problems in {}, such as", train.len(), path.display()));
    for problem in train.iter().take(3) {
        report::say(&format!("    {}{}", problem.prompt, problem.answer));
    }
    held_out.truncate(SCORED);
    Ok(held_out)
}

/// Lets the model answer problems that it never saw.
fn score(dir: &Path, problems: &[corpus::Problem]) -> Result<String, Failure> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let spec = GeneratorSpec {
        storage: None,
        machine: Machine::cpu(threads),
        slots: 64,
        capacity: 128,
        score_tokens: 0,
    };
    let mut generator = Generator::open(dir, &spec).map_err(boxed)?;
    let failed = |e| -> Failure { Box::new(e) };
    let prompts = problems
        .iter()
        .map(|p| generator.tokenizer().encode(&p.prompt))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    let completions =
        generator.generate(&prompts, 64, SamplingParams::default(), &mut |_| true).map_err(boxed)?;
    let mut right = 0;
    report::say("\nThe model on problems it has never seen:");
    for (i, (problem, completion)) in problems.iter().zip(&completions).enumerate() {
        let answer = generator.tokenizer().decode(&completion.tokens, true).map_err(failed)?;
        let is_right = answer == problem.answer;
        right += usize::from(is_right);
        if i < SHOWN {
            let verdict = if is_right { "right" } else { "wrong" };
            report::say(&format!("    {}{answer}    [{verdict}]", problem.prompt));
        }
    }
    let share = 100.0 * right as f64 / problems.len() as f64;
    Ok(format!("{right} of {} held-out problems answered exactly right ({share:.0} %).", problems.len()))
}

/// A path as a YAML string.
fn quoted(path: &Path) -> String {
    serde_json::Value::String(path.display().to_string()).to_string()
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::write(path, text))
        .map_err(|cause| -> Failure { Box::new(CannotWrite(path.into(), cause)) })
}
