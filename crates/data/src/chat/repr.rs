//! Prints values like Python: `str`, `repr` and `json.dumps`.
//!
//! Templates were written for Python, and their output becomes tokens: one space more or less changes the
//! token sequence. Not exact: instead of Python's full table of unprintable characters, `repr` treats control,
//! space, format and private-use characters as unprintable.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The arguments of `json.dumps`.
#[derive(Debug)]
pub(crate) struct JsonStyle {
    pub(crate) ensure_ascii: bool,
    /// The indentation of one level; `None` prints everything on one line.
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

/// `json.dumps(value)` in `style`.
pub(crate) fn json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

/// `str(value)`.
pub(crate) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_string(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value);
    out
}

fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => out.push_str(&number(value)),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            out.push(open);
            for (idx, item) in items.iter().enumerate() {
                out.push_str(if idx == 0 { "" } else { ", " });
                write_repr(out, item);
            }
            out.push_str(if value.is_tuple() && items.len() == 1 { "," } else { "" });
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (idx, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if idx == 0 { "" } else { ", " });
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        ValueKind::Undefined => out.push_str("Undefined"),
        _ => out.push_str(&value.to_string()),
    }
}

fn quote(out: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c if (c as u32) < 0x100 => put(out, format_args!("\\x{:02x}", c as u32)),
            c if (c as u32) < 0x10000 => put(out, format_args!("\\u{:04x}", c as u32)),
            c => put(out, format_args!("\\U{:08x}", c as u32)),
        }
    }
    out.push(mark);
}

fn printable(c: char) -> bool {
    let invisible = matches!(c as u32,
        0xad | 0x200b..=0x200f | 0x202a..=0x202e | 0x2060..=0x206f | 0xfeff | 0xfff9..=0xfffb
        | 0xe000..=0xf8ff | 0xf0000..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

/// `repr` of a number.
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_repr(float),
        _ => value.to_string(),
    }
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float == 0.0 || (-4..16).contains(&exponent) {
        let text = float.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&json_number(value)),
        ValueKind::String => json_string(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let close = if items.is_empty() { None } else { Some(depth) };
            out.push('[');
            for (idx, item) in items.iter().enumerate() {
                separate(out, style, idx, depth + 1);
                write_json(out, item, style, depth + 1)?;
            }
            finish(out, style, close, ']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            let close = if keys.is_empty() { None } else { Some(depth) };
            out.push('{');
            for (idx, key) in keys.iter().enumerate() {
                separate(out, style, idx, depth + 1);
                json_string(out, &json_key(key)?, style);
                out.push_str(&style.key_separator);
                write_json(out, &value.get_item(key)?, style, depth + 1)?;
            }
            finish(out, style, close, '}');
        }
        ValueKind::Undefined => return Err(not_json("an undefined value")),
        other => return Err(not_json(&format!("a value of type {other}"))),
    }
    Ok(())
}

fn separate(out: &mut String, style: &JsonStyle, idx: usize, depth: usize) {
    if idx > 0 {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth);
}

fn finish(out: &mut String, style: &JsonStyle, depth: Option<usize>, close: char) {
    if let Some(depth) = depth {
        new_line(out, style, depth);
    }
    out.push(close);
}

fn new_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(indent.as_str(), depth));
    }
}

fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true".into() } else { "false".into() }),
        ValueKind::Number => Ok(json_number(key)),
        other => Err(not_json(&format!("a key of type {other}"))),
    }
}

fn json_number(value: &Value) -> String {
    match number(value).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        text => text.into(),
    }
}

fn json_string(out: &mut String, text: &str, style: &JsonStyle) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => put(out, format_args!("\\u{:04x}", c as u32)),
            c if style.ensure_ascii && !(' '..='~').contains(&c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    put(out, format_args!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn not_json(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is not JSON serializable"))
}

fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a String cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        // Python 3.11: [repr(x) for x in ...].
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1.797e308, "1.797e+308"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (float, text) in cases {
            assert_eq!(float_repr(float), text);
        }
    }
}
