//! Explains common syntax errors in YAML. A parser reports an error where it gives up, often many lines below the
//! mistake. This scan finds the mistake itself: a tab in the indentation, or a bracket or quote without its partner.
//!
//! It runs only on text that the parser has refused. It knows quotes, comments, block scalars and brackets, and
//! nothing else of YAML; if it finds nothing, the parser's message stands.

/// A mistake and its place. Line and column count from 1, the column in characters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    pub(crate) message: String,
    pub(crate) line: u32,
    pub(crate) column: u32,
}

impl Mistake {
    fn new(message: String, (line, column): Position) -> Mistake {
        Mistake { message, line, column }
    }
}

type Position = (u32, u32);

/// The first mistake in `text` that this scan recognizes.
pub(crate) fn explain(text: &str) -> Option<Mistake> {
    let mut scan = Scan::default();
    for (idx, line) in text.lines().enumerate() {
        scan.line(line, u32::try_from(idx + 1).unwrap_or(u32::MAX));
        if scan.found.is_some() {
            break;
        }
    }
    scan.finish()
}

#[derive(Default)]
struct Scan {
    /// A mistake that ends the scan.
    found: Option<Mistake>,
    /// The first tab that indents a line outside of brackets and quotes.
    tab: Option<Position>,
    /// Brackets that are not closed yet.
    open: Vec<(char, Position)>,
    /// The quote that is not closed yet.
    quote: Option<(char, Position)>,
    /// Inside a block scalar: the indentation of the line that starts it.
    block_scalar: Option<usize>,
}

impl Scan {
    fn line(&mut self, line: &str, number: u32) {
        let content = line.trim_start_matches([' ', '\t']);
        let indent = line.len() - content.len();
        if let Some(above) = self.block_scalar {
            if content.is_empty() || indent > above {
                return;
            }
            self.block_scalar = None;
        }
        let is_text = !content.is_empty() && !content.starts_with('#');
        if self.open.is_empty() && self.quote.is_none() && is_text {
            let column = line[..indent].find('\t').map(|at| at as u32 + 1);
            self.tab = self.tab.or(column.map(|column| (number, column)));
        }
        self.tokens(line, number, indent);
    }

    fn tokens(&mut self, line: &str, number: u32, indent: usize) {
        let chars: Vec<char> = line.chars().collect();
        // Whether a value may start here: only then does a quote or bracket have a meaning outside of brackets.
        let mut starts = self.quote.is_none();
        let mut at = 0;
        while let Some(&c) = chars.get(at) {
            let here = (number, at as u32 + 1);
            let next = chars.get(at + 1).copied();
            at += 1;
            if let Some((quote, _)) = self.quote {
                match (c, next) {
                    ('\\', Some(_)) if quote == '"' => at += 1,
                    ('\'', Some('\'')) if quote == '\'' => at += 1,
                    _ if c == quote => (self.quote, starts) = (None, false),
                    _ => {}
                }
                continue;
            }
            match c {
                '#' if at == 1 || chars[at - 2].is_whitespace() => return,
                '"' | '\'' if starts => self.quote = Some((c, here)),
                '[' | '{' if starts || !self.open.is_empty() => self.open.push((c, here)),
                ']' | '}' if starts || !self.open.is_empty() => {
                    if !self.close(c, here) {
                        return;
                    }
                    starts = false;
                }
                '|' | '>' if starts && self.open.is_empty() => {
                    self.block_scalar = Some(indent);
                    return;
                }
                ',' if !self.open.is_empty() => starts = true,
                ':' if !self.open.is_empty() || next.is_none_or(char::is_whitespace) => starts = true,
                '-' if starts && next.is_none_or(char::is_whitespace) => {}
                _ if c.is_whitespace() => {}
                _ => starts = false,
            }
        }
    }

    /// Closes a bracket. `false`: it is a mistake, and the scan ends.
    fn close(&mut self, c: char, here: Position) -> bool {
        let expected = if c == ']' { '[' } else { '{' };
        match self.open.pop() {
            Some((open, _)) if open == expected => true,
            Some((open, at)) => {
                self.found = Some(Mistake::new(format!("`{open}` is closed by `{c}`"), at));
                false
            }
            None => {
                self.found = Some(Mistake::new(format!("`{c}` closes nothing"), here));
                false
            }
        }
    }

    fn finish(mut self) -> Option<Mistake> {
        let tab = self.tab.map(|at| Mistake::new("a tab cannot indent YAML; use spaces".to_owned(), at));
        let unclosed = self.quote.or_else(|| self.open.pop());
        let other =
            self.found.or_else(|| unclosed.map(|(c, at)| Mistake::new(format!("`{c}` is never closed"), at)));
        [tab, other].into_iter().flatten().min_by_key(|mistake| mistake.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(text: &str) -> String {
        let found = explain(text);
        found.map_or_else(String::new, |m| format!("{}:{}: {}", m.line, m.column, m.message))
    }

    #[test]
    fn mistakes_are_found_on_their_own_line() {
        assert_eq!(explained("a: 1\nb:\n\tc: 2\n"), "3:1: a tab cannot indent YAML; use spaces");
        assert_eq!(explained("a: 1\nb:\n  \tc: 2\n"), "3:3: a tab cannot indent YAML; use spaces");
        assert_eq!(explained("a: 1\nb: [x, y\nc: 3\nd: 4\n"), "2:4: `[` is never closed");
        assert_eq!(explained("a: {b: [1, 2}\nc: 3\n"), "1:8: `[` is closed by `}`");
        assert_eq!(explained("a: [[1], [2]\nb: {c: 1}\n"), "1:4: `[` is never closed");
        assert_eq!(explained("a: \"x\nb: 1\n"), "1:4: `\"` is never closed");
        assert_eq!(explained("a: 'it''s\nb: 1\n"), "1:4: `'` is never closed");
        assert_eq!(explained("a: ]\n"), "1:4: `]` closes nothing");
        assert_eq!(explained("{\n\t\"a\": 1,\n\t\"b\": [1\n}\n"), "3:7: `[` is closed by `}`");
    }

    #[test]
    fn text_that_only_looks_like_a_mistake_is_left_alone() {
        for text in [
            "a: don't [do] this\nb: x]\n",
            "a: 1 # it's [a comment\n",
            "a: \"say \\\"[\\\" twice\"\nb: 'it''s ['\n",
            "t: |\n  {% if x[0] %}\n\n  'open\nb: 1\n",
            "{\n\t\"a\": [1,\n\t\t2]\n}\n",
            "- a: x\n- [1, 2]\n- - y\n",
            "# \t[\n\t# a comment\n",
        ] {
            assert_eq!(explained(text), "", "{text}");
        }
    }
}
