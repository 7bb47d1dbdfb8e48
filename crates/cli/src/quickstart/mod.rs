//! `lockstep quickstart`: generates data, trains a model on it and tests the model.

mod corpus;

use std::path::Path;
use std::process::ExitCode;

use lockstep_config::Purpose;
use lockstep_core::{Fault, FaultClass};
use lockstep_device::Machine;
use lockstep_train::generate::{Generator, GeneratorSpec, SamplingParams};

use crate::args::Quickstart;
use crate::report::{self, Failure};
use crate::stop::{GRACE, Stopper};
use crate::train::boxed;

/// The configuration of the run, which is also written next to its data.
const CONFIG: &str = include_str!("quickstart.yaml");
/// The number of generated problems, and of held-out problems to test.
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
        Some("Give a folder that can be written to with --output-dir.".into())
    }
}

pub(crate) fn run(args: &Quickstart) -> Result<ExitCode, Failure> {
    // `output_dir=` means the same as `--output-dir`.
    let set = args.settings.iter().rev().find_map(|setting| setting.strip_prefix("output_dir="));
    let dir = set.map_or(args.output_dir.as_path(), Path::new);
    let (data, config) = (dir.join("problems.jsonl"), dir.join("quickstart.yaml"));
    // The file is a complete configuration: `lockstep train` runs it again.
    let text = format!("{CONFIG}train_files: {}\noutput_dir: {}\n", quoted(&data), quoted(dir));
    write(&config, &text)?;
    let held_out = make_data(&data)?;
    let settings: Vec<String> =
        [config.display().to_string()].into_iter().chain(args.settings.iter().cloned()).collect();
    let (run_config, run_text) = report::load(Purpose::Train, &settings, &[])?;
    let code = crate::train::alone(&run_config, &run_text, &Stopper::listen(GRACE, None)?)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let score = score(dir, &held_out)?;
    report::print_line("");
    report::print_line(&score);
    let shown = dir.display();
    report::print_line(&format!(
        "Try it:   lockstep generate {shown} -p \"27+45=\"\n\
         In Python: AutoModelForCausalLM.from_pretrained(\"{shown}/model\")\n\
         To change the run, edit its configuration and run `lockstep train {}`",
        config.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Writes the problems to train on, prints some, and returns the held-out ones.
fn make_data(path: &Path) -> Result<Vec<corpus::Problem>, Failure> {
    let (train, mut held_out) = corpus::problems(PROBLEMS, 1);
    write(path, &corpus::to_jsonl(&train))?;
    report::print_line(&format!("{} problems in {}, for example", train.len(), path.display()));
    for problem in train.iter().take(3) {
        report::print_line(&format!("    {}{}", problem.prompt, problem.answer));
    }
    held_out.truncate(SCORED);
    Ok(held_out)
}

/// Tests the model on held-out problems.
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
    report::print_line("\nThe model on problems that it has not seen in training:");
    for (i, (problem, completion)) in problems.iter().zip(&completions).enumerate() {
        let answer = generator.tokenizer().decode(&completion.tokens, true).map_err(failed)?;
        let is_right = answer == problem.answer;
        right += usize::from(is_right);
        if i < SHOWN {
            let mark = if is_right { "right" } else { "wrong" };
            report::print_line(&format!("    {}{answer}    [{mark}]", problem.prompt));
        }
    }
    let share = 100.0 * right as f64 / problems.len() as f64;
    Ok(format!("{right} of {} held-out problems solved ({share:.0} %).", problems.len()))
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
