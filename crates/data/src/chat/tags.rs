//! `{% generation %}` blocks: the parts of a template's output that the model generates.
//!
//! The engine has no custom tags, but a generation block can be expressed as a filter block: its body is
//! rendered in its own scope and passed to a filter. The tags are therefore rewritten to a filter inside a
//! `with` block, and the filter puts [`SpanMarkers`] around the body. Whitespace control and line numbers stay
//! the same.

use std::ops::Range;

/// The filter that replaces generation blocks.
pub(crate) const FILTER: &str = "__lockstep_generation";
/// The variable that passes the markers to the filter.
pub(crate) const VARIABLE: &str = "__lockstep_marks";

/// A template's source with its generation tags rewritten.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RewrittenTemplate {
    pub(crate) source: String,
    /// Whether there was a generation block.
    pub(crate) tagged: bool,
}

/// Rewrites the generation tags of `source`. `Err` is the line of a tag without a counterpart.
pub(crate) fn rewrite(source: &str) -> Result<RewrittenTemplate, (usize, &'static str)> {
    let mut out = String::with_capacity(source.len());
    let mut open = Vec::new();
    let mut tagged = false;
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tail) = rest.split_at(at);
        out.push_str(before);
        let line = || 1 + source[..source.len() - tail.len()].matches('\n').count();
        let len = match tail.as_bytes().get(1) {
            Some(b'#') => tail.find("#}").map_or(tail.len(), |end| end + 2),
            Some(b'{') => end_of_code(tail, "}}"),
            Some(b'%') => end_of_code(tail, "%}"),
            _ => 1,
        };
        let piece = &tail[..len];
        rest = &tail[len..];
        match piece.strip_prefix("{%").map(tag_name).unwrap_or_default() {
            "generation" => {
                open.push(line());
                tagged = true;
                out.push_str(&piece.replacen("generation", &opening(), 1));
            }
            "endgeneration" => {
                open.pop().ok_or_else(|| (line(), "`endgeneration` without `generation`"))?;
                out.push_str(&piece.replacen("endgeneration", CLOSING, 1));
            }
            "raw" => {
                let end = end_of_raw(rest);
                out.push_str(piece);
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => out.push_str(piece),
        }
    }
    out.push_str(rest);
    match open.pop() {
        Some(line) => Err((line, "`generation` without `endgeneration`")),
        None => Ok(RewrittenTemplate { source: out, tagged }),
    }
}

/// Two tags in place of one: the first keeps the left whitespace control, the second the right one.
fn opening() -> String {
    format!("with %}}{{% filter {FILTER}({VARIABLE})")
}

const CLOSING: &str = "endfilter %}{% endwith";

/// The content of a tag after `{%`, without whitespace control. For tags of one word this is the name.
fn tag_name(inside: &str) -> &str {
    let inside = inside.strip_suffix("%}").unwrap_or_default();
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    inside.strip_suffix(['-', '+']).unwrap_or(inside).trim()
}

/// The length of the code at the start of `text`: up to and including the first `close` outside a string.
fn end_of_code(text: &str, close: &str) -> usize {
    let mut quote = None;
    let mut chars = text.char_indices().skip(2);
    while let Some((at, c)) = chars.next() {
        match quote {
            Some(_) if c == '\\' => drop(chars.next()),
            Some(mark) => quote = (c != mark).then_some(mark),
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text[at..].starts_with(close) => return at + close.len(),
            None => {}
        }
    }
    text.len()
}

/// The length of the raw text before its `endraw` tag.
fn end_of_raw(text: &str) -> usize {
    let starts = text.match_indices("{%").map(|(at, _)| at);
    let mut ends = starts.filter(|at| {
        let tail = &text[*at..];
        let tag = &tail[..tail.find("%}").map_or(tail.len(), |end| end + 2)];
        tag_name(&tag[2..]) == "endraw"
    });
    ends.next().unwrap_or(text.len())
}

/// The two characters that mark the start and end of generated text while a conversation is rendered. They do not
/// occur in the conversation itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanMarkers {
    open: char,
    close: char,
}

impl SpanMarkers {
    /// Two private-use characters for which `used` is false. `None` if the text uses all of them, which is more
    /// characters than a conversation that fits a context has.
    pub(crate) fn outside(used: impl Fn(char) -> bool) -> Option<Self> {
        let private = ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
        let mut free = private.filter(|c| !used(*c));
        Some(SpanMarkers { open: free.next()?, close: free.next()? })
    }

    /// The value of [`VARIABLE`].
    pub(crate) fn text(self) -> String {
        String::from_iter([self.open, self.close])
    }

    /// Implements [`FILTER`]: puts the markers around `body`, or returns it unchanged if there are none.
    pub(crate) fn put_around(body: &str, marks: &str) -> String {
        let (open, close) = marks.split_at(marks.chars().next().map_or(0, char::len_utf8));
        format!("{open}{body}{close}")
    }

    /// Removes the markers from `text`. Returns the text and the byte ranges that were between markers.
    pub(crate) fn remove(self, text: &str) -> (String, Vec<Range<usize>>) {
        let mut out = String::with_capacity(text.len());
        let mut spans = Vec::new();
        // Blocks may be nested; the outermost one counts.
        let (mut depth, mut start) = (0usize, 0);
        for c in text.chars() {
            if c == self.open {
                start = if depth == 0 { out.len() } else { start };
                depth += 1;
            } else if c == self.close {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    spans.push(start..out.len());
                }
            } else {
                out.push(c);
            }
        }
        // A template that truncates its own output may have lost a marker.
        if depth > 0 {
            spans.push(start..out.len());
        }
        (out, spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(text: &str) -> String {
        rewrite(text).unwrap().source
    }

    #[test]
    fn every_spelling_of_the_tags_is_rewritten() {
        let open = opening();
        for (left, right) in [("{%", "%}"), ("{%-", "-%}"), ("{%+ ", " +%}"), ("{%-\n", "\t%}")] {
            let text = format!("a{left} generation {right}b{left} endgeneration {right}c");
            let expected = format!("a{left} {open} {right}b{left} {CLOSING} {right}c");
            assert_eq!(source(&text), expected);
        }
        assert_eq!(source("{%generation%}{%endgeneration%}"), format!("{{%{open}%}}{{%{CLOSING}%}}"));
    }

    #[test]
    fn text_that_only_looks_like_a_tag_is_unchanged() {
        for text in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ \"\\\"{% generation %}\" }}",
            "{% if x == '%}{% generation %}' %}{% endif %}",
            "{% raw %}{% generation %}{%- endraw -%}",
            "{% set generation = 1 %}{ % generation %}{",
            "{% generations %}",
        ] {
            assert_eq!(rewrite(text).unwrap(), RewrittenTemplate { source: text.into(), tagged: false });
        }
    }

    #[test]
    fn unmatched_tags_are_errors() {
        assert_eq!(rewrite("\n{% generation %}\n"), Err((2, "`generation` without `endgeneration`")));
        assert_eq!(rewrite("{% endgeneration %}"), Err((1, "`endgeneration` without `generation`")));
    }

    proptest! {
        #[test]
        fn any_source_is_rewritten_without_a_panic(text in r#"(\{%|%\}|\{\{|\}\}|\{#|#\}|"|'|\\|-|raw|endraw|generation|é| |\n){0,40}"#) {
            let _ = rewrite(&text);
        }

        #[test]
        fn removing_markers_restores_the_text(parts in prop::collection::vec(".{0,8}", 1..6)) {
            let all = parts.concat();
            let markers = SpanMarkers::outside(|c| all.contains(c)).unwrap();
            let marked: String = parts.iter().map(|p| format!("{}{p}{}", markers.open, markers.close)).collect();
            let (text, spans) = markers.remove(&marked);
            prop_assert_eq!(&text, &all);
            let found: Vec<&str> = spans.iter().map(|span| &text[span.clone()]).collect();
            prop_assert_eq!(found, parts);
        }
    }
}
