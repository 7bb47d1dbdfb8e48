//! Limits on the values that a template creates: on the size of each, on their total size, and on their nesting.
//!
//! Templates come with downloaded models and are untrusted. [`lower`](super::lower) passes every value that a template
//! creates through the filters here. The size of a result is counted; if it may be much larger than its operands, it
//! is estimated before the operation runs. Memory is therefore at most [`MAX_TOTAL_BYTES`], plus a small multiple of
//! [`MAX_VALUE_BYTES`] while an operation runs. A list counts with its fully expanded size, so that a list that
//! contains the same list twice, and so on, cannot be an exponential tree of a few bytes.
//!
//! Not limited: time beyond the number of instructions. Each instruction may visit a value of [`MAX_VALUE_BYTES`].

use lockstep_core::Bytes;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

/// The largest value: bytes of text, or [`NODE_BYTES`] per element.
pub(crate) const MAX_VALUE_BYTES: usize = 32 << 20;
/// The total size of all values that one rendering creates.
pub(crate) const MAX_TOTAL_BYTES: usize = 256 << 20;
/// The elements that one rendering may visit to measure values.
const MAX_VISITS: u64 = 200_000_000;
/// The deepest nesting of lists and maps. Values are visited by recursion.
const MAX_DEPTH: usize = 160;
/// The memory of a list element.
const NODE_BYTES: usize = 32;
/// The memory that each declaration of a macro keeps.
const MACRO_BYTES: usize = 1024;

/// Filters that [`lower`](super::lower) inserts into templates. In place of the operators `~`, `+` and `*`:
pub(crate) const CAT: &str = "__lockstep_cat";
pub(crate) const ADD: &str = "__lockstep_add";
pub(crate) const MUL: &str = "__lockstep_mul";
/// Around a value that was just created.
pub(crate) const NEW: &str = "__lockstep_new";
/// Around a value that is iterated over.
pub(crate) const ITER: &str = "__lockstep_iter";
/// Where memory is kept that is not a value.
pub(crate) const CHARGE: &str = "__lockstep_charge";

/// The resources that one rendering has used so far.
#[derive(Default)]
struct RenderUsage {
    bytes: usize,
    visits: u64,
}

/// Adds the filters above, and bounded versions of the engine's filters whose results can be much larger than their
/// arguments.
pub(crate) fn install(env: &mut Environment<'static>) {
    env.add_filter(NEW, |state: &mut State, value: Value| count_new(state, value));
    env.add_filter(CAT, |state: &mut State, a: Value, b: Value| concat(state, &a, &b));
    env.add_filter(ADD, |state: &mut State, a: Value, b: Value| add(state, &a, &b));
    env.add_filter(MUL, |state: &mut State, a: Value, b: Value| multiply(state, &a, &b));
    env.add_filter(ITER, |value: Value| check(iteration_bytes(&value)).map(|()| value));
    env.add_filter(CHARGE, |state: &mut State, value: Value| charge(state, MACRO_BYTES).map(|()| value));
    // Prints all variables, of any size. Jinja in transformers has no such function.
    env.remove_global("debug");
    macro_rules! bounded {
        ($($name:ident)*) => {$({
            const PLAIN: &str = concat!("__lockstep_plain_", stringify!($name));
            env.add_filter(PLAIN, filters::$name);
            env.add_filter(stringify!($name), |state: &mut State, mut args: Rest<Value>, kwargs: Kwargs| {
                if kwargs.args().next().is_some() {
                    args.0.push(kwargs.into());
                }
                check(estimated_bytes(state, stringify!($name), &args)?)?;
                state.apply_filter(PLAIN, &args)
            });
        })*};
    }
    bounded! { join replace indent format batch slice split lines pprint }
    bounded! { list sort unique map select reject selectattr rejectattr reverse zip chain groupby min max sum }
}

/// Counts a value of `bytes` that is about to be created.
pub(crate) fn charge(state: &mut State, bytes: usize) -> Result<(), Error> {
    check(bytes)?;
    let usage = state.get_or_insert_extension_with(RenderUsage::default);
    usage.bytes = usage.bytes.saturating_add(bytes);
    if usage.bytes > MAX_TOTAL_BYTES {
        return Err(limit_exceeded(format!("the values exceed {} in total", Bytes(MAX_TOTAL_BYTES as u64))));
    }
    Ok(())
}

/// Checks that a value of `bytes` is within the limit.
pub(crate) fn check(bytes: usize) -> Result<(), Error> {
    if bytes <= MAX_VALUE_BYTES {
        return Ok(());
    }
    Err(limit_exceeded(format!("a value exceeds {}", Bytes(MAX_VALUE_BYTES as u64))))
}

fn limit_exceeded(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// Counts a value that was created, and refuses one that is too large.
fn count_new(state: &mut State, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => charge(state, value.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let size = measure(state, &value)?;
            charge(state, size.items.saturating_mul(NODE_BYTES))?;
        }
        _ => {}
    }
    Ok(value)
}

/// The size of a value when it is fully expanded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ValueSize {
    pub(crate) bytes: usize,
    /// Direct elements.
    pub(crate) items: usize,
    /// Elements at all levels, and the depth of their nesting.
    pub(crate) nodes: usize,
    pub(crate) depth: usize,
}

/// Measures a value, up to the limits.
pub(crate) fn measure(state: &mut State, value: &Value) -> Result<ValueSize, Error> {
    let mut size = ValueSize::default();
    let walked = walk(value, 0, &mut size);
    let usage = state.get_or_insert_extension_with(RenderUsage::default);
    usage.visits += size.nodes as u64;
    if usage.visits > MAX_VISITS {
        return Err(limit_exceeded(format!("the template visits more than {MAX_VISITS} elements")));
    }
    walked.map(|()| size)
}

fn walk(value: &Value, depth: usize, size: &mut ValueSize) -> Result<(), Error> {
    size.nodes += 1;
    size.items += usize::from(depth == 1);
    size.depth = size.depth.max(depth);
    size.bytes += NODE_BYTES;
    if depth > MAX_DEPTH {
        return Err(limit_exceeded(format!("values are nested more than {MAX_DEPTH} levels deep")));
    }
    match value.kind() {
        ValueKind::String => size.bytes += value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                walk(&item, depth + 1, size)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                size.bytes += key.as_str().map_or(0, str::len);
                walk(&value.get_item(&key)?, depth + 1, size)?;
            }
        }
        _ => {}
    }
    check(size.bytes)
}

/// The text of a value, printed by `show` and counted.
pub(crate) fn shown(
    state: &mut State,
    value: &Value,
    show: impl FnOnce(&Value) -> String,
) -> Result<String, Error> {
    if value.as_str().is_none() {
        // Quotes and escapes make the text longer than the value.
        check(measure(state, value)?.bytes.saturating_mul(4))?;
    }
    let text = show(value);
    charge(state, text.len())?;
    Ok(text)
}

fn concat(state: &mut State, a: &Value, b: &Value) -> Result<String, Error> {
    let mut text = String::new();
    for part in [a, b] {
        match part.as_str() {
            Some(part) => {
                check(text.len() + part.len())?;
                text.push_str(part);
            }
            None => {
                let part = shown(state, part, Value::to_string)?;
                check(text.len() + part.len())?;
                text.push_str(&part);
            }
        }
    }
    charge(state, text.len())?;
    Ok(text)
}

fn add(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(state, a.len() + b.len())?;
        return Ok([a, b].concat().into());
    }
    let sum = engine_operator("a + b", a, b)?;
    count_new(state, sum)
}

fn multiply(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    for (value, times) in [(a, b), (b, a)] {
        if matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable) {
            let times = usize::try_from(times.clone()).unwrap_or(0);
            check(measure(state, value)?.bytes.saturating_sub(NODE_BYTES).saturating_mul(times))?;
        }
    }
    let product = engine_operator("a * b", a, b)?;
    count_new(state, product)
}

/// Applies an operator of the engine itself.
fn engine_operator(operator: &'static str, a: &Value, b: &Value) -> Result<Value, Error> {
    let env = Environment::empty();
    let values = Value::from_pairs([("a", a.clone()), ("b", b.clone())]);
    let result = env.compile_expression(operator).and_then(|expression| expression.eval(values));
    // Drop the location, which refers to `operator` and not to the template.
    result.map_err(|e| Error::new(e.kind(), e.detail().unwrap_or_default().to_string()))
}

/// The bytes of the elements that iterating over a value creates. A string's elements are its characters.
fn iteration_bytes(value: &Value) -> usize {
    value.as_str().map_or(0, |text| text.chars().count().saturating_mul(NODE_BYTES))
}

/// An upper bound on the result of the engine's filter or method `name`. The first argument is the value itself.
pub(crate) fn estimated_bytes(state: &mut State, name: &str, args: &[Value]) -> Result<usize, Error> {
    let Some((subject, args)) = args.split_first() else { return Ok(0) };
    let text = subject.as_str();
    let words = strings(args);
    let longest = words.iter().map(String::len).max().unwrap_or(0);
    let largest = || numbers(args).into_iter().max().unwrap_or(0);
    Ok(match (name, text) {
        ("join", _) => {
            let size = measure(state, subject)?;
            let items = text.map_or(size.items, |text| text.chars().count());
            size.bytes.saturating_add(items.saturating_mul(longest))
        }
        ("replace", Some(text)) => {
            let (old, new) = (words.first().map_or("", String::as_str), words.get(1).map_or(0, String::len));
            text.len().saturating_add(text.matches(old).count().saturating_mul(new))
        }
        ("indent", Some(text)) => {
            let lines = text.matches('\n').count() + 1;
            text.len().saturating_add(lines.saturating_mul(largest().max(longest)))
        }
        ("format", Some(text)) => formatted_bytes(state, text, args)?,
        ("split" | "rsplit", Some(text)) => {
            let pieces = match words.first() {
                Some(at) => text.matches(at.as_str()).count() + 1,
                None => text.split_whitespace().count(),
            };
            text.len().saturating_add(pieces.saturating_mul(NODE_BYTES))
        }
        ("lines" | "splitlines", Some(text)) => {
            text.len().saturating_add(text.matches(['\n', '\r']).count().saturating_mul(NODE_BYTES))
        }
        ("batch" | "slice", _) => {
            iteration_bytes(subject).saturating_add(largest().saturating_mul(NODE_BYTES))
        }
        ("pprint", _) => {
            let size = measure(state, subject)?;
            let indent = size.nodes.saturating_mul(size.depth).saturating_mul(8);
            size.bytes.saturating_mul(4).saturating_add(indent)
        }
        _ => iteration_bytes(subject),
    })
}

/// An upper bound on the result of `format`: each placeholder may hold the longest argument, and any number in the
/// pattern may be a width.
fn formatted_bytes(state: &mut State, pattern: &str, args: &[Value]) -> Result<usize, Error> {
    let placeholders = pattern.matches(['%', '{']).count();
    let mut longest = 0usize;
    for arg in args {
        longest = longest.max(measure(state, arg)?.bytes);
    }
    let is_digit = |c: char| c.is_ascii_digit();
    let mut widths = pattern.split(|c| !is_digit(c)).filter(|run| !run.is_empty());
    let in_pattern = widths.try_fold(0usize, |sum, run| sum.checked_add(run.parse().ok()?));
    // A width may also be an argument: `%*d`, `{:{}}`.
    let nested =
        pattern.contains('*') || pattern.split('{').any(|part| part.contains(':') && !part.contains('}'));
    let in_args = if nested { numbers(args).into_iter().max().unwrap_or(0) } else { 0 };
    let widths = in_pattern.unwrap_or(usize::MAX).saturating_add(in_args.saturating_mul(placeholders));
    let texts = placeholders.saturating_mul(longest.saturating_mul(4));
    Ok(pattern.len().saturating_add(texts).saturating_add(widths))
}

/// The strings among the arguments, including keyword arguments.
fn strings(args: &[Value]) -> Vec<String> {
    each(args).filter_map(|arg| arg.as_str().map(str::to_string)).collect()
}

/// The integers among the arguments, including keyword arguments. Negative numbers count as 0.
fn numbers(args: &[Value]) -> Vec<usize> {
    each(args).filter(|arg| arg.is_number()).map(|arg| usize::try_from(arg).unwrap_or(0)).collect()
}

fn each(args: &[Value]) -> impl Iterator<Item = Value> + '_ {
    args.iter().flat_map(|arg| match arg.kind() {
        ValueKind::Map => {
            let values = arg.try_iter().into_iter().flatten();
            values.filter_map(|key| arg.get_item(&key).ok()).collect()
        }
        _ => vec![arg.clone()],
    })
}

#[cfg(test)]
#[path = "bounds_tests.rs"]
mod tests;
