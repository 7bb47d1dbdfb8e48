//! `lockstep quickstart`: generates data, trains a model on it and tests the model.

mod corpus;
mod sums;

use std::path::Path;
use std::process::ExitCode;

use lockstep_config::Purpose;
use lockstep_core::{Fault, FaultClass};
use lockstep_device::Machine;
use lockstep_train::generate::{Generator, GeneratorSpec, SamplingParams};
use serde_json::Value;

use crate::args::{Quickstart, QuickstartAlgorithm};
use crate::inputs;
use crate::report::{self, Failure};
use crate::run_command::command_line;
use crate::stop::{GRACE, Stopper};
use crate::train::boxed;
use corpus::Problem;
use sums::{Labels, Sum};

/// The configurations of the runs, which are also written next to their data.
const CONFIG: &str = include_str!("quickstart.yaml");
const SUMS_SFT: &str = include_str!("sums-sft.yaml");
const SUMS_GRPO: &str = include_str!("sums-grpo.yaml");
const SUMS_DPO: &str = include_str!("sums-dpo.yaml");

/// The number of generated problems, and of held-out problems to test.
const PROBLEMS: u32 = 60_000;
const SCORED: usize = 200;
const SHOWN: usize = 6;

/// Problems with their answers, before GRPO and before DPO.
const FEW: usize = 100;
const SOME: usize = 400;

const SEED: u64 = 1;

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
    let is_output = |setting: &&String| setting.starts_with("output_dir=");
    let set = args.settings.iter().rev().find(is_output).map(|setting| &setting["output_dir=".len()..]);
    let dir = set.map_or(args.output_dir.as_path(), Path::new);
    let settings: Vec<String> = args.settings.iter().filter(|setting| !is_output(setting)).cloned().collect();
    match args.algorithm {
        QuickstartAlgorithm::Sft => supervised(dir, &settings),
        QuickstartAlgorithm::Grpo => reinforced(dir, &settings),
        QuickstartAlgorithm::Dpo => preferred(dir, &settings),
    }
}

/// Supervised fine-tuning on sums and questions.
fn supervised(dir: &Path, settings: &[String]) -> Result<ExitCode, Failure> {
    let data = dir.join("problems.jsonl");
    let (train, mut held_out) = corpus::problems(PROBLEMS, SEED);
    write(&data, &corpus::to_jsonl(&train))?;
    show_problems(&data, &train);
    held_out.truncate(SCORED);
    let run = Run { name: "quickstart", config: CONFIG, model: None, data: &data, test: None, output: dir };
    let code = run.train(dir, settings)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let solved = Test { whole_answer: true, shown: SHOWN }.run(dir, &held_out)?;
    report::print_line("");
    report::print_line(&solved.line(""));
    next_steps(dir, &dir.join("quickstart.yaml"));
    Ok(ExitCode::SUCCESS)
}

/// A few answers, then GRPO on all problems without their answers.
fn reinforced(dir: &Path, settings: &[String]) -> Result<ExitCode, Failure> {
    let (train, held_out) = sums::all(SEED);
    let prompts = dir.join("prompts.jsonl");
    write(&prompts, &lines(train.iter().map(|sum| sum.prompt_row())))?;
    let about = format!(
        "\n{} problems without their answers: the model tries each one several times, and right results are rewarded",
        train.len()
    );
    let second = Run {
        name: "grpo",
        config: SUMS_GRPO,
        model: Some(&dir.join("sft/model")),
        data: &prompts,
        test: None,
        output: &dir.join("grpo"),
    };
    after_answers(dir, (&train[..FEW], &held_out), &about, &second, settings)
}

/// Some answers, then DPO on pairs of right and wrong answers.
fn preferred(dir: &Path, settings: &[String]) -> Result<ExitCode, Failure> {
    let (train, held_out) = sums::all(SEED);
    let (pairs, test) = (dir.join("pairs.jsonl"), dir.join("held_out_pairs.jsonl"));
    let rows =
        |sums: &[Sum], labels| lines(sums.iter().zip(0..).map(|(sum, i)| sum.pair_row(labels, SEED, i)));
    write(&pairs, &rows(&train, Labels::SomeWrong))?;
    write(&test, &rows(&held_out, Labels::Right))?;
    let about =
        format!("\n{} pairs of a right and a wrong answer, of which one in ten is exchanged", train.len());
    let second = Run {
        name: "dpo",
        config: SUMS_DPO,
        model: Some(&dir.join("sft/model")),
        data: &pairs,
        test: Some(&test),
        output: &dir.join("dpo"),
    };
    after_answers(dir, (&train[..SOME], &held_out), &about, &second, settings)
}

/// Trains on the answers of some sums, then runs `second` on its result. Tests both models.
fn after_answers(
    dir: &Path,
    (answered, held_out): (&[Sum], &[Sum]),
    about: &str,
    second: &Run<'_>,
    settings: &[String],
) -> Result<ExitCode, Failure> {
    let problems = |sums: &[Sum]| sums.iter().map(|sum| sum.problem()).collect::<Vec<_>>();
    let (answered, held_out) = (problems(answered), problems(held_out));
    let data = dir.join("demonstrations.jsonl");
    write(&data, &corpus::to_jsonl(&answered))?;
    show_problems(&data, &answered);
    let output = dir.join("sft");
    let first = Run { name: "sft", config: SUMS_SFT, model: None, data: &data, test: None, output: &output };
    let code = first.train(dir, &[])?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let before = Test { whole_answer: false, shown: 0 }.run(&output, &held_out)?;
    report::print_line(&before.line("after sft: "));
    report::print_line(about);
    let code = second.train(dir, settings)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let after = Test { whole_answer: false, shown: SHOWN }.run(second.output, &held_out)?;
    report::print_line("");
    report::print_line(&before.line("after sft: "));
    report::print_line(&after.line(&format!("after {}: ", second.name)));
    next_steps(second.output, &dir.join(format!("{}.yaml", second.name)));
    Ok(ExitCode::SUCCESS)
}

/// One training run.
struct Run<'a> {
    name: &'static str,
    config: &'static str,
    /// The folder of its initial weights; `None`: the configuration describes the model.
    model: Option<&'a Path>,
    data: &'a Path,
    /// The evaluation data.
    test: Option<&'a Path>,
    output: &'a Path,
}

impl Run<'_> {
    /// Writes the configuration, which `lockstep train` can run, and trains.
    fn train(&self, dir: &Path, settings: &[String]) -> Result<ExitCode, Failure> {
        let file = dir.join(format!("{}.yaml", self.name));
        let paths = [
            ("model_name_or_path", self.model),
            ("train_files", Some(self.data)),
            ("eval_files", self.test),
            ("output_dir", Some(self.output)),
        ];
        let keys =
            paths.iter().filter_map(|(key, path)| path.map(|path| format!("{key}: {}\n", quoted(path))));
        write(&file, &format!("{}{}", self.config, keys.collect::<String>()))?;
        let all: Vec<String> =
            [file.display().to_string()].into_iter().chain(settings.iter().cloned()).collect();
        let (config, text) = inputs::load(Purpose::Train, &all, &[])?;
        let command = command_line(&all, &config);
        crate::train::alone(&config, &text, &command, &Stopper::listen(GRACE, None)?)
    }
}

fn show_problems(path: &Path, problems: &[Problem]) {
    report::print_line(&format!("{} problems in {}, for example", problems.len(), path.display()));
    for problem in problems.iter().take(3) {
        report::print_line(&format!("    {}{}", problem.prompt, problem.answer));
    }
}

fn next_steps(output: &Path, config: &Path) {
    let shown = output.display();
    report::print_line(&format!(
        "Try it:   lockstep generate {shown} -p \"27+45=\"\n\
         In Python: AutoModelForCausalLM.from_pretrained(\"{shown}/model\")\n\
         To change the run, edit its configuration and run `lockstep train {}`",
        config.display()
    ));
}

/// How a model is tested on held-out problems.
struct Test {
    /// Whether all of an answer must be right, or only what follows the last space.
    whole_answer: bool,
    /// The number of answers to print.
    shown: usize,
}

/// The problems that a model solved.
struct Solved {
    right: usize,
    all: usize,
}

impl Solved {
    fn line(&self, prefix: &str) -> String {
        let share = 100.0 * self.right as f64 / self.all as f64;
        format!("{prefix}{} of {} held-out problems solved ({share:.0} %).", self.right, self.all)
    }
}

impl Test {
    fn run(&self, dir: &Path, problems: &[Problem]) -> Result<Solved, Failure> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spec = GeneratorSpec {
            storage: None,
            machine: Machine::cpu(threads),
            slots: 64,
            capacity: 128,
            score_tokens: 0,
        };
        let mut generator = Generator::open(dir, None, &spec).map_err(boxed)?;
        let failed = |e| -> Failure { Box::new(e) };
        let prompts = problems
            .iter()
            .map(|p| generator.tokenizer().encode(&p.prompt))
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed)?;
        let completions =
            generator.generate(&prompts, 64, SamplingParams::default(), &mut |_| true).map_err(boxed)?;
        let mut right = 0;
        if self.shown > 0 {
            report::print_line("\nThe model on problems that it has not seen in training:");
        }
        for (i, (problem, completion)) in problems.iter().zip(&completions).enumerate() {
            let answer = generator.tokenizer().decode(&completion.tokens, true).map_err(failed)?;
            let is_right = match self.whole_answer {
                true => answer == problem.answer,
                false => answer.rsplit(' ').next() == problem.answer.rsplit(' ').next(),
            };
            right += usize::from(is_right);
            if i < self.shown {
                let mark = if is_right { "right" } else { "wrong" };
                report::print_line(&format!("    {}{answer}    [{mark}]", problem.prompt));
            }
        }
        Ok(Solved { right, all: problems.len() })
    }
}

/// Rows of a jsonl file.
fn lines(rows: impl Iterator<Item = Value>) -> String {
    rows.map(|row| format!("{row}\n")).collect()
}

/// A path as a YAML string.
fn quoted(path: &Path) -> String {
    Value::String(path.display().to_string()).to_string()
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::write(path, text))
        .map_err(|cause| -> Failure { Box::new(CannotWrite(path.into(), cause)) })
}
