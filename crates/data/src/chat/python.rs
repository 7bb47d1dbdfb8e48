//! The engine set up as transformers sets up Jinja: the same whitespace rules, filters, functions and
//! methods, with Python's way of printing.
//!
//! Templates come with models from strangers, so work is bounded: [`FUEL`] instructions a rendering, values
//! within [`bounds`], no access to files, no clock. Left out: the `%` operator on strings, and methods that change a
//! list or a map, which the peers forbid too.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior};
use minijinja_contrib::pycompat;

use super::bounds;
use super::clock::Moment;
use super::repr::{self, JsonStyle};
use super::tags::{self, Marks};

/// Instructions that one rendering may take: enough for tens of thousands of turns.
pub(crate) const FUEL: u64 = 20_000_000;

/// What `raise_exception` puts before the template's own words, so that they can be told from ours.
pub(crate) const RAISED: &str = "raise_exception: ";

/// An engine without templates.
pub(crate) fn environment(now: Moment) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(FUEL));
    // Lines are kept without it; what it adds are dumps of variables, a conversation among them.
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
    env.add_filter(tags::FILTER, |body: &str, marks: &str| Marks::put_around(body, marks));
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    for name in ["default", "d"] {
        env.add_filter(name, default);
    }
    env.add_filter("int", |value: &Value, other: Option<i64>| match to_number(value) {
        // Texts of whole numbers are read as such: a float would round large ones.
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
    // Python counts texts among the sequences, and does not iterate over None.
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

/// Whitespace around tags as the peers treat it.
pub(crate) fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the standard delimiters differ")
}

/// Undefined values have no elements, rather than no length.
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

/// Arguments by place or by name, as Python takes them.
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

/// What `float` makes of numbers and texts.
fn to_number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    }
}

/// transformers' `tojson`: `json.dumps` with what it lets templates choose.
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
    let measured = bounds::measure(state, &value)?;
    let indent =
        style.indent.as_ref().map_or(0, |indent| indent.len() + 1).saturating_mul(measured.depth + 1);
    let each = indent.saturating_add(style.item_separator.len()).saturating_add(style.key_separator.len());
    bounds::check(measured.bytes.saturating_add(measured.nodes.saturating_mul(each)))?;
    let text = repr::json(&value, &style)?;
    bounds::charge(state, text.len())?;
    Ok(text)
}

/// Methods that Python's values have and the engine's have not.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let mut all = vec![value.clone()];
    all.extend_from_slice(args);
    if name == "join" {
        // A text joins what it is given; as a filter it is the other way round.
        all.reverse();
    }
    if matches!(name, "join" | "replace" | "format" | "split" | "rsplit" | "splitlines") {
        bounds::check(bounds::foreseen(state, name, &all)?)?;
    }
    match (value.as_str(), name) {
        (Some(text), "strip" | "lstrip" | "rstrip") => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Ok(strip(text, chars, name != "rstrip", name != "lstrip").into())
        }
        (Some(text), "rsplit") if !args.is_empty() => {
            let (at, most): (&str, Option<i64>) = from_args(args)?;
            // A negative number, the default, means any number of cuts.
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
    let gone = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(gone) } else { text };
    let text = if end { text.trim_end_matches(gone) } else { text };
    text.to_string()
}

/// What Python calls white space: Unicode's, and four old separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
