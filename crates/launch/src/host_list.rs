//! Slurm's lists of hosts, such as `login,node[01-04,7]`.

/// An upper limit on hosts, to catch typing errors.
const MAX_HOSTS: usize = 1 << 16;

/// The hosts of a list, in order. `None` if it is malformed.
pub fn expand_host_list(text: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for word in split_outside_brackets(text)? {
        hosts.extend(expand_word(word)?);
        if hosts.len() > MAX_HOSTS {
            return None;
        }
    }
    Some(hosts)
}

/// Splits at commas that are not in brackets.
fn split_outside_brackets(text: &str) -> Option<Vec<&str>> {
    let (mut words, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' if inside => return None,
            ']' if !inside => return None,
            '[' | ']' => inside = c == '[',
            ',' if !inside => {
                words.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    words.push(&text[start..]);
    (!inside).then_some(words)
}

/// One word, in which several numbers may be ranges: `rack[1-2]n[01-16]`.
fn expand_word(word: &str) -> Option<Vec<String>> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.:%[],".contains(c);
    if word.is_empty() || !word.chars().all(is_name) {
        return None;
    }
    let mut hosts = vec![String::new()];
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('[') {
        let (numbers, after) = after.split_once(']')?;
        let numbers = expand_numbers(numbers)?;
        if hosts.len() * numbers.len() > MAX_HOSTS {
            return None;
        }
        hosts = hosts
            .iter()
            .flat_map(|host| numbers.iter().map(move |number| format!("{host}{before}{number}")))
            .collect();
        rest = after;
    }
    hosts.iter_mut().for_each(|host| host.push_str(rest));
    Some(hosts)
}

/// `01-04,7`. The width of a range's first number is the width of all.
fn expand_numbers(text: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number =
            |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u64>().ok())?;
        let (from, to) = (number(first)?, number(last)?);
        if to < from || to - from >= MAX_HOSTS as u64 {
            return None;
        }
        all.extend((from..=to).map(|n| format!("{n:0width$}", width = first.len())));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expanded(text: &str) -> Option<String> {
        expand_host_list(text).map(|hosts| hosts.join(" "))
    }

    #[test]
    fn ranges_and_lists() {
        let is = |text: &str, hosts: &str| assert_eq!(expanded(text).as_deref(), Some(hosts), "{text}");
        is("alpha", "alpha");
        is("alpha,beta", "alpha beta");
        is("node[01-03,7]", "node01 node02 node03 node7");
        is("login,gpu[098-101].example", "login gpu098.example gpu099.example gpu100.example gpu101.example");
        is("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2");
        is("127.0.0.[2-3]", "127.0.0.2 127.0.0.3");
    }

    #[test]
    fn malformed_lists() {
        for text in
            ["", "a,,b", "a[", "a]", "a[]", "a[1-", "a[3-1]", "a[x]", "a[[1]]", "a b", "$(a)", "a[1-9999999]"]
        {
            assert_eq!(expanded(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(text in "[a-c0-3,\\[\\]-]{0,24}") {
            if let Some(hosts) = expand_host_list(&text) {
                prop_assert!(!hosts.is_empty() && hosts.iter().all(|host| !host.is_empty()));
                prop_assert!(hosts.iter().all(|host| !host.contains(['[', ']', ','])));
            }
        }
    }
}
