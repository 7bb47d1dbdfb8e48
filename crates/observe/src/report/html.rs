//! Pieces of HTML. Every text goes through [`text`] or [`block`], which escape it.

use std::fmt::Write;

use crate::text::{is_hidden, printable};

/// Text for an element or an attribute: markup is escaped, hidden characters are shown as escapes.
pub(super) fn text(raw: &str) -> String {
    escaped(&printable(raw))
}

/// Text of several lines, for a `pre` element.
pub(super) fn block(raw: &str) -> String {
    let shown = |line: &str| {
        // Tabs are text here.
        line.split('\t').map(printable).collect::<Vec<_>>().join("\t")
    };
    escaped(&raw.lines().map(shown).collect::<Vec<_>>().join("\n"))
}

fn escaped(plain: &str) -> String {
    let mut out = String::with_capacity(plain.len());
    for c in plain.chars() {
        debug_assert!(!is_hidden(c) || matches!(c, '\n' | '\t'), "{c:?} is not shown");
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// A cell of a table.
pub(super) enum Cell {
    Text(String),
    Number(String),
    /// A bar, as a share of the widest. It repeats a number beside it, so screen readers skip it.
    Bar(f64),
}

/// A table with a caption for screen readers. The first cell of a row is its header. `last_is_total`: the last row is the
/// sum of the others.
pub(super) fn table(caption: &str, heads: &[&str], rows: &[Vec<Cell>], last_is_total: bool) -> String {
    let mut out = format!("<div class=\"wide\"><table>\n<caption>{}</caption>\n<thead><tr>", text(caption));
    for (i, head) in heads.iter().enumerate() {
        let is_number = rows.first().is_some_and(|row| matches!(row.get(i), Some(Cell::Number(_))));
        if head.is_empty() {
            out.push_str("<td></td>");
            continue;
        }
        let class = if is_number { " class=\"n\"" } else { "" };
        let _ = write!(out, "<th scope=\"col\"{class}>{}</th>", text(head));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (at, row) in rows.iter().enumerate() {
        if last_is_total && at + 1 == rows.len() {
            out.push_str("</tbody>\n<tfoot>\n");
        }
        out.push_str("<tr>");
        row.iter().enumerate().for_each(|(i, cell)| push_cell(&mut out, cell, i == 0));
        out.push_str("</tr>\n");
    }
    out.push_str(if last_is_total { "</tfoot>\n</table></div>\n" } else { "</tbody>\n</table></div>\n" });
    out
}

fn push_cell(out: &mut String, cell: &Cell, is_header: bool) {
    let _ = match (cell, is_header) {
        (Cell::Text(raw), true) => write!(out, "<th scope=\"row\">{}</th>", text(raw)),
        (Cell::Number(raw), true) => write!(out, "<th scope=\"row\" class=\"n\">{}</th>", text(raw)),
        (Cell::Text(raw), false) => write!(out, "<td>{}</td>", text(raw)),
        (Cell::Number(raw), false) => write!(out, "<td class=\"n\">{}</td>", text(raw)),
        (Cell::Bar(share), _) => {
            let width = 100.0 * share.clamp(0.0, 1.0);
            write!(
                out,
                "<td aria-hidden=\"true\" style=\"width:40%\"><span class=\"bar\" style=\"width:{width:.1}%\"></span></td>"
            )
        }
    };
}

/// A section with a heading. Empty without content.
pub(super) fn section(id: &str, title: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    format!("<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{}</h2>\n{content}</section>\n", text(title))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        assert_eq!(text("<b a='1'>&\x1b\n"), "&lt;b a=&#39;1&#39;&gt;&amp;\\u{1b}\\n");
        assert_eq!(block("a\tb\r\n<c>\u{202e}\n"), "a\tb\n&lt;c&gt;\\u{202e}");
    }

    #[test]
    fn tables_have_headers_and_bars_are_bounded() {
        let rows = [vec![Cell::Text("<a>".into()), Cell::Number("1".into()), Cell::Bar(f64::NAN)]];
        let table = table("c", &["name", "value", ""], &rows, false);
        assert!(table.contains("value</th><td></td></tr></thead>"), "no empty header: {table}");
        assert!(table.contains("<th scope=\"row\">&lt;a&gt;</th><td class=\"n\">1</td>"), "{table}");
        assert!(table.contains("<th scope=\"col\" class=\"n\">value</th>"), "{table}");
        assert!(section("id", "title", "").is_empty());
    }
}
