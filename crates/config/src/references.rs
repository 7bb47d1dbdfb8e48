//! Files that other files and launch lines refer to. This crate does not read them: the caller asks which files are
//! missing, reads them, and passes their texts in.

use std::fmt;

use crate::dialects::{self, Dialect};
use crate::launch_line::{LaunchLine, Target};
use crate::origin::Origin;
use crate::raw::RawConfig;
use crate::texts::{Inputs, Source};
use crate::yaml::{At, Entry, Input, Node, Value};

/// What kind of file a reference expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// Lockstep's, TRL's or the Trainer's YAML; a DeepSpeed or accelerate file is recognized as well.
    Config,
    /// DeepSpeed's JSON.
    DeepSpeed,
    /// The YAML of `accelerate config`.
    Accelerate,
}

impl fmt::Display for FileRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FileRole::Config => "it is the configuration",
            FileRole::DeepSpeed => "it is the DeepSpeed configuration",
            FileRole::Accelerate => "it is the accelerate configuration",
        })
    }
}

/// A file that a file or a launch line refers to.
#[derive(Clone, Debug, PartialEq)]
pub struct FileReference {
    /// As written: relative to the folder in which the command runs.
    pub path: String,
    pub role: FileRole,
    /// Where it is written.
    pub origin: Origin,
}

/// The files that the inputs refer to and that are not among them. Files may refer to further files, so ask again with
/// their texts until the answer is empty.
pub fn referenced_files(inputs: &Inputs<'_>) -> Vec<FileReference> {
    let raw = RawConfig::read(inputs);
    let missing = raw.references.iter().filter(|r| !is_given(&raw.texts.files, &r.path));
    let mut found: Vec<FileReference> = Vec::new();
    for Reference { path, role, at, .. } in missing {
        if !found.iter().any(|other| other.path == *path) {
            found.push(FileReference { path: path.clone(), role: *role, origin: raw.texts.origin(*at) });
        }
    }
    found
}

/// What a file is, by its content.
pub fn recognize(text: &str) -> FileRole {
    let root = crate::yaml::parse(text, Input::File(0)).0;
    match root.map(|node| node.value) {
        Some(Value::Map(entries)) => match dialects::recognize(&entries) {
            Dialect::Lockstep => FileRole::Config,
            Dialect::DeepSpeed => FileRole::DeepSpeed,
            Dialect::Accelerate => FileRole::Accelerate,
        },
        _ => FileRole::Config,
    }
}

/// A reference and its place.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) path: String,
    pub(crate) role: FileRole,
    pub(crate) at: At,
}

/// The references in a launch line and in the entries of each file.
pub(crate) fn collect(line: Option<&LaunchLine>, roots: &[Vec<Entry>]) -> Vec<Reference> {
    let mut found = Vec::new();
    for (idx, flag) in line.map_or(&[][..], |line| &line.flags[..]).iter().enumerate() {
        if let (Target::File(role), Some(path)) = (flag.target, flag.values.first()) {
            let at = At { from: Input::Line(idx), line: 1, column: 1, width: 1 };
            found.push(Reference { path: path.clone(), role, at });
        }
    }
    for entry in roots.iter().flatten() {
        below("", entry, &mut found);
    }
    found
}

/// Keys that name a file. `deepspeed` may also be a map, and a switch.
const NAMES: [(&str, FileRole); 7] = [
    ("deepspeed", FileRole::DeepSpeed),
    ("deepspeed_config", FileRole::DeepSpeed),
    ("deepspeed.config_path", FileRole::DeepSpeed),
    ("deepspeed.config_file", FileRole::DeepSpeed),
    ("deepspeed_config.deepspeed_config_file", FileRole::DeepSpeed),
    ("config_file", FileRole::Accelerate),
    ("accelerate_config", FileRole::Accelerate),
];

fn below(prefix: &str, entry: &Entry, found: &mut Vec<Reference>) {
    let name = format!("{prefix}{}", entry.key.replace('-', "_"));
    let name = name.strip_prefix("training.").unwrap_or(&name);
    if let Some((_, role)) = NAMES.iter().find(|(key, _)| *key == name)
        && let Some(path) = path_of(&entry.node)
    {
        found.push(Reference { path, role: *role, at: entry.key_at });
    }
    if let Value::Map(entries) = &entry.node.value
        && matches!(name, "training" | "deepspeed" | "deepspeed_config")
    {
        entries.iter().for_each(|entry| below(&format!("{name}."), entry, found));
    }
}

/// The path that a value names, unless it is a switch.
pub(crate) fn path_of(node: &Node) -> Option<String> {
    let text = node.text().filter(|text| !text.trim().is_empty() && !node.is_null())?;
    (node.bool().is_none() && text != "none").then(|| text.to_owned())
}

/// The dialect of each file: what refers to it decides, then its content.
pub(crate) fn dialects(files: &[Source<'_>], references: &[Reference], roots: &[Vec<Entry>]) -> Vec<Dialect> {
    let role = |name: &str| references.iter().find(|r| is_named(name, &r.path)).map(|r| r.role);
    let dialect = |(file, entries): (&Source<'_>, &Vec<Entry>)| match role(file.name) {
        Some(FileRole::DeepSpeed) => Dialect::DeepSpeed,
        Some(FileRole::Accelerate) => Dialect::Accelerate,
        _ => dialects::recognize(entries),
    };
    files.iter().zip(roots).map(dialect).collect()
}

pub(crate) fn is_given(files: &[Source<'_>], path: &str) -> bool {
    files.iter().any(|file| is_named(file.name, path))
}

/// Whether the file `name` is the one that is referred to as `path`.
fn is_named(name: &str, path: &str) -> bool {
    // A path may be relative to the folder of the file that names it.
    let path = path.trim_start_matches("./").trim_start_matches("../");
    let name = name.trim_start_matches("./").trim_start_matches("../");
    name == path || name.strip_suffix(path).is_some_and(|folder| folder.ends_with('/'))
}
