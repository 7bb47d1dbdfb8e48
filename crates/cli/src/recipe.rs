//! `lockstep recipe`: configurations in the binary, to copy and edit.

use std::path::{Path, PathBuf};

use lockstep_core::{Fault, FaultClass};

use crate::args::{Recipe, RecipeCommand};
use crate::output_file;
use crate::report::{self, Failure};

/// A built-in configuration. Its first line is a comment that describes it.
pub(crate) struct BuiltIn {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

macro_rules! recipes {
    ($($name:literal),* $(,)?) => {
        [$(BuiltIn { name: $name, text: include_str!(concat!("../recipes/", $name, ".yaml")) }),*]
    };
}

/// One recipe for each algorithm, which has its name, and some for large runs.
pub(crate) static RECIPES: [BuiltIn; 11] = recipes![
    "sft",
    "clm",
    "reward",
    "dpo",
    "ppo",
    "grpo",
    "rloo",
    "90m",
    "300m",
    "llama-7b",
    "llama-7b-fsdp",
];

impl BuiltIn {
    /// What the recipe does, in one line.
    pub(crate) fn about(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches("# ")
    }
}

#[derive(Debug)]
struct UnknownRecipe {
    name: String,
}

impl std::fmt::Display for UnknownRecipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no recipe `{}`", self.name)
    }
}

impl std::error::Error for UnknownRecipe {}

impl Fault for UnknownRecipe {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        let names = || RECIPES.iter().map(|recipe| recipe.name);
        Some(match lockstep_core::closest(&self.name.to_ascii_lowercase(), names()) {
            Some(meant) => format!("did you mean `{meant}`? `lockstep recipe ls` lists all recipes."),
            None => format!("the recipes are {}.", names().collect::<Vec<_>>().join(", ")),
        })
    }
}

pub(crate) fn run(args: &Recipe) -> Result<(), Failure> {
    match &args.command {
        RecipeCommand::Ls => report::print(&list()),
        RecipeCommand::Show { name } => report::print(find(name)?.text),
        RecipeCommand::Cp { name, file, force } => copy(find(name)?, file.as_deref(), *force),
    }
}

pub(crate) fn find(name: &str) -> Result<&'static BuiltIn, Failure> {
    let found = RECIPES.iter().find(|recipe| recipe.name == name);
    found.ok_or_else(|| -> Failure { Box::new(UnknownRecipe { name: name.into() }) })
}

fn list() -> String {
    let width = RECIPES.iter().map(|recipe| recipe.name.len()).max().unwrap_or_default();
    let line = |recipe: &BuiltIn| format!("{:width$}  {}\n", recipe.name, recipe.about());
    let lines: String = RECIPES.iter().map(line).collect();
    format!("{lines}\n`lockstep recipe cp NAME` copies one to NAME.yaml, to edit and train.\n")
}

fn copy(recipe: &BuiltIn, file: Option<&Path>, force: bool) -> Result<(), Failure> {
    let name = format!("{}.yaml", recipe.name);
    let path = match file {
        None => PathBuf::from(name),
        Some(folder) if folder.is_dir() => folder.join(name),
        Some(file) => file.into(),
    };
    output_file::write_new(&path, recipe.text, force)?;
    let shown = path.display();
    report::print_line(&format!(
        "wrote {shown}\nNext: edit it, then `lockstep plan {shown}` and `lockstep train {shown}`"
    ));
    Ok(())
}
