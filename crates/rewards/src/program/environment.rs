//! The environment of a reward program: what it needs to run, what the user names, and no secrets.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use crate::error::RewardError;

/// A variable of a program's environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvVar {
    pub name: String,
    /// `None`: as it is in the environment of this process, if it is set there.
    pub value: Option<String>,
}

impl EnvVar {
    /// `NAME=value`, or `NAME` to pass a variable on.
    pub fn parse(text: &str) -> EnvVar {
        match text.split_once('=') {
            Some((name, value)) => EnvVar { name: name.into(), value: Some(value.into()) },
            None => EnvVar { name: text.into(), value: None },
        }
    }
}

/// Variables that programs get without being asked. Others would make rewards depend on more than they should.
const PASSED: &[&str] = &[
    "HOME",
    "LANG",
    "LANGUAGE",
    "PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONHOME",
    "PYTHONIOENCODING",
    "PYTHONNOUSERSITE",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONUTF8",
    "TMPDIR",
    "TZ",
    "VIRTUAL_ENV",
];

/// Python keeps its answers in a buffer unless this is set, and programs forget to flush.
const DEFAULTS: &[(&str, &str)] = &[("PYTHONUNBUFFERED", "1")];

const SECRET_WORDS: &[&str] = &[
    "APIKEY",
    "CREDENTIAL",
    "CREDENTIALS",
    "KEY",
    "PASSPHRASE",
    "PASSWD",
    "PASSWORD",
    "PAT",
    "SECRET",
    "SECRETS",
    "TOKEN",
    "TOKENS",
];

/// Whether a variable's name promises a secret: `HF_TOKEN`, `WANDB_API_KEY`, `AWS_ACCESS_KEY_ID`, `PGPASSWORD`.
pub(crate) fn is_secret(name: &OsStr) -> bool {
    let name = name.to_string_lossy().to_ascii_uppercase();
    let is_path = name.ends_with("_PATH") || name.ends_with("_FILE");
    let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
    !is_path && (words.any(|word| SECRET_WORDS.contains(&word)) || name.ends_with("PASSWORD"))
}

/// Checks the variables that the user names.
pub(crate) fn check(function: &str, variables: &[EnvVar]) -> Result<(), RewardError> {
    for variable in variables {
        let bad = |why: &str| RewardError::BadOption {
            function: function.to_owned(),
            option: "env",
            // The name only: the value may be the secret.
            value: format!("`{}`", variable.name),
            why: why.to_owned(),
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if variable.name.is_empty() || !variable.name.chars().all(is_name) {
            return Err(bad("names have letters, digits and underscores only"));
        }
        if variable.value.as_ref().is_some_and(|value| value.contains('\0')) {
            return Err(bad("values cannot contain a zero byte"));
        }
        if is_secret(OsStr::new(&variable.name)) {
            return Err(bad(
                "reward programs get no secrets; let the program read it from a file that only you can read",
            ));
        }
    }
    Ok(())
}

/// The whole environment of a program.
pub(crate) fn for_program(
    environment: &[(OsString, OsString)],
    variables: &[EnvVar],
) -> BTreeMap<OsString, OsString> {
    let mut result: BTreeMap<OsString, OsString> =
        DEFAULTS.iter().map(|(name, value)| (name.into(), value.into())).collect();
    for (name, value) in environment {
        let text = name.to_string_lossy();
        let is_named = variables.iter().any(|v| v.value.is_none() && v.name == text);
        if (is_named || PASSED.contains(&&*text) || text.starts_with("LC_")) && !is_secret(name) {
            result.insert(name.clone(), value.clone());
        }
    }
    for EnvVar { name, value } in variables {
        if let Some(value) = value {
            result.insert(name.into(), value.into());
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_known_by_name() {
        for name in [
            "HF_TOKEN",
            "WANDB_API_KEY",
            "LOCKSTEP_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "PGPASSWORD",
            "db_password",
            "LC_TOKEN",
            "TOKEN",
        ] {
            assert!(is_secret(OsStr::new(name)), "{name}");
        }
        for name in ["PATH", "HOME", "KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY", "HF_TOKEN_PATH"] {
            assert!(!is_secret(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn programs_get_what_they_need_and_what_is_named() {
        let environment: Vec<(OsString, OsString)> = [
            ("PATH", "/bin"),
            ("LC_ALL", "C"),
            ("HF_TOKEN", "x"),
            ("RANK", "3"),
            ("CUDA_HOME", "/cuda"),
            ("TZ", "UTC"),
        ]
        .map(|(name, value)| (name.into(), value.into()))
        .to_vec();
        let named = ["CUDA_HOME", "HF_TOKEN", "MODE=fast=1", "TZ=CET", "UNSET"].map(EnvVar::parse);
        let result: Vec<String> = for_program(&environment, &named)
            .iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        let expected =
            ["CUDA_HOME=/cuda", "LC_ALL=C", "MODE=fast=1", "PATH=/bin", "PYTHONUNBUFFERED=1", "TZ=CET"];
        assert_eq!(result, expected);
    }

    #[test]
    fn named_secrets_are_refused_without_their_value() {
        let why = |text: &str| check("f", &[EnvVar::parse(text)]).unwrap_err().to_string();
        assert!(why("MY_API_KEY=hunter2").contains("`MY_API_KEY`: reward programs get no secrets"));
        assert!(!why("MY_API_KEY=hunter2").contains("hunter2"));
        assert!(why("=x").contains("letters, digits"));
        assert!(check("f", &[EnvVar::parse("A_1=x")]).is_ok());
    }
}
