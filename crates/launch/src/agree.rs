//! Compares the settings of ranks before a run.

use std::collections::BTreeMap;

use crate::abort::ranks;
use crate::error::printable;

/// The number of differences to list; the others are only counted.
const MAX_LISTED: usize = 3;

pub(crate) fn encode(list: &[(&str, String)]) -> Vec<u8> {
    serde_json::to_vec(list).expect("pairs of strings can be serialized")
}

/// Describes how the ranks' lists differ, in the order of their keys. `None` if they are equal.
pub(crate) fn difference(name: &str, lists: &[Vec<u8>]) -> Option<String> {
    if lists.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    let lists: Vec<Vec<(String, String)>> =
        lists.iter().map(|list| serde_json::from_slice(list).unwrap_or_default()).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in lists.iter().flatten() {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let differences: Vec<String> = keys.iter().filter_map(|key| of_key(key, &lists)).collect();
    let more = differences.len().saturating_sub(MAX_LISTED);
    let mut text = differences[..differences.len().min(MAX_LISTED)].join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    if text.is_empty() {
        text = "the same keys are in a different order".into();
    }
    Some(format!("ranks do not agree on {}: {text}", printable(name)))
}

/// `rank 2 has strategy zero2, the others zero3`
fn of_key(key: &str, lists: &[Vec<(String, String)>]) -> Option<String> {
    let mut by_value: BTreeMap<Option<&str>, Vec<u32>> = BTreeMap::new();
    for (rank, list) in lists.iter().enumerate() {
        let value = list.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
        by_value.entry(value).or_default().push(rank as u32);
    }
    // The largest group is called `the others`; among groups of equal size, the one with the lowest rank.
    let most = by_value.iter().max_by_key(|(_, who)| (who.len(), !who[0])).map(|(value, _)| *value)?;
    let shown = |value: Option<&str>| value.map_or_else(|| "(unset)".into(), printable);
    let mut groups: Vec<_> = by_value.iter().filter(|(value, _)| **value != most).collect();
    groups.sort_by_key(|(_, who)| who[0]);
    let parts: Vec<String> = groups
        .iter()
        .enumerate()
        .map(|(idx, (value, who))| {
            let verb = if who.len() == 1 { "has" } else { "have" };
            let key = if idx == 0 { format!("{} ", printable(key)) } else { String::new() };
            format!("{} {verb} {key}{}", ranks(who.iter().copied()), shown(**value))
        })
        .collect();
    let others =
        if by_value[&most].len() == 1 { ranks(by_value[&most].iter().copied()) } else { "the others".into() };
    (!parts.is_empty()).then(|| format!("{}, {others} {}", parts.join(", "), shown(most)))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn report(lists: &[&[(&str, &str)]]) -> String {
        let lists: Vec<Vec<u8>> = lists
            .iter()
            .map(|list| encode(&list.iter().map(|(k, v)| (*k, v.to_string())).collect::<Vec<_>>()))
            .collect();
        difference("the plan", &lists).unwrap_or_else(|| "nothing".into())
    }

    #[test]
    fn differences_name_ranks_keys_and_values() {
        let (a, b, c) = (("strategy", "zero3"), ("strategy", "zero2"), ("strategy", "ddp"));
        let (x, y) = (("seed", "1"), ("seed", "2"));
        assert_snapshot!(report(&[&[a], &[a]]), @"nothing");
        assert_snapshot!(report(&[&[a], &[a], &[b], &[a]]), @"ranks do not agree on the plan: rank 2 has strategy zero2, the others zero3");
        assert_snapshot!(report(&[&[a], &[b]]), @"ranks do not agree on the plan: rank 1 has strategy zero2, rank 0 zero3");
        assert_snapshot!(report(&[&[a], &[b], &[c], &[a], &[b], &[a]]), @"ranks do not agree on the plan: ranks 1, 4 have strategy zero2, rank 2 has ddp, the others zero3");
        assert_snapshot!(report(&[&[a, x], &[a, y], &[b, x]]), @"ranks do not agree on the plan: rank 2 has strategy zero2, the others zero3; rank 1 has seed 2, the others 1");
        assert_snapshot!(report(&[&[a, x], &[a], &[a, x]]), @"ranks do not agree on the plan: rank 1 has seed (unset), the others 1");
        assert_snapshot!(report(&[&[a, x], &[x, a]]), @"ranks do not agree on the plan: the same keys are in a different order");
    }
}
