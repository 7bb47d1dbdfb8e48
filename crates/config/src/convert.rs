//! Renders files and a launch line as one commented YAML with our keys.

use std::fmt::Write;

use crate::error::ConfigErrors;
use crate::keys::{KEYS, Section};
use crate::launch_settings::LaunchSettings;
use crate::origin::{Origin, printable};
use crate::raw::{RawConfig, Setting};
use crate::reference::SECTIONS;
use crate::run::{Purpose, RunConfig};
use crate::settings;
use crate::texts::Inputs;

/// A model for inputs that name none, such as a DeepSpeed file alone: their other keys are checked all the same.
const ANY_MODEL: &str = "model=15m";

/// The combination of all inputs as one YAML, with a comment on the origin of each value, and at the end what was
/// dropped and why. Reading it results in the same run. If the inputs name no model, the YAML names none.
pub fn convert(inputs: &Inputs<'_>) -> Result<String, ConfigErrors> {
    let given = RawConfig::read(inputs).given;
    let names_model = ["model", "model_name_or_path"].iter().any(|key| given.contains_key(key));
    let overrides: Vec<String> = inputs.overrides.iter().cloned().chain([ANY_MODEL.to_owned()]).collect();
    let completed = Inputs { overrides: &overrides, ..*inputs };
    let (mut page, launch, notes) = match names_model {
        true => translate(inputs, &[])?,
        false => translate(&completed, &["model"])?,
    };
    if !names_model {
        page.push_str("\n# No model is named: set `model_name_or_path` or `model`.\n");
    }
    page.push_str(&launch_comment(&launch));
    page.push_str(&notes_comment(&notes));
    Ok(page)
}

/// The same without the launcher's settings, which may differ between the nodes of a run.
pub fn convert_run(inputs: &Inputs<'_>) -> Result<String, ConfigErrors> {
    translate(inputs, &[]).map(|(page, ..)| page)
}

/// The keys of the run as YAML, except for `omitted` ones, what the launcher needs to know, and the notes.
fn translate(
    inputs: &Inputs<'_>,
    omitted: &[&str],
) -> Result<(String, LaunchSettings, Vec<String>), ConfigErrors> {
    let mut raw = RawConfig::read(inputs);
    let launch = LaunchSettings::settle(&mut raw);
    let resolved = RunConfig::resolve(raw, Purpose::Plan)?;
    let config = &resolved.config;
    let mut page = String::from("# Configuration of Lockstep, translated");
    let names: Vec<String> = inputs.files.iter().map(|file| printable(file.name)).collect();
    if !names.is_empty() {
        let _ = write!(page, " from {}", names.join(", "));
    }
    if let Some(line) = inputs.launch_line {
        let and = if names.is_empty() { "from" } else { "and" };
        let _ = write!(page, " {and} a command line of {}", line.program.name());
    }
    page.push_str(".\n");
    for (section, title) in SECTIONS {
        let given: Vec<_> = KEYS
            .iter()
            .filter(|key| key.section == section && !omitted.contains(&key.name))
            .filter_map(|key| resolved.given.get(key.name).map(|given| (key.name, given)))
            .filter(|(_, given)| !given.node.is_null())
            .collect();
        // The only `auto` that is not simply the rest of the configuration.
        let auto = config.origin("reduce_bucket_size");
        let auto = Some(auto).filter(|auto| section == Section::Plan && matches!(auto, Origin::Auto { .. }));
        if given.is_empty() && auto.is_none() {
            continue;
        }
        let _ = write!(page, "\n# {title}\n");
        if let Some(origin) = auto {
            let _ = writeln!(page, "reduce_bucket_size: auto  # {origin}");
        }
        for (name, given) in given {
            line(&mut page, name, given, &resolved.given_origins[name]);
        }
    }
    Ok((page, launch, resolved.config.notes))
}

/// `key: value  # origin, its own name`; the comment of a map stands above it.
fn line(page: &mut String, name: &str, given: &Setting, origin: &str) {
    let comment = match given.spelled == name {
        true => origin.to_owned(),
        false if origin.contains(&given.spelled) => origin.to_owned(),
        false => format!("{origin}, {}", printable(&given.spelled)),
    };
    let mut yaml = String::new();
    settings::write_yaml(&mut yaml, 0, name, &given.node);
    match yaml.trim_end().contains('\n') {
        true => _ = write!(page, "# {comment}\n{yaml}"),
        false => _ = writeln!(page, "{}  # {comment}", yaml.trim_end()),
    }
}

fn launch_comment(launch: &LaunchSettings) -> String {
    let mut text = String::new();
    let flags = launch.flags();
    if !flags.is_empty() {
        let _ = write!(text, "\n# Flags of `lockstep train` for this launch:\n#   {}\n", flags.join(" "));
    }
    let variables: Vec<String> = launch
        .variables
        .iter()
        .map(|(name, value)| crate::secret::redact_setting(&format!("{name}={value}")))
        .collect();
    if !variables.is_empty() {
        let _ = write!(text, "\n# Variables of the command line:\n#   {}\n", printable(&variables.join(" ")));
    }
    text
}

fn notes_comment(notes: &[String]) -> String {
    let (dropped, others): (Vec<&String>, Vec<&String>) =
        notes.iter().partition(|note| note.contains("has no effect"));
    let mut text = String::new();
    for (title, notes) in [("Notes", others), ("Dropped, because it has no effect here", dropped)] {
        if notes.is_empty() {
            continue;
        }
        let _ = write!(text, "\n# {title}:\n");
        for note in notes {
            let one_line: String = note.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            let _ = writeln!(text, "#   {one_line}");
        }
    }
    text
}
