//! Splits a launch line into variables, the launcher's flags and the script's flags.

use crate::error::{ConfigError, ConfigErrors, Problem};
use crate::launch_line::launchers::{self, Action};
use crate::launch_line::script;
use crate::launch_line::{LaunchFlag, LaunchLine, LaunchProgram, Target};
use crate::references::FileRole;
use crate::value;
use crate::yaml::{self, At, Node};

/// Longer lines are refused.
const MAX_WORDS: usize = 2_000;

const EXAMPLE: &str = "write a command such as `torchrun --nproc_per_node=4 train.py --config run.yaml`.";

/// The commands of TRL that have an algorithm here.
const TRL_COMMANDS: [(&str, &str, &str); 5] = [
    ("sft", "trl sft", "sft"),
    ("dpo", "trl dpo", "dpo"),
    ("grpo", "trl grpo", "grpo"),
    ("rloo", "trl rloo", "rloo"),
    ("reward", "trl reward", "reward"),
];

pub(super) fn parse(words: &[String]) -> Result<LaunchLine, ConfigErrors> {
    let fail = |what: String| Err(ConfigErrors(vec![error(Problem::NotALaunchLine { what, hint: EXAMPLE })]));
    if words.len() > MAX_WORDS || words.iter().map(String::len).sum::<usize>() > yaml::MAX_TEXT_BYTES {
        return fail("the command line is too long".into());
    }
    // A pasted line may contain the backslashes that continued it.
    let mut rest =
        words.iter().map(|word| word.trim()).filter(|word| !word.is_empty() && *word != "\\").peekable();
    let mut variables = Vec::new();
    while let Some((name, value)) = rest.peek().and_then(|word| assignment(word)) {
        variables.push((name.to_owned(), value.to_owned()));
        rest.next();
    }
    let mut words: Vec<&str> = rest.collect();
    let (program, algorithm) = match program(&mut words) {
        Ok(found) => found,
        Err(what) => return fail(what),
    };
    let mut parser = Parser { program, words, next: 0, flags: Vec::new(), script: None, errors: Vec::new() };
    if let Some(algorithm) = algorithm {
        parser.add(program.name(), "algorithm", vec![algorithm.to_owned()], Target::Key);
    }
    parser.launcher();
    parser.script_flags();
    if !parser.errors.is_empty() {
        return Err(ConfigErrors(parser.errors));
    }
    Ok(LaunchLine { program, script: parser.script, variables, flags: parser.flags })
}

/// Whether the first word that is no variable names a program that [`program`] knows.
pub(super) fn starts_program(words: &[String]) -> bool {
    let first = words.iter().map(|word| word.trim()).find(|word| assignment(word).is_none());
    let name = first.and_then(|word| word.rsplit('/').next()).unwrap_or_default();
    ["torchrun", "deepspeed", "accelerate", "accelerate-launch", "trl"].contains(&name) || is_python(name)
}

/// `python`, `python3` or `python3.12`.
fn is_python(name: &str) -> bool {
    let version = name.strip_prefix("python");
    version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// `NAME=value` in front of a command.
fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, value))
}

/// Recognizes the program and removes its words. Also returns the algorithm that it names.
fn program(words: &mut Vec<&str>) -> Result<(LaunchProgram, Option<&'static str>), String> {
    let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
    let names: Vec<String> = words.iter().take(4).map(|word| base(word)).collect();
    let name = |idx: usize| names.get(idx).map_or("", String::as_str);
    let (program, taken) = match (name(0), name(1), name(2)) {
        ("torchrun", _, _) => (LaunchProgram::Torchrun, 1),
        ("deepspeed", _, _) => (LaunchProgram::DeepSpeed, 1),
        ("accelerate", "launch", _) => (LaunchProgram::Accelerate, 2),
        ("accelerate-launch", _, _) => (LaunchProgram::Accelerate, 1),
        ("trl", command, _) => {
            let found = TRL_COMMANDS.iter().find(|(name, ..)| *name == command);
            let Some((_, program, algorithm)) = found else {
                let known = TRL_COMMANDS.map(|(name, ..)| name).join(", ");
                return Err(format!("`trl {command}` has no counterpart; there are {known}"));
            };
            words.drain(..2);
            return Ok((LaunchProgram::Trl(program), Some(algorithm)));
        }
        (python, "-m", "torch.distributed.run" | "torch.distributed.launch") if is_python(python) => {
            (LaunchProgram::Torchrun, 3)
        }
        (python, "-m", "accelerate.commands.launch") if is_python(python) => (LaunchProgram::Accelerate, 3),
        (python, "-m", "deepspeed.launcher.runner") if is_python(python) => (LaunchProgram::DeepSpeed, 3),
        (python, "-u", _) if is_python(python) => (LaunchProgram::Python, 2),
        (python, _, _) if is_python(python) => (LaunchProgram::Python, 1),
        ("", _, _) => return Err("the command line is empty".into()),
        (other, _, _) => {
            return Err(format!(
                "`{}` is not a launcher that is known here",
                crate::origin::printable(other)
            ));
        }
    };
    words.drain(..taken);
    Ok((program, None))
}

pub(super) fn error(problem: Problem) -> ConfigError {
    ConfigError::new(problem, Vec::new())
}

/// Reads flags one after another.
pub(super) struct Parser<'w> {
    program: LaunchProgram,
    words: Vec<&'w str>,
    next: usize,
    flags: Vec<LaunchFlag>,
    script: Option<String>,
    errors: Vec<ConfigError>,
}

impl<'w> Parser<'w> {
    fn take(&mut self) -> Option<&'w str> {
        let word = self.words.get(self.next).copied();
        self.next += usize::from(word.is_some());
        word
    }

    fn peek(&self) -> Option<&'w str> {
        self.words.get(self.next).copied()
    }

    fn add(&mut self, name: &str, key: &str, values: Vec<String>, target: Target) {
        self.flags.push(LaunchFlag { name: name.to_owned(), key: key.to_owned(), values, target });
    }

    fn fail(&mut self, problem: Problem) {
        self.errors.push(error(problem));
    }

    /// The flags of the launcher, up to the script.
    fn launcher(&mut self) {
        if matches!(self.program, LaunchProgram::Trl(_)) {
            return;
        }
        while let Some(word) = self.take() {
            let Some(flag) = Flag::of(word) else {
                self.script = Some(word.to_owned());
                return;
            };
            if matches!(flag.key.as_str(), "m" | "module") {
                self.script = flag.value.map(str::to_owned).or_else(|| self.take().map(str::to_owned));
                return;
            }
            match launchers::find(self.program, &flag.key) {
                Some(launcher) => self.launcher_flag(launcher, &flag),
                // The flags of a module follow `--module NAME`, which has ended this loop; a script has a name.
                None => self.unknown(&flag, launchers::names(self.program)),
            }
        }
        if self.script.is_none() {
            let what = "the command line names no script".to_owned();
            self.fail(Problem::NotALaunchLine { what, hint: EXAMPLE });
        }
    }

    pub(super) fn launcher_flag(&mut self, rule: &launchers::Rule, flag: &Flag<'w>) {
        let value = match (rule.has_value, flag.value) {
            (true, Some(value)) => value.to_owned(),
            (true, None) => match self.take() {
                Some(value) => value.to_owned(),
                None => return self.fail(Problem::FlagWithoutValue { flag: flag.typed.clone() }),
            },
            (false, value) => value.unwrap_or("true").to_owned(),
        };
        match rule.action {
            Action::Key(key) => self.add(&flag.typed, key, vec![value], Target::Key),
            Action::Launch(key) => self.add(&flag.typed, &flag.key, vec![value], Target::Launch(key)),
            Action::File(role) => self.add(&flag.typed, &flag.key, vec![value], Target::File(role)),
            Action::Inert(why) => self.add(&flag.typed, &flag.key, vec![value], Target::Inert(why)),
            Action::Nodes => match value.contains(':') {
                true => self.refuse(flag, "the number of nodes is fixed; write one number."),
                false => self.add(&flag.typed, "nodes", vec![value], Target::Key),
            },
            Action::Refused(instead) => self.refuse(flag, instead),
        }
    }

    fn refuse(&mut self, flag: &Flag<'_>, instead: &'static str) {
        let program = self.program.name();
        self.fail(Problem::FlagNotImplemented { flag: flag.typed.clone(), program, instead });
    }

    fn unknown(&mut self, flag: &Flag<'_>, names: impl Iterator<Item = &'static str>) {
        let guess = self.errors.len() < 50 && flag.key.len() <= 80;
        let setting = || self.script.is_some().then(|| crate::raw::suggestion(&flag.key)).flatten();
        let closest = guess.then(|| setting().or_else(|| lockstep_core::closest(&flag.key, names))).flatten();
        let program = match (&self.script, self.program) {
            (Some(_), _) => "the script",
            (None, program) => program.name(),
        };
        let closest = closest.map(|name| format!("--{name}"));
        self.fail(Problem::UnknownFlag { flag: flag.typed.clone(), program, closest });
    }

    /// The flags of the script, and files without a flag.
    fn script_flags(&mut self) {
        while let Some(word) = self.take() {
            let Some(flag) = Flag::of(word) else {
                self.positional(word);
                continue;
            };
            // TRL and scripts that are launchers themselves take the flags of launchers.
            let launcher = match self.program {
                LaunchProgram::Trl(_) => launchers::find(LaunchProgram::Accelerate, &flag.key),
                LaunchProgram::Python => launchers::find(LaunchProgram::Torchrun, &flag.key)
                    .or_else(|| launchers::find(LaunchProgram::DeepSpeed, &flag.key)),
                _ => None,
            };
            let world = launcher.filter(|rule| matches!(rule.action, Action::Launch(_) | Action::Nodes));
            if let Some(rule) = script::special(&flag.key) {
                self.script_flag(rule, &flag);
            } else if let Some(rule) = world {
                self.launcher_flag(rule, &flag);
            } else if script::is_setting(&flag.key) {
                let values = self.values(&flag);
                self.add(&flag.typed, &flag.key, values, Target::Key);
            } else if let Some(rule) = launcher {
                self.launcher_flag(rule, &flag);
            } else if let Some(key) = flag.key.strip_prefix("no_").filter(|key| script::is_setting(key)) {
                self.add(&flag.typed, key, vec!["false".into()], Target::Key);
            } else {
                // Its values are not arguments of their own.
                self.values(&flag);
                self.unknown(&flag, script::names());
            }
        }
    }

    fn script_flag(&mut self, rule: script::Special, flag: &Flag<'w>) {
        let values = self.values(flag);
        let is_switch = values.first().is_none_or(|value| matches!(value.as_str(), "true" | "True"));
        match rule {
            script::Special::Rename(key) => self.add(&flag.typed, key, values, Target::Key),
            script::Special::Inert(why) => self.add(&flag.typed, &flag.key, values, Target::Inert(why)),
            // DeepSpeed's own parser has `--deepspeed` as a switch.
            script::Special::File(FileRole::DeepSpeed) if is_switch => {
                let why = "the DeepSpeed file says it";
                self.add(&flag.typed, &flag.key, values, Target::Inert(why));
            }
            script::Special::File(role) => self.add(&flag.typed, &flag.key, values, Target::File(role)),
            script::Special::Profile => match script::profile(&values[0]) {
                Some(strategy) => self.add(&flag.typed, "strategy", vec![strategy.to_owned()], Target::Key),
                None => self.add(&flag.typed, &flag.key, values, Target::File(FileRole::Accelerate)),
            },
            script::Special::Mode => match value::fold(&values[0]).as_str() {
                "train" => self.add(&flag.typed, &flag.key, values, Target::Inert("this command trains")),
                _ => self.refuse(flag, "only `--mode train` is translated."),
            },
        }
    }

    /// The values of a script's flag: the words behind it.
    fn values(&mut self, flag: &Flag<'w>) -> Vec<String> {
        if let Some(value) = flag.value {
            return vec![value.to_owned()];
        }
        let is_value = |word: &&str| Flag::of(word).is_none();
        let mut values: Vec<String> = Vec::new();
        while let Some(word) = self.peek().filter(is_value) {
            let is_switch = script::is_switch(&flag.key) && !is_bool(word);
            if is_switch || (!values.is_empty() && !script::is_list(&flag.key)) {
                break;
            }
            values.push(word.to_owned());
            self.next += 1;
        }
        if values.is_empty() {
            values.push("true".into());
        }
        values
    }

    /// A configuration file without a flag.
    fn positional(&mut self, word: &str) {
        let is_file = [".yaml", ".yml", ".json"].iter().any(|end| word.ends_with(end));
        match is_file {
            true => self.add("", "config", vec![word.to_owned()], Target::File(FileRole::Config)),
            false => self.fail(Problem::NotALaunchLine {
                what: format!("`{}` belongs to no flag", crate::origin::printable(word)),
                hint: "write `--flag value`; only YAML and JSON files need no flag.",
            }),
        }
    }
}

fn is_bool(word: &str) -> bool {
    matches!(word.to_ascii_lowercase().as_str(), "true" | "false" | "yes" | "no" | "on" | "off" | "1" | "0")
}

/// A flag of a command line.
pub(super) struct Flag<'w> {
    /// With its dashes, without its value.
    typed: String,
    /// Without dashes in front, and with underscores.
    key: String,
    /// The value behind `=`.
    value: Option<&'w str>,
}

impl<'w> Flag<'w> {
    /// `None` for a value, such as `-1`.
    fn of(word: &'w str) -> Option<Self> {
        let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        let starts_like_a_name = name.starts_with(|c: char| c.is_ascii_alphabetic());
        if !starts_like_a_name {
            return None;
        }
        let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
        let dashes = &word[..word.len() - word.trim_start_matches('-').len()];
        Some(Flag { typed: format!("{dashes}{name}"), key: name.replace('-', "_"), value })
    }
}

/// A value that is a JSON map or list. Other text stays as it is, so that a chat template is not read as YAML.
pub(super) fn structured(text: &str, at: At) -> Option<Node> {
    let is_json = text.starts_with(['{', '[']) && serde_json::from_str::<serde_json::Value>(text).is_ok();
    let is_list = text.starts_with('[') && text.ends_with(']');
    if !is_json && !is_list {
        return None;
    }
    let (node, flaws) = yaml::parse(text, at.from);
    node.filter(|_| flaws.is_empty())
}
