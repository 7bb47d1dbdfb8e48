//! Configures the template engine like transformers configures Jinja: the same whitespace rules, filters,
//! functions and methods, and Python's way of printing values.
//!
//! Templates come with downloaded models and are untrusted, so their work is bounded: [`FUEL`] instructions per
//! rendering, values within [`bounds`], no access to files and no clock. Not supported: the `%` operator on
//! strings, and methods that modify a list or a map, which transformers' sandbox forbids too.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior};
use minijinja_contrib::pycompat;

use super::bounds;
use super::date_time::DateTime;
use super::repr::{self, JsonStyle};
use super::tags::{self, SpanMarkers};

/// The instructions that one rendering may execute: enough for tens of thousands of turns.
pub(crate) const FUEL: u64 = 20_000_000;

/// The prefix that distinguishes messages of `raise_exception` from errors of the engine.
pub(crate) const RAISED: &str = "raise_exception: ";

/// An engine without templates.
pub(crate) fn environment(now: DateTime) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(FUEL));
    // Line numbers are available without debug mode, which would only add dumps of variables, including conversations.
    env.set_debug(false);
    env.set_formatter(|out, state, value| match value.as_str() {
        Some(text) => {
            bounds::charge(state, text.len())?;
            Ok(out.write_str(text)?)
        }
        None => Ok(out.write_str(&bounds::shown(state, value, repr::str)?)?),
    });
    env.set_unknown_method_callback(method);
    bounds::install(&mut env);
    env.add_filter("tojson", to_json);
    env.add_filter("string", |state: &mut State, value: Value| bounds::shown(state, &value, repr::str));
    env.add_filter(
        "trim",
        |state: &mut State, value: Value, chars: Option<String>| -> Result<String, Error> {
            Ok(strip(&bounds::shown(state, &value, repr::str)?, chars.as_deref(), true, true))
        },
    );
    env.add_filter(tags::FILTER, |body: &str, markers: &str| SpanMarkers::put_around(body, markers));
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    for name in ["default", "d"] {
        env.add_filter(name, default);
    }
    env.add_filter("int", |value: &Value, other: Option<i64>| match to_number(value) {
        // Parse integers as integers: going through a float would round large ones.
        _ if value.is_integer() => value.clone(),
        Some(float) => match repr::str(value).trim().parse::<i64>() {
            Ok(whole) => whole.into(),
            Err(_) => (float as i64).into(),
        },
        None => other.unwrap_or(0).into(),
    });
    env.add_filter("float", |value: &Value, other: Option<f64>| to_number(value).or(other).unwrap_or(0.0));
    env.add_filter("wordcount", |state: &mut State, value: Value| -> Result<usize, Error> {
        Ok(bounds::shown(state, &value, repr::str)?.split_whitespace().count())
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    // In Python, strings are sequences and None is not iterable.
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    env.add_function("raise_exception", |state: &mut State, message: Value| -> Result<Value, Error> {
        let message = bounds::shown(state, &message, repr::str)?;
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_function("strftime_now", move |format: &str| {
        let unknown =
            |directive| Error::new(ErrorKind::InvalidOperation, format!("unknown directive {directive}"));
        now.format(format).map_err(unknown)
    });
    env
}

/// The whitespace rules around tags, as in transformers.
pub(crate) fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the standard delimiters differ")
}

/// Undefined values have length 0, as in Jinja.
fn length(value: &Value) -> Result<usize, Error> {
    let none = || Error::new(ErrorKind::InvalidOperation, format!("{} has no length", value.kind()));
    if value.is_undefined() { Ok(0) } else { value.len().ok_or_else(none) }
}

fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let [other, boolean] = by_name(&args, &kwargs, ["default_value", "boolean"])?;
    let asked = boolean.is_some_and(|flag| flag.is_true());
    let missing = value.is_undefined() || (asked && !value.is_true());
    Ok(if missing { other.unwrap_or_else(|| "".into()) } else { value.clone() })
}

/// Positional or keyword arguments, as in a Python call.
fn by_name<const N: usize>(
    args: &[Value],
    kwargs: &Kwargs,
    names: [&'static str; N],
) -> Result<[Option<Value>; N], Error> {
    if args.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut given = [const { None }; N];
    for (idx, name) in names.into_iter().enumerate() {
        given[idx] = match args.get(idx) {
            Some(value) => Some(value.clone()),
            None if kwargs.has(name) => Some(kwargs.get(name)?),
            None => None,
        };
    }
    kwargs.assert_all_used()?;
    Ok(given)
}

/// Python's `float` for numbers and strings.
fn to_number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    }
}

/// transformers' `tojson`: `json.dumps` with the arguments that templates may pass.
fn to_json(state: &mut State, value: Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let given = by_name(&args, &kwargs, names)?.map(|value| value.filter(|value| !value.is_none()));
    let [ascii, indent, separators, sort] = given;
    let indent = match indent {
        Some(text) if text.kind() == ValueKind::String => Some(repr::str(&text)),
        Some(levels) => Some(" ".repeat(i64::try_from(levels)?.clamp(0, 64) as usize)),
        None => None,
    };
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            let part = |idx| pair.get_item_by_index(idx).map(|part| repr::str(&part));
            (part(0)?, part(1)?)
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let on = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let style =
        JsonStyle { ensure_ascii: on(ascii), indent, item_separator, key_separator, sort_keys: on(sort) };
    let size = bounds::measure(state, &value)?;
    let indent = style.indent.as_ref().map_or(0, |indent| indent.len() + 1).saturating_mul(size.depth + 1);
    let each = indent.saturating_add(style.item_separator.len()).saturating_add(style.key_separator.len());
    bounds::check(size.bytes.saturating_add(size.nodes.saturating_mul(each)))?;
    let text = repr::json(&value, &style)?;
    bounds::charge(state, text.len())?;
    Ok(text)
}

/// Methods that Python's values have and the engine's do not.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let mut all = vec![value.clone()];
    all.extend_from_slice(args);
    if name == "join" {
        // The method is called on the separator, the filter on the list.
        all.reverse();
    }
    if matches!(name, "join" | "replace" | "format" | "split" | "rsplit" | "splitlines") {
        bounds::check(bounds::estimated_bytes(state, name, &all)?)?;
    }
    match (value.as_str(), name) {
        (Some(text), "strip" | "lstrip" | "rstrip") => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Ok(strip(text, chars, name != "rstrip", name != "lstrip").into())
        }
        (Some(text), "rsplit") if !args.is_empty() => {
            let (at, most): (&str, Option<i64>) = from_args(args)?;
            // A negative number, which is the default, means no limit.
            let most = most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most + 1);
            let parts: Vec<Value> = text.rsplitn(most, at).map(Value::from).collect();
            Ok(parts.into_iter().rev().collect())
        }
        (Some(text), "removeprefix") => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        (Some(text), "removesuffix") => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        (Some(text), "partition") => {
            let (at,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(at).unwrap_or((text, ""));
            let found = if text.contains(at) { at } else { "" };
            Ok(Tuple::from([before, found, after].map(Value::from)).into())
        }
        (Some(text), "join") => {
            let (items,): (&Value,) = from_args(args)?;
            let mut joined = String::new();
            for (idx, item) in items.try_iter()?.enumerate() {
                joined.push_str(if idx == 0 { "" } else { text });
                joined.push_str(&repr::str(&item));
                bounds::check(joined.len())?;
            }
            Ok(joined.into())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `str.strip` and its halves.
fn strip(text: &str, chars: Option<&str>, start: bool, end: bool) -> String {
    let stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(stripped) } else { text };
    let text = if end { text.trim_end_matches(stripped) } else { text };
    text.to_string()
}

/// Python's whitespace: Unicode's, and four control characters that separate information.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
