//! The settings of one or several runs, side by side.

use std::collections::HashMap;

use lockstep_observe::{RunInfo, SettingRow};
use serde_json::{Value, json};

use crate::text::beginning;

const MAX_CHARS: usize = 4000;

/// A row for each key that one of the runs has, in the order of the reference page.
pub(crate) fn table(runs: &[RunInfo]) -> Value {
    let settings: Vec<Vec<SettingRow>> = runs.iter().map(settings_of).collect();
    let mut keys: Vec<&str> = Vec::new();
    let mut rows: HashMap<&str, Vec<Option<&SettingRow>>> = HashMap::new();
    for (i, settings) in settings.iter().enumerate() {
        for row in settings {
            let of_key = rows.entry(&row.key).or_insert_with(|| {
                keys.push(&row.key);
                vec![None; runs.len()]
            });
            of_key[i] = Some(row);
        }
    }
    let shown = |text: &str| beginning(text, MAX_CHARS).0.into_owned();
    let row = |key: &&str| {
        let of_key = &rows[*key];
        let first = of_key.first().copied().flatten().map(|row| &row.value);
        let differs = of_key.iter().any(|row| row.map(|row| &row.value) != first);
        let cell = |row: &Option<&SettingRow>| {
            row.map(|row| json!({ "value": shown(&row.value), "origin": shown(&row.origin) }))
        };
        json!({ "key": shown(key), "differs": differs, "runs": of_key.iter().map(cell).collect::<Vec<_>>() })
    };
    keys.iter().map(row).collect()
}

/// All settings; of runs of older versions only those that differ from their defaults.
fn settings_of(info: &RunInfo) -> Vec<SettingRow> {
    if !info.all_settings.is_empty() {
        return info.all_settings.clone();
    }
    let row = |(key, value): (&String, &String)| SettingRow {
        key: key.clone(),
        value: value.clone(),
        origin: String::new(),
    };
    info.settings.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_marked() {
        let row = |key: &str, value: &str| SettingRow {
            key: key.into(),
            value: value.into(),
            origin: "default".into(),
        };
        let new =
            RunInfo { all_settings: vec![row("seed", "1"), row("optim", "adamw")], ..RunInfo::default() };
        let settings = [("seed", "2"), ("z", "<i>")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        let old = RunInfo { settings: settings.into(), ..RunInfo::default() };
        let table = table(&[new.clone(), old, new]);
        let summary: Vec<String> = table
            .as_array()
            .unwrap()
            .iter()
            .map(|row| format!("{} {}", row["key"], row["differs"]))
            .collect();
        assert_eq!(summary, ["\"seed\" true", "\"optim\" true", "\"z\" true"]);
        assert_eq!(table[0]["runs"][1], json!({ "value": "2", "origin": "" }));
        assert_eq!(table[1]["runs"][1], Value::Null);
    }
}
